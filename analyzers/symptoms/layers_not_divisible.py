"""A number of layers that the stages do not divide.

What it finds: Megatron's arguments ask for layers that are no multiple of the stages, with no argument that says which
stage has more or fewer.

Why it matters: Each stage builds layers / stages, rounded down: the rest are in no stage, and the model is smaller than
it was asked for. Some versions refuse to start instead.

What to try: Say how the layers are laid out, or take a number that the stages divide.

Source: NVIDIA/Megatron-LM#1304, NVIDIA/Megatron-LM#381.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import MEGATRON, in_words_of
from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

LAYOUTS = (
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "pipeline-model-parallel-layout",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "pipeline-model-parallel-split-rank",
)
"""Arguments that lay layers out in another way."""
HOW = in_words_of(
    megatron="--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers, or "
    "--pipeline-model-parallel-layout",
    other="bounds of your own between the stages",
)
MEASURE_AFTER = "number of parameters that the job prints, and compute time of each stage"


def find(evidence: Evidence) -> Symptom | None:
    """Fires on a job of Megatron whose layers are no multiple of the stages that it ran with."""
    options, stages = evidence.options, len(evidence.diagnosis.stages)
    text = options.get("num-layers", "")
    layers = int(text) if text.isdecimal() and len(text) < 6 else 0
    if evidence.framework not in MEGATRON or layers % max(1, stages) == 0 or not options.keys().isdisjoint(LAYOUTS):
        return None
    advice = Advice(
        action=f"Say which of the {stages} stages have more layers",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="NVIDIA/Megatron-LM#1304, NVIDIA/Megatron-LM#381",
        measure_after=MEASURE_AFTER,
    )
    numbers = (f"--num-layers {layers}, and {stages} stages: {layers % stages} layers are left over",)
    return Symptom("layers-not-divisible", "Layers that the stages do not divide", "warning", numbers, (advice,))
