from __future__ import annotations

import pytest

from ppdiag.model import HostCause
from tests.analyzers.symptoms.cases import TORCH, found
from tests.analyzers.symptoms.test_garbage_collection import with_host_spans
from tests.analyzers.test_hand_calculations import on_rank, pipeline


def test_waits_for_data_are_named_with_their_rank_and_stage() -> None:
    trace = with_host_spans(pipeline(between=on_rank(0, 60)).trace(), HostCause.DATA, after_optimizer_ms=30)
    symptoms = found(trace, TORCH)
    symptom = symptoms["data-wait"]
    assert "host-stall" in symptoms  # half of the host's time has another cause
    assert symptom.evidence == (
        "waits for data on 1 rank cover 19.9 % of the time",
        "rank 0 (stage 0): 30.0 ms a step on average",
    )
    assert symptom.advice[0].gain_fraction == pytest.approx(30 / 151)
    assert symptom.advice[0].gain_range == pytest.approx((30 / 151, 30 / 151))  # all steps are alike
    assert "num_workers" in symptom.advice[0].how


def test_short_waits_are_not_spoken_of() -> None:
    trace = with_host_spans(pipeline(between=on_rank(0, 60)).trace(), HostCause.DATA, after_optimizer_ms=5)
    assert "data-wait" not in found(trace)
