"""Where ranks stood, against a count of one tick after the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings

from ppdiag.analyzers import program as rank_program
from ppdiag.analyzers.shape import label
from ppdiag.analyzers.steps import find_steps
from ppdiag.analyzers.where import Measured, measure
from ppdiag.diagnosis import Place
from ppdiag.model import COMPUTE_KINDS, Kind
from tests.analyzers.strategies import TICK, pipelines

if TYPE_CHECKING:
    import numpy as np

    from tests.analyzers.factory import Pipeline


@settings(max_examples=15)
@given(pipelines())
def test_every_tick_is_spent_where_the_spans_say(pipeline: Pipeline) -> None:
    # single waits only: those merged into one wait for a peer are calculated by hand elsewhere
    trace = replace(pipeline, rendezvous=False).trace()
    steps = find_steps(trace)
    found = measure(rank_program.build(label(trace, steps)[0], steps), steps)
    begin, end = int(steps.start_ns[0]), int(steps.end_ns[0])
    for r, rank in enumerate(steps.ranks):
        own = trace.spans[trace.spans["rank"] == rank]
        counted = Counter(stood(own, trace.spans, at) for at in range(begin, end, TICK))
        assert {place: ticks(found, place, r) for place in [None, *Place]} == pytest.approx(
            {place: counted[place] for place in [None, *Place]}
        )


def ticks(found: Measured, place: Place | None, r: int) -> float:
    seconds = found.busy_RK[r, 0] if place is None else found.idle_RK[place][r, 0]
    return float(seconds) * 1e9 / TICK


def stood(own: np.ndarray, spans: np.ndarray, at: int) -> Place | None:
    """Where a rank stood in the tick from ``at``; None where it computed."""
    inside = own[(own["start_ns"] <= at) & (own["end_ns"] > at)]
    for span in inside:
        if span["kind"] in COMPUTE_KINDS:
            return None
    for span in inside:
        if span["kind"] == Kind.COLLECTIVE:
            return Place.COLLECTIVE
        same = (spans["kind"] == Kind.SEND) & (spans["rank"] == span["peer"]) & (spans["peer"] == span["rank"])
        sent = spans[same & (spans["tag"] == span["tag"]) & (spans["seq"] == span["seq"])]["post_ns"]
        return Place.LATE_SENDER if at < sent[0] else Place.TRANSFER
    return Place.HOST
