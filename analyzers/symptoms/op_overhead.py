"""Small ops, and host time before each of them: another schedule would not help.

What it finds: Host time is the largest loss, spread over all ranks and lying between the ops of the pipeline, not
between steps.

Why it matters: Every op pays for Python, launches and the framework's bookkeeping. Where ops are small, cutting the
batch into more microbatches adds as much of it as it saves of the bubble: in the thread below a bubble of 47 % became
30 % and the throughput did not rise.

What to try: Larger microbatches, CUDA graphs, compiled stages, fused operators; fewer virtual stages.

Source: marin-community/marin#6532, sail-sg/zero-bubble-pipeline-parallelism#21, NVIDIA/Megatron-LM#1625.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.steps import pipeline_work
from ppdiag.analyzers.symptoms import in_words_of, is_verdict, severity
from ppdiag.diagnosis import Advice, Cause, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="--cuda-graph-impl local; no --no-rope-fusion; a larger --micro-batch-size",
    torch="torch.compile on each stage's module; a larger microbatch (fewer n_microbatches for the same batch)",
    deepspeed="a larger train_micro_batch_size_per_gpu with as many fewer gradient_accumulation_steps",
    other="larger microbatches; torch.compile or CUDA graphs for the stages",
)
MEASURE_AFTER = "host time of the stage table, and time per sample"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where host time is the verdict, of no single rank, and between ops rather than between steps."""
    diagnosis = evidence.diagnosis
    outside = (diagnosis.phases.tail_s + diagnosis.phases.between_s) / _step_s(evidence)
    if not is_verdict(evidence, Cause.HOST) or diagnosis.verdict.rank is not None:
        return None
    gap_s = diagnosis.where.host * _step_s(evidence) / _ops_of_a_rank(evidence)
    forward_s = float(np.median([stage.forward_s for stage in diagnosis.stages]))
    if outside > diagnosis.where.host / 2:
        return None
    advice = Advice(
        action="Give each op more work, or launch it with less; keep the schedule",
        how=evidence.says(HOW),
        gain_fraction=max(0.0, evidence.gains[Cause.HOST]),
        source="replay of the run without host time: an upper bound",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        f"host {percent(diagnosis.why.host)} of the step, of no single rank",
        f"{gap_s * 1e3:.2f} ms of it before each op; a forward takes {forward_s * 1e3:.2f} ms",
    )
    title = "Host time before every op"
    return Symptom("op-overhead", title, severity(diagnosis.why.host), numbers, (advice,), replaces="host-stall")


def _step_s(evidence: Evidence) -> float:
    phases = evidence.diagnosis.phases
    return phases.pipeline_s + phases.tail_s + phases.between_s


def _ops_of_a_rank(evidence: Evidence) -> float:
    """F, B and W of one rank in one step, on average."""
    steps, spans = evidence.analysis.steps, evidence.trace.spans
    ops = pipeline_work(spans) & np.isin(steps.number, steps.kept)
    return max(1.0, float(ops.sum()) / len(steps.kept) / len(steps.ranks))
