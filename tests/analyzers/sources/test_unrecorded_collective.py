"""A collective that is not recorded shows where its ranks go on together, and not where they only happen to."""

from __future__ import annotations

import numpy as np

from ppdiag.analyzers.sources.unrecorded_collective import find
from ppdiag.model import Kind
from ppdiag.trace import make_spans

MS = 1_000_000
SECOND = 1_000 * MS


def steps_of(*backwards_end_ms, goes_on_ms, steps=10):
    """Steps of a second: each rank's last backward, and when its optimizer begins (a function of rank and step)."""
    rows = []
    for step in range(steps):
        for rank, end_ms in enumerate(backwards_end_ms):
            common = {"rank": rank, "step": step}
            begin = step * SECOND
            rows.append({**common, "kind": Kind.BACKWARD, "start_ns": begin, "end_ns": begin + end_ms * MS})
            start = begin + goes_on_ms(rank, step) * MS
            rows.append({**common, "kind": Kind.OPTIMIZER, "start_ns": start, "end_ns": start + 5 * MS})
    return make_spans(rows)


def test_twins_that_go_on_when_the_last_has_come_left_a_collective():
    found = find(steps_of(100, 300, 500, goes_on_ms=lambda _rank, _step: 501), np.array([0, 1, 2]))
    assert found is not None
    assert found.ranks.tolist() == [0, 1, 2]
    spans = found.spans(group=7)
    assert spans["start_ns"][:3].tolist() == [100 * MS, 300 * MS, 500 * MS]
    assert spans["end_ns"][:3].tolist() == [501 * MS] * 3
    assert set(spans["group"].tolist()) == {7}


def test_a_rank_of_another_stage_that_waits_along_is_a_member():
    found = find(steps_of(100, 500, 200, 300, goes_on_ms=lambda rank, _: [501, 501, 501, 301][rank]), np.array([0, 1]))
    assert found is not None
    assert found.ranks.tolist() == [0, 1, 2]


def test_ranks_that_go_on_one_after_the_other_left_none():
    assert find(steps_of(100, 500, goes_on_ms=lambda rank, _step: [101, 501][rank]), np.array([0, 1])) is None


def test_ranks_that_go_on_before_the_last_has_come_left_none():
    assert find(steps_of(100, 500, goes_on_ms=lambda rank, _step: 501 if rank else 450), np.array([0, 1])) is None


def test_one_step_in_four_is_chance():
    late = lambda rank, step: 501 if rank or step % 4 == 0 else 101  # noqa: E731
    assert find(steps_of(100, 500, goes_on_ms=late), np.array([0, 1])) is None


def test_a_rank_alone_waits_for_nobody():
    assert find(steps_of(100, goes_on_ms=lambda _rank, _step: 101), np.array([0])) is None
