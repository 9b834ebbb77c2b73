"""Slow ranks by replica and position. Three replicas of four ranks; rank = replica x 4 + position."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Kind
from tests.analyzers.factory import MS, Pipeline, ten_and_twenty

FAST = pytest.approx(1.0, abs=0.03)
"""A rank that works less than the mean makes a step of equal work a little shorter."""


def workers(*slow, replicas=3):
    """Of a job in which these ranks take twice as long."""

    def duration(op, rank, step):
        return ten_and_twenty(op, rank, step) * (2 if rank in slow else 1)

    orders = schedules.order("1F1B", ranks=4, chunks=1, microbatches=8)
    job = Pipeline(orders, [0, 1, 2, 3], duration=duration, replicas=replicas, tail=1 * MS, steps=5)
    found = diagnose(job.trace()).workers
    assert found is not None
    return found


def test_equal_ranks_slow_nothing():
    found = workers()
    assert found.ranks == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert [value for row in found.slowdown for value in row] == pytest.approx([1.0] * 12)


def test_one_slow_rank_stands_out_at_its_replica_and_position():
    # F = 10, B = 20, 8 microbatches, equal: 11 x 30 + 2 of tail and optimizer = 332. The mean of twelve ranks of which
    # one takes twice as long is 13/12: 359.5 + 2. Its row alone as it was: 551 and 2 (test_root_cause's heavy stage 2),
    # over 361.5 of equal work.
    found = workers(6)
    slow = found.slowdown[1][2]
    assert slow == pytest.approx((0.550 + 0.002) / (0.3575 + 0.002), rel=0.03)
    assert found.replica_slowdown == (FAST, pytest.approx(slow, rel=0.05), FAST)
    assert [value for row in found.slowdown for value in row if value != slow] == [FAST] * 11


def test_a_slow_stage_is_a_column():
    found = workers(3, 7, 11)
    assert all(row[3] > 1.3 and row[:3] == (FAST, FAST, FAST) for row in found.slowdown)
    assert found.position_slowdown[3] > 1.3


def test_a_slow_replica_is_a_row():
    found = workers(4, 5, 6, 7)
    assert found.replica_slowdown == (FAST, pytest.approx(1.5, abs=0.01), FAST)  # twice as long, of a mean of 4/3
    assert all(found.slowdown[1][p] > max(found.slowdown[0][p], found.slowdown[2][p]) for p in range(4))
    assert len(found.ranks) == 3


def test_one_pipeline_is_a_single_row():
    found = workers(2, replicas=1)
    assert len(found.slowdown) == 1
    assert max(range(4), key=lambda p: found.slowdown[0][p]) == 2


def test_where_equal_work_takes_no_time_nobody_is_slow():
    # ops take no time, and what the ranks wait for is not recorded: the replay has nothing left
    orders = schedules.order("GPipe", ranks=2, chunks=1, microbatches=2)
    trace = Pipeline(orders, [0, 1], duration=lambda *_: 0, optimizer=0, transfer=lambda *_: MS, steps=5).trace()
    found = diagnose(replace(trace, spans=trace.spans[trace.spans["kind"] != Kind.SEND])).workers
    assert found is not None
    assert found.slowdown == ((1.0, 1.0),)
