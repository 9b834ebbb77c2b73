"""The first or the last stage is the heavy one: embedding, output layer and loss were not counted.

What it finds: Imbalance is the verdict, and its stage is the first or the last of three or more.

Why it matters: Equal numbers of layers are no equal work: the output layer over a large vocabulary costs as much as
several layers, and the whole pipeline runs at its pace.

What to try: Fewer layers on that stage, or the output layer split over the tensor-parallel ranks.

Source: NVIDIA/Megatron-Bridge PR#5391, aiconfigurator PR#1459, NVIDIA/Megatron-LM#1304, NVIDIA/Megatron-LM#381.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import DEEPSPEED, in_words_of, is_verdict, severity
from ppdiag.analyzers.symptoms.imbalance import if_general
from ppdiag.analyzers.symptoms.mtp_on_last_stage import mtp_layers
from ppdiag.diagnosis import Advice, Cause, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence
    from ppdiag.diagnosis import StageResult

HOW = in_words_of(
    megatron="--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split, "
    "--decoder-last-pipeline-num-layers, or --pipeline-model-parallel-layout with fewer t beside E and L",
    torch="fewer layers in the PipelineStage that holds the embedding or the output layer",
    other="fewer layers on the stage that holds the embedding or the output layer",
)
MEASURE_AFTER = "compute time of each stage: within 10 % of each other"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where imbalance is the verdict at an end of three stages or more, and nothing more exact is known."""
    stages, stage = evidence.diagnosis.stages, evidence.diagnosis.verdict.stage
    ends = (0, len(stages) - 1)
    if not is_verdict(evidence, Cause.IMBALANCE) or len(stages) < 3 or stage not in ends:
        return None
    if evidence.framework == DEEPSPEED or mtp_layers(evidence):
        return None
    own = next(row for row in stages if row.stage == stage)
    middle = [row for row in stages if row.stage not in ends]
    gain = evidence.gain_of_evening_out("stage")
    advice = Advice(
        action=f"Take layers off stage {stage}: {'its output layer' if stage else 'its embedding'} is work too",
        how=evidence.says(HOW),
        gain_fraction=gain.fraction,
        gain_range=gain.over_steps,
        source="replay of the run with all stages alike, which layers can only come near to",
        measure_after=MEASURE_AFTER,
    )
    share = evidence.diagnosis.why.imbalance
    numbers = (
        f"imbalance {percent(share)} of the step",
        (
            f"stage {stage}: {_work_s(own) * 1e3:.1f} ms a microbatch; the stages between the ends: "
            f"{sum(map(_work_s, middle)) / len(middle) * 1e3:.1f} ms on average"
        ),
    )
    return Symptom(
        "heavy-ends",
        "The first or last stage is the heavy one",
        severity(share),
        numbers,
        (advice,),
        if_general(evidence),
    )


def _work_s(row: StageResult) -> float:
    return row.forward_s + row.backward_s + row.weight_s
