"""Everything is computed twice: full activation recomputation.

What it finds: Arguments that recompute all activations in the backward, and what the second forward costs.

Why it matters: Full recomputation adds a forward to each backward: a quarter of the work of a step where a backward is
two forwards. It is often switched on for one memory peak and stays.

What to try: Recompute the attention's core only, or recompute on the stages that need the memory, the first ones.

Source: NVIDIA/Megatron-LM#1031; Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
(2022).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.replay import World
from ppdiag.analyzers.symptoms import in_words_of, severity
from ppdiag.diagnosis import WORTH_SAYING, Advice, Symptom, percent
from ppdiag.model import Kind

if TYPE_CHECKING:
    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="--recompute-granularity selective instead of full",
    torch="checkpoint_wrapper on attention only; torchtitan: activation_checkpoint.mode = 'selective'",
    deepspeed="a larger activation_checkpoint_interval of PipelineModule, or 0 where memory has room",
    other="checkpoint fewer modules",
)
MEASURE_AFTER = "peak memory of each stage, and the time of B in the stage table"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where the arguments say so, and a backward without its second forward would save 5 % of the step."""
    said = recomputes_all(evidence)
    if not said:
        return None
    gain = evidence.gain(without_second_forward).fraction
    if gain < WORTH_SAYING:
        return None
    stages = evidence.diagnosis.stages
    forward_s, backward_s = (float(np.mean([getattr(s, n) for s in stages])) for n in ("forward_s", "backward_s"))
    peaks = [stage.peak_memory_bytes for stage in stages if stage.peak_memory_bytes is not None]
    memory = f"; the fullest stage holds {max(peaks) / 2**30:.1f} GiB" if peaks else ""
    advice = Advice(
        action="Recompute less, where memory has room",
        how=evidence.says(HOW),
        gain_fraction=gain,
        source="replay of the run with each backward shorter by its stage's forward: an upper bound",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        f"{said} is among the arguments",
        (
            f"F {forward_s * 1e3:.1f} ms, B {backward_s * 1e3:.1f} ms on average: a second forward is up to "
            f"{percent(min(1.0, forward_s / backward_s) if backward_s else 0.0)} of each backward{memory}"
        ),
    )
    return Symptom("full-recompute", "Everything is computed twice", severity(gain), numbers, (advice,))


def recomputes_all(evidence: Evidence) -> str:
    """The argument that asks for full recomputation; empty where there is none."""
    options = evidence.options
    if options.get("recompute-granularity") == "full":
        return "--recompute-granularity full"
    if options.get("activation-checkpoint.mode") == "full":
        return "--activation_checkpoint.mode full"
    return ""


def without_second_forward(graph: Graph) -> World:
    """Each backward takes as much less time as a forward of its stage takes (the median), but not less than none."""
    work_NK = graph.work_NK.copy()
    for stage in np.unique(graph.stage_N[graph.stage_N >= 0]):
        own = graph.stage_N == stage
        forwards = graph.work_NK[own & (graph.kind_N == Kind.FORWARD)]
        backward = own & (graph.kind_N == Kind.BACKWARD)
        if forwards.size:
            work_NK[backward] = np.maximum(work_NK[backward] - np.median(forwards), 0.0)
    return World(work_NK=work_NK)
