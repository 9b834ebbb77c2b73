from __future__ import annotations

import pytest

from tests.analyzers.symptoms.cases import MEGATRON, found, told
from tests.analyzers.test_hand_calculations import pipeline, slower


def heavy(stage: int, *arguments: str):
    trace = pipeline("1F1B", ranks=4, microbatches=16, duration=slower(2, stage=stage)).trace()
    return found(told(trace, *arguments), MEGATRON)


def test_layers_that_predict_further_tokens_explain_a_heavy_last_stage() -> None:
    symptoms = heavy(3, "--mtp-num-layers", "1")
    symptom = symptoms["mtp-on-last-stage"]
    assert symptom.evidence[1] == "--mtp-num-layers 1; stage 3: F 20.0 ms, B 40.0 ms"
    assert symptom.advice[0].gain_fraction == pytest.approx(337.5 / 1051)
    assert "heavy-ends" not in symptoms


@pytest.mark.parametrize(
    ("stage", "arguments"),
    [(0, ("--mtp-num-layers", "1")), (3, ()), (3, ("--mtp-num-layers", "0")), (3, ("--mtp-num-layers", "many"))],
)
def test_another_stage_or_no_such_layer_does_not(stage: int, arguments: tuple[str, ...]) -> None:
    assert "mtp-on-last-stage" not in heavy(stage, *arguments)
