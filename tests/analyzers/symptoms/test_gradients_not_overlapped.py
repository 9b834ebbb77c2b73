from __future__ import annotations

import pytest

from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import MEGATRON, found, told
from tests.analyzers.test_hand_calculations import pipeline

ONE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def reduced(milliseconds: int, *arguments: str, env=None):
    trace = pipeline("1F1B", microbatches=4, replicas=2, tail=milliseconds * MS).trace()
    return told(trace, *arguments, env=env or ONE)


def test_one_queue_without_tensor_parallelism_is_pointed_out_where_collectives_cost() -> None:
    symptom = found(reduced(50), MEGATRON, tp=1, dp=2)["gradients-not-overlapped"]
    assert symptom.evidence[0] == "CUDA_DEVICE_MAX_CONNECTIONS=1, TP=1, DP=2"
    assert symptom.evidence[1].startswith("the ranks stand in collectives for ")
    assert symptom.advice[0].how.startswith("unset CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.mark.parametrize(
    ("trace", "tp"),
    [
        (reduced(50), 2),
        (reduced(50, "--context-parallel-size", "2"), 1),
        (reduced(50, env={"CUDA_DEVICE_MAX_CONNECTIONS": "8"}), 1),
        (reduced(1), 1),
    ],
    ids=["tensor parallelism", "context parallelism", "more queues", "cheap collectives"],
)
def test_where_it_is_needed_or_costs_nothing_it_is_not(trace, tp: int) -> None:
    assert "gradients-not-overlapped" not in found(trace, MEGATRON, tp=tp, dp=2)
