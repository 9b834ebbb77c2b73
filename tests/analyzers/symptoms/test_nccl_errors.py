from __future__ import annotations

from dataclasses import replace

import pytest

from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import found, hung, wait
from tests.analyzers.test_hand_calculations import pipeline

ERROR = {
    "slug": "ib-retry-exceeded",
    "severity": "error",
    "text": "NET/IB : Got completion from peer with status=12",
    "advice": "check NCCL_IB_GID_INDEX",
    "count": 3,
    "hosts": ("gpu1",),
}
WARNING = {**ERROR, "slug": "odd-interface", "severity": "warning", "text": "NCCL chose docker0"}


def complaining(*rows, waits=(), **settings):
    trace = pipeline(**settings).trace()
    trace = hung(trace, {1: wait(0)}) if waits else trace
    return replace(trace, nccl={"messages": rows})


def test_an_error_of_nccl_is_shown_where_the_job_stands_still() -> None:
    symptom = found(complaining(ERROR, WARNING, waits=(1,)))["nccl-errors"]
    assert symptom.severity == "critical"
    assert symptom.evidence == (
        "ib-retry-exceeded (3 times on gpu1): NET/IB : Got completion from peer with status=12",
    )
    assert symptom.advice[0].how == "check NCCL_IB_GID_INDEX"


def test_a_warning_is_shown_where_communication_costs_a_tenth() -> None:
    # 4 messages of 10 ms in a row: 40 of 131 ms
    symptom = found(complaining(WARNING, transfer=lambda _a, _b: 10 * MS))["nccl-errors"]
    assert symptom.severity == "warning"
    assert symptom.evidence[0].startswith("odd-interface")


@pytest.mark.parametrize(
    "trace",
    [
        complaining(ERROR),
        complaining(waits=(1,)),
        complaining(WARNING, waits=(1,)),
        complaining({**ERROR, "slug": "no-gpu-direct"}, waits=(1,)),
    ],
    ids=["a job that runs well", "nothing said", "a warning beside a hang", "another symptom's"],
)
def test_other_complaints_are_left_to_ppdiag_nccl(trace) -> None:
    assert "nccl-errors" not in found(trace)
