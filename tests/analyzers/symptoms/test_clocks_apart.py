from __future__ import annotations

from dataclasses import replace

from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import found
from tests.analyzers.test_message_clock import job, on_hosts


def test_clocks_that_messages_had_to_compare_are_said() -> None:
    symptom = found(on_hosts(job(), {1: 4 * MS}))["clocks-apart"]
    assert symptom.severity == "info"
    assert symptom.evidence[0].startswith("the clocks may be off by 5.00 ms; the median step takes ")
    assert symptom.evidence[1] == "by their messages ranks were moved, to within 0.00 ms"


def test_clocks_too_far_apart_for_a_verdict_are_a_warning() -> None:
    # sends that are buffered tell nothing, and 60 ms are more than a twentieth of the step
    trace = replace(on_hosts(job(rendezvous=False), {1: 4 * MS}), clock_error_s=0.060)
    symptom = found(trace)["clocks-apart"]
    assert symptom.severity == "warning"
    assert len(symptom.evidence) == 1


def test_good_clocks_and_one_clock_are_not_spoken_of() -> None:
    assert "clocks-apart" not in found(replace(on_hosts(job(), {1: 4 * MS}), clock_error_s=0.0005))
    assert "clocks-apart" not in found(job())
