from __future__ import annotations

from dataclasses import replace

import numpy as np

from ppdiag.model import Flag, Kind
from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import found
from tests.analyzers.test_hand_calculations import pipeline, slower


def on_device(trace):
    """The trace with receives and ops as the device timed them, each launched as it began."""
    spans = trace.spans.copy()
    spans["flags"][np.isin(spans["kind"], (Kind.FORWARD, Kind.BACKWARD, Kind.RECV))] |= np.uint16(Flag.DEVICE)
    spans["launch_ns"] = spans["start_ns"]
    return replace(trace, spans=spans)


def heavy_stage(transfer=0):
    return pipeline("1F1B", microbatches=8, duration=slower(2, stage=1), transfer=lambda _a, _b: transfer).trace()


def test_receives_that_wait_for_a_heavy_stage_are_no_slow_network() -> None:
    symptom = found(on_device(heavy_stage()))["spinning-receives"]
    assert symptom.severity == "info"
    assert symptom.evidence[1] == "bytes were in flight for 0.0 % of the step"


def test_receives_of_less_than_a_fifth_are_not_spoken_of() -> None:
    # P = 2: the bubble is 1 / (M + 1) of the step, 5.9 % with 16 microbatches
    assert "spinning-receives" not in found(on_device(pipeline("1F1B", microbatches=16).trace()))


def test_the_hosts_waits_and_transfers_that_take_long_are_not_meant() -> None:
    assert "spinning-receives" not in found(heavy_stage())
    slow = pipeline("1F1B", ranks=2, microbatches=8, transfer=lambda _a, _b: 40 * MS).trace()
    assert "spinning-receives" not in found(on_device(slow))
