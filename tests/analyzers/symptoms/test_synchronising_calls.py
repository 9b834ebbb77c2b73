"""Two ranks, a step of 66 ms in which rank 1 launches its backward 5 ms late (see ``test_host_split``)."""

from __future__ import annotations

import pytest

from ppdiag.model import HostCause
from tests.analyzers.symptoms.cases import MEGATRON, found
from tests.analyzers.test_host_split import launched_late, stalled, with_pauses


def test_calls_that_wait_for_the_device_are_counted_and_worth_what_follows_them() -> None:
    # each waits for the 8 last ms of the forward: all of the 5 ms that follow are its
    trace = with_pauses(launched_late(stalled()), (HostCause.SYNCHRONISING, -8, 8))
    symptoms = found(trace, MEGATRON)
    symptom = symptoms["synchronising-calls"]
    assert symptom.evidence == (
        "late launches after synchronising calls: 7.6 % of the step",
        "1.0 calls a step on each rank that makes them, 0 of 3 right behind a message",
    )
    assert symptom.advice[0].gain_fraction == pytest.approx(5 / 66)
    assert "batch_p2p_sync=False" in symptom.advice[0].how
    assert "no-launch-lead" not in symptoms


def test_calls_right_behind_a_message_are_told_from_the_others() -> None:
    # one more call of 1 ms, 12 ms before the end of the forward of 10 ms: rank 1 is in its receive
    pauses = (HostCause.SYNCHRONISING, -8, 8), (HostCause.SYNCHRONISING, -12, 1)
    symptom = found(with_pauses(launched_late(stalled()), *pauses))["synchronising-calls"]
    assert symptom.evidence[1] == "2.0 calls a step on each rank that makes them, 3 of 6 right behind a message"


def test_short_calls_and_late_launches_without_one_are_not_spoken_of() -> None:
    short = with_pauses(launched_late(stalled()), (HostCause.SYNCHRONISING, -2, 2))
    assert "synchronising-calls" not in found(short)
    assert "synchronising-calls" not in found(launched_late(stalled()))
    assert "synchronising-calls" not in found(with_pauses(launched_late(stalled()), (HostCause.GC, 0, 5)))
