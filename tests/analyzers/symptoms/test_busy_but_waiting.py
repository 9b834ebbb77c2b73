from __future__ import annotations

import pytest

from tests.analyzers.symptoms.cases import found, hung, told, wait
from tests.analyzers.test_hand_calculations import pipeline


def test_full_utilisation_beside_a_third_of_idle_time_is_pointed_out() -> None:
    # GPipe, P = M = 2: idle 30 of 91 ms
    symptom = found(told(pipeline().trace(), nvml={"gpu_percent": 99.0}))["busy-but-waiting"]
    assert symptom.severity == "info"
    assert symptom.evidence == ("rank 0: utilisation 99 %, idle 33.0 %", "rank 1: utilisation 99 %, idle 33.0 %")


def test_a_rank_that_stands_still_at_full_utilisation_is_pointed_out() -> None:
    trace = told(pipeline(microbatches=16).trace(), nvml={"gpu_percent": 100.0})
    assert "busy-but-waiting" not in found(trace)  # idle 5.9 %
    symptom = found(hung(trace, {1: wait(0)}))["busy-but-waiting"]
    assert symptom.evidence == ("rank 1: utilisation 100 %, idle 5.9 %, now stuck",)


@pytest.mark.parametrize("nvml", [{"gpu_percent": 60.0}, {}, "off: no library"])
def test_low_or_unknown_utilisation_is_not(nvml) -> None:
    assert "busy-but-waiting" not in found(told(pipeline().trace(), nvml=nvml))
