from __future__ import annotations

import pytest

from tests.analyzers.symptoms.cases import DEEPSPEED, MEGATRON, found, told
from tests.analyzers.test_hand_calculations import pipeline

FOUR_STAGES = pipeline("1F1B", ranks=4, microbatches=8)


def test_layers_that_are_left_over_are_counted() -> None:
    symptom = found(told(FOUR_STAGES.trace(), "--num-layers", "30"), MEGATRON)["layers-not-divisible"]
    assert symptom.evidence == ("--num-layers 30, and 4 stages: 2 layers are left over",)
    assert "--pipeline-model-parallel-layout" in symptom.advice[0].how


@pytest.mark.parametrize(
    ("framework", "arguments"),
    [
        (MEGATRON, ("--num-layers", "32")),
        (MEGATRON, ("--num-layers", "30", "--decoder-last-pipeline-num-layers", "6")),
        (MEGATRON, ("--num-layers", "30", "--account-for-embedding-in-pipeline-split")),
        (MEGATRON, ("--num-layers", "many")),
        (MEGATRON, ()),
        (DEEPSPEED, ("--num-layers", "30")),
    ],
)
def test_layers_that_fit_or_are_laid_out_otherwise_are_not_spoken_of(
    framework: str, arguments: tuple[str, ...]
) -> None:
    assert "layers-not-divisible" not in found(told(FOUR_STAGES.trace(), *arguments), framework)
