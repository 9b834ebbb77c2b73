from __future__ import annotations

import pytest

from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import found, told
from tests.analyzers.test_hand_calculations import pipeline


def timed(env, milliseconds: int = 10):
    return told(pipeline(transfer=lambda _a, _b: milliseconds * MS).trace(), env=env)


def test_timing_inside_nccl_is_pointed_out_where_communication_costs() -> None:
    env = {"TORCH_NCCL_ENABLE_TIMING": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    symptom = found(timed(env))["timed-collectives"]
    assert symptom.evidence[0] == "TORCH_NCCL_ENABLE_TIMING=1, CUDA_DEVICE_MAX_CONNECTIONS 1"
    # 4 messages of 10 ms in a row: 40 of 131 ms
    assert symptom.evidence[1] == "communication 30.5 % of the step"


@pytest.mark.parametrize(
    "trace",
    [timed({}), timed({"TORCH_NCCL_ENABLE_TIMING": "0"}), timed({"TORCH_NCCL_ENABLE_TIMING": "1"}, milliseconds=0)],
    ids=["unset", "off", "no communication"],
)
def test_otherwise_it_is_not(trace) -> None:
    assert "timed-collectives" not in found(trace)
