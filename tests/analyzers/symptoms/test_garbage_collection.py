from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ppdiag.model import HostCause, Kind
from ppdiag.trace import sorted_spans
from tests.analyzers.factory import MS, spans_of
from tests.analyzers.symptoms.cases import MEGATRON, found
from tests.analyzers.test_hand_calculations import on_rank, pipeline


def with_host_spans(trace, cause: HostCause, *, after_optimizer_ms: int):
    """A span of this cause behind each optimizer step of rank 0."""
    spans = trace.spans
    ends = spans["end_ns"][(spans["kind"] == Kind.OPTIMIZER) & (spans["rank"] == 0)]
    steps = spans["step"][(spans["kind"] == Kind.OPTIMIZER) & (spans["rank"] == 0)]
    rows = [
        {"rank": 0, "kind": Kind.HOST, "op": cause, "start_ns": int(end), "end_ns": int(end) + after_optimizer_ms * MS}
        | {"step": int(step)}
        for end, step in zip(ends, steps, strict=True)
    ]
    return replace(trace, spans=sorted_spans(np.concatenate([spans, spans_of(rows)])))


def test_pauses_of_the_collector_are_worth_what_a_replay_without_them_saves() -> None:
    # steps of 91 ms and 60 of pause; three are analysed, and the pause after each belongs to them
    trace = with_host_spans(pipeline(between=on_rank(0, 60)).trace(), HostCause.GC, after_optimizer_ms=60)
    symptoms = found(trace, MEGATRON)
    symptom = symptoms["garbage-collection"]
    assert "host-stall" not in symptoms  # all of the host's time is the collector's
    assert symptom.evidence == (
        "pauses on 1 rank cover 39.7 % of the time",
        "rank 0 (stage 0): 60.0 ms a step on average",
    )
    assert symptom.advice[0].gain_fraction == pytest.approx(60 / 151)
    assert symptom.advice[0].how == "--manual-gc --manual-gc-interval 100"


def test_short_pauses_and_other_host_time_are_not_spoken_of() -> None:
    late = pipeline(between=on_rank(0, 60)).trace()
    assert "garbage-collection" not in found(with_host_spans(late, HostCause.GC, after_optimizer_ms=2))
    assert "garbage-collection" not in found(with_host_spans(late, HostCause.DATA, after_optimizer_ms=60))
