"""Transfers on links whose ends read different clocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Flag, Kind
from ppdiag.trace import sorted_spans
from tests.analyzers.factory import MS, Pipeline


def job(*, rendezvous=True, transfer=2 * MS):
    """Two ranks on two hosts; rank 1's clock is 1.5 ms ahead, and nobody knows it."""
    orders = schedules.order("1F1B", ranks=2, chunks=1, microbatches=4)
    trace = Pipeline(orders, [0, 1], transfer=lambda _src, _dst: transfer, rendezvous=rendezvous, steps=5).trace()
    spans = trace.spans.copy()
    for name in ("start_ns", "end_ns", "post_ns"):
        spans[name][spans["rank"] == 1] += 3 * MS // 2
    ranks = {rank: replace(facts, clock=f"host{rank}") for rank, facts in trace.ranks.items()}
    return replace(trace, spans=sorted_spans(spans), ranks=ranks, clock_error_s=0.003)


def test_where_clocks_may_be_off_by_more_than_a_transfer_it_is_the_shorter_of_both_ends_durations():
    found = diagnose(job())
    forward, backward = found.links
    assert (forward.transfer_s, backward.transfer_s) == pytest.approx((0.002, 0.002))
    assert (forward.by_clocks_s, backward.by_clocks_s) == pytest.approx((0.0035, 0.0005))
    (warning,) = [text for text in found.warnings if "clocks may be off" in text]
    assert "3.00 ms, more than transfers take on 2 links" in warning
    assert "that is 2.00 ms, and by the clocks" in warning


def test_clocks_that_are_good_enough_are_believed():
    found = diagnose(replace(job(), clock_error_s=0.0004))
    assert [link.by_clocks_s for link in found.links] == [None, None]
    assert [link.transfer_s * 1e3 for link in found.links] == pytest.approx([3.5, 0.5])


def test_buffered_sends_say_nothing_of_the_transfer():
    found = diagnose(job(rendezvous=False))
    assert [link.by_clocks_s for link in found.links] == [None, None]


def test_ranks_of_one_clock_need_no_other():
    trace = job()
    one = {rank: replace(facts, clock="one") for rank, facts in trace.ranks.items()}
    assert [link.by_clocks_s for link in diagnose(replace(trace, ranks=one)).links] == [None, None]


def test_a_message_that_nobody_waited_for_is_no_measure():
    trace = job()
    spans = trace.spans.copy()
    messages = np.isin(spans["kind"], (Kind.SEND,))
    spans["flags"][messages] |= np.uint16(Flag.NEVER_WAITED)
    assert [link.by_clocks_s for link in diagnose(replace(trace, spans=spans)).links] == [None, None]
