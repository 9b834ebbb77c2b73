"""Clocks that nobody compared: a job on several hosts is diagnosed as it would be on one clock."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.message_clock import moved
from ppdiag.model import Flag, Kind
from ppdiag.trace import sorted_spans
from tests.analyzers.factory import MS, Pipeline

ERROR_S = 0.005


def job(*, ranks=3, transfer=2 * MS, rendezvous=True):
    """A slow last stage, messages of 2 ms, all on one clock."""
    orders = schedules.order("1F1B", ranks=ranks, chunks=1, microbatches=6)
    duration = lambda op, _rank, _step: (20 if op.stage == ranks - 1 else 10) * MS  # noqa: E731
    between = lambda _src, _dst: transfer  # noqa: E731
    pipeline = Pipeline(orders, list(range(ranks)), duration=duration, transfer=between, rendezvous=rendezvous, steps=6)
    return pipeline.trace()


def on_hosts(trace, ahead_ns, drift=None):
    """The same where each rank is on a host of its own, whose clock is ahead and too fast by so much."""
    spans = trace.spans.copy()
    zero = int(spans["start_ns"].min())
    for name in ("start_ns", "end_ns", "post_ns"):
        for rank, ahead in ahead_ns.items():
            own = spans["rank"] == rank
            spans[name][own] += ahead + np.rint((drift or {}).get(rank, 0.0) * (spans[name][own] - zero)).astype(int)
    ranks = {rank: replace(facts, clock=f"host{rank}") for rank, facts in trace.ranks.items()}
    return replace(trace, spans=sorted_spans(spans), ranks=ranks, clock_error_s=ERROR_S)


def shares(found):
    """All that is said of causes, places and links."""
    links = [(link.src_stage, link.dst_stage, link.transfer_s) for link in found.links]
    return [*astuple(found.why), *astuple(found.where), *(time for *_, time in links), found.steps.median_s]


@pytest.mark.parametrize("ahead_ms", [{1: 4, 2: -3}, {0: 4}, {0: -2, 1: 3, 2: 3}])
def test_clocks_that_are_off_by_more_than_a_transfer_change_no_cause(ahead_ms):
    one_clock = job()
    found = diagnose(on_hosts(one_clock, {rank: ms * MS for rank, ms in ahead_ms.items()}))
    assert shares(found) == pytest.approx(shares(diagnose(one_clock)))
    assert found.clock_error_s == pytest.approx(0.0, abs=1e-9)
    assert found.verdict.confidence == "measured"
    assert any("ranks were moved by up to" in warning for warning in found.warnings)
    assert all(link.by_clocks_s is not None for link in found.links)


def test_a_clock_that_drifts_is_followed():
    # 100 us a second, over the 1.3 s of the six steps
    one_clock = job()
    found = diagnose(on_hosts(one_clock, {1: 4 * MS, 2: 0}, drift={1: 1e-4}))
    assert shares(found) == pytest.approx(shares(diagnose(one_clock)), abs=1e-4)
    assert found.clock_error_s < 5e-5


@pytest.mark.parametrize("what", ["good clocks", "one clock", "buffered sends", "sends not waited for"])
def test_ranks_stay_where_their_clocks_are_good_or_messages_are_no_measure(what):
    trace = on_hosts(job(rendezvous=what != "buffered sends"), {1: 4 * MS})
    if what == "good clocks":
        trace = replace(trace, clock_error_s=0.001)
    if what == "one clock":
        trace = replace(trace, ranks={rank: replace(facts, clock="one") for rank, facts in trace.ranks.items()})
    if what == "sends not waited for":
        trace.spans["flags"][trace.spans["kind"] == Kind.SEND] |= np.uint16(Flag.NEVER_WAITED)
    assert moved(trace) is trace


def test_ranks_stay_where_one_exchanges_no_message_that_tells_of_its_clock():
    trace = on_hosts(job(), {1: 4 * MS})
    ends = (trace.spans["rank"] == 2) | (trace.spans["peer"] == 2)
    trace.spans["flags"][ends & (trace.spans["kind"] == Kind.SEND)] |= np.uint16(Flag.NEVER_WAITED)
    assert moved(trace) is trace


def test_messages_whose_ends_are_far_apart_do_not_move_the_others():
    one_clock = job()
    trace = on_hosts(one_clock, {1: 4 * MS})
    late = np.flatnonzero((trace.spans["kind"] == Kind.RECV) & (trace.spans["rank"] == 1))[3]
    trace.spans["end_ns"][late] += 1 * MS
    assert shares(diagnose(trace)) == pytest.approx(shares(diagnose(one_clock)), abs=2e-3)
