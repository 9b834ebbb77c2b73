from __future__ import annotations

import pytest

from tests.analyzers.symptoms.cases import DEEPSPEED, MEGATRON, found, told
from tests.analyzers.test_hand_calculations import pipeline, slower


def heavy(stage: int, ranks: int = 4):
    return told(pipeline("1F1B", ranks=ranks, microbatches=16, duration=slower(2, stage=stage)).trace())


def test_a_heavy_last_stage_is_known_by_what_it_holds() -> None:
    symptom = found(heavy(3), MEGATRON)["heavy-ends"]
    assert symptom.evidence[1] == "stage 3: 60.0 ms a microbatch; the stages between the ends: 30.0 ms on average"
    assert "output layer" in symptom.advice[0].action
    assert "--account-for-loss-in-pipeline-split" in symptom.advice[0].how
    # 1F1B, stage 3 of 60 ms: 3 x 30 + 16 x 60 + 1 = 1051; the same work evenly, 37.5 ms each: 19 x 37.5 + 1 = 713.5
    assert symptom.advice[0].gain_fraction == pytest.approx(337.5 / 1051)
    assert symptom.advice[0].gain_range == pytest.approx((337.5 / 1051, 337.5 / 1051))
    assert "embedding" in found(heavy(0), MEGATRON)["heavy-ends"].advice[0].action


@pytest.mark.parametrize(
    ("trace", "framework"),
    [
        (heavy(1), MEGATRON),
        (heavy(1, ranks=2), MEGATRON),
        (heavy(3), DEEPSPEED),
        (pipeline("1F1B", ranks=4, microbatches=16).trace(), MEGATRON),
    ],
    ids=["a stage between", "both stages are ends", "DeepSpeed has its own", "equal stages"],
)
def test_other_stages_are_left_to_imbalance(trace, framework) -> None:
    assert "heavy-ends" not in found(trace, framework)
