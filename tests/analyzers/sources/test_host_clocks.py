"""Hosts whose clocks nothing compared: messages bound what they are off by, and move a host that breaks them."""

from __future__ import annotations

import numpy as np
import pytest

from ppdiag.analyzers.clock import WALL_CLOCK_ERROR_S
from ppdiag.analyzers.sources.host_clocks import agree
from ppdiag.model import Flag, Kind
from ppdiag.trace import make_spans

MS = 1_000_000
HOSTS = {0: "a", 1: "b"}


def messages(there_ms, back_ms, ahead_ms=0.0, steps=3, flags=0):
    """A message each way a step; rank 1's clock is ahead by some ms."""
    rows = []
    for step in range(steps):
        begin, ahead = step * 100 * MS, int(ahead_ms * MS)
        for n, (sender, receiver, delay_ms) in enumerate(((0, 1, there_ms), (1, 0, back_ms))):
            sent = begin + n * 50 * MS
            common = {"step": step, "seq": step, "group": 0, "microbatch": 0}
            send = {"rank": sender, "kind": Kind.SEND, "peer": receiver, "start_ns": sent, "end_ns": sent, **common}
            done = sent + int(delay_ms * MS)
            receive = {"rank": receiver, "kind": Kind.RECV, "peer": sender, "start_ns": sent, "end_ns": done, **common}
            receive["flags"] = flags
            rows += [send, receive]
        for row in rows[-4:]:
            if row["rank"] == 1:
                row["start_ns"] += ahead
                row["end_ns"] += ahead
    return make_spans(rows)


def test_messages_both_ways_bound_the_clocks_from_both_sides():
    spans = messages(there_ms=0.2, back_ms=0.3)
    found = agree(spans, HOSTS)
    assert found.shift_ns == {"a": 0, "b": 0}
    assert found.error_s == pytest.approx(0.3e-3)  # b is ahead by 0.2 ms at most, and behind by 0.3 ms


def test_bounds_wider_than_wall_clocks_are_worth_count_as_these():
    assert agree(messages(there_ms=40, back_ms=30), HOSTS).error_s == WALL_CLOCK_ERROR_S


def test_ranks_of_one_host_have_one_clock():
    assert agree(messages(there_ms=40, back_ms=30), {0: "a", 1: "a"}).error_s == 0.0


@pytest.mark.parametrize("ahead_ms", [-20.0, 20.0])
def test_a_host_is_moved_until_nothing_is_received_before_it_was_sent(ahead_ms):
    spans = messages(there_ms=0.2, back_ms=0.2, ahead_ms=ahead_ms)
    before = spans.copy()
    found = agree(spans, HOSTS)
    # 0.2 ms of the 20 are within what the messages allow; the remaining interval is as wide as both delays.
    moved = {"b": 19_800_000, "a": 0} if ahead_ms < 0 else {"a": 19_800_000, "b": 0}
    assert found.shift_ns == moved
    assert found.error_s == pytest.approx(0.4e-3)
    late = spans["rank"] == (1 if ahead_ms < 0 else 0)
    for name in ("start_ns", "end_ns", "post_ns"):
        assert (spans[name] - before[name] == np.where(late, 19_800_000, 0)).all()
    assert "moved by up to 19.80 ms" in str(found)


def test_one_message_that_fits_nothing_moves_no_host():
    spans = messages(there_ms=0.2, back_ms=0.2, steps=5)
    odd = np.flatnonzero((spans["rank"] == 1) & (spans["kind"] == Kind.RECV))[0]
    spans["end_ns"][odd] = spans["start_ns"][odd] - 90 * MS
    found = agree(spans, HOSTS)
    assert found.shift_ns == {"a": 0, "b": 0}
    assert found.error_s == pytest.approx(90e-3)


def test_receives_whose_end_was_not_seen_say_nothing():
    spans = messages(there_ms=-3, back_ms=-3, flags=int(Flag.NEVER_WAITED))
    found = agree(spans, HOSTS)
    assert found.shift_ns == {"a": 0, "b": 0}
    assert found.error_s == WALL_CLOCK_ERROR_S


def test_a_chain_of_hosts_is_moved_along():
    first, second = messages(0.1, 0.1, ahead_ms=-10), messages(0.1, 0.1, ahead_ms=-10)
    second["rank"] += 1
    second["peer"] += 1
    second["start_ns"] -= 10 * MS  # both of its ends: rank 1 is 10 ms behind, rank 2 twenty
    second["end_ns"] -= 10 * MS
    second["post_ns"] -= 10 * MS
    spans = np.concatenate([first, second])
    spans = spans[np.argsort(spans["rank"], kind="stable")]
    found = agree(spans, {0: "a", 1: "b", 2: "c"})
    assert found.shift_ns == {"a": 0, "b": 9_900_000, "c": 19_800_000}


def test_no_constant_shift_fits_clocks_that_go_wrong_both_ways():
    found = agree(messages(there_ms=-4, back_ms=-1), HOSTS)
    assert found.error_s >= 2.5e-3  # half of what is broken in all, at the least
