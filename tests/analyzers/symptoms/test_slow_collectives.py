from __future__ import annotations

import pytest

from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import MEGATRON, found
from tests.analyzers.test_depth import tensor_parallel
from tests.analyzers.test_hand_calculations import pipeline


def test_a_slow_reduction_of_gradients_is_not_met_by_laying_out_the_pipeline_anew() -> None:
    # a step of 91 ms and 200 ms of all-reduce over two replicas, none of which overlaps
    symptoms = found(pipeline(replicas=2, tail=200 * MS).trace(), MEGATRON)
    assert "slow-network" not in symptoms
    symptom = symptoms["slow-collectives"]
    assert symptom.evidence[0].endswith("without collectives it would be 68.7 % shorter")  # 200 / 291
    assert symptom.advice[0].gain_fraction == pytest.approx(200 / 291)
    assert symptom.evidence[2] == "0.0 % of the collectives' time lies inside forwards and backwards"
    assert "--overlap-grad-reduce" in symptom.advice[0].how


def test_collectives_inside_the_ops_are_tensor_parallelisms() -> None:
    # two collectives of 30 ms on the way of the one microbatch, in the middle of each stage's forward
    symptom = found(tensor_parallel(slow=-1, collective=30))["slow-collectives"]
    assert symptom.evidence[2] == "100.0 % of the collectives' time lies inside forwards and backwards"
    assert "tensor parallelism" in symptom.advice[0].action


def test_slow_messages_and_short_collectives_are_not_meant() -> None:
    slow = pipeline("1F1B", ranks=2, microbatches=8, transfer=lambda _a, _b: 40 * MS, replicas=2, tail=5 * MS)
    symptoms = found(slow.trace())
    assert "slow-collectives" not in symptoms
    assert "slow-network" in symptoms
    assert "slow-collectives" not in found(pipeline(replicas=2, tail=2 * MS).trace())
