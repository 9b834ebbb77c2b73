"""Multi-token prediction makes the last stage heavy.

What it finds: Imbalance is the verdict at the last stage, and the arguments ask for layers that predict further
tokens.

Why it matters: Each such layer is a transformer layer with an output layer and a loss of its own, and all of them lie
on the last stage by default.

What to try: Spread them, or the layers before them, over other stages.

Source: NVIDIA/Megatron-LM PR#5318.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of, is_verdict, severity
from ppdiag.analyzers.symptoms.imbalance import if_general
from ppdiag.diagnosis import Advice, Cause, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="--pipeline-model-parallel-layout with fewer t on the stage that holds m and L",
    other="fewer layers on the stage that holds the further output layers",
)
MEASURE_AFTER = "compute time of each stage: within 10 % of each other"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where imbalance is the verdict at the last stage of a job with such layers."""
    count, stages = mtp_layers(evidence), evidence.diagnosis.stages
    last = len(stages) - 1
    if not count or not is_verdict(evidence, Cause.IMBALANCE) or evidence.diagnosis.verdict.stage != last:
        return None
    share = evidence.diagnosis.why.imbalance
    gain = evidence.gain_of_evening_out("stage")
    advice = Advice(
        action=f"Take layers off stage {last}, which holds the layers that predict further tokens",
        how=evidence.says(HOW),
        gain_fraction=gain.fraction,
        gain_range=gain.over_steps,
        source="replay of the run with all stages alike, which layers can only come near to",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        f"imbalance {percent(share)} of the step",
        (
            f"--mtp-num-layers {count}; stage {last}: F {stages[-1].forward_s * 1e3:.1f} ms, "
            f"B {stages[-1].backward_s * 1e3:.1f} ms"
        ),
    )
    return Symptom(
        "mtp-on-last-stage",
        "Multi-token prediction on the last stage",
        severity(share),
        numbers,
        (advice,),
        if_general(evidence),
    )


def mtp_layers(evidence: Evidence) -> int:
    """Layers that predict further tokens, by the arguments; 0 where none are asked for."""
    text = evidence.options.get("mtp-num-layers", "")
    return int(text) if text.isdecimal() and len(text) < 4 else 0
