"""What lies inside an op or between its parts: collectives of tensor parallelism, weight gradients split off.

All times in milliseconds.
"""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.diagnosis import Why
from ppdiag.model import Kind
from ppdiag.trace import sorted_spans
from tests.analyzers.factory import MS, Compute, Post, Wait, simulate

STAGE = {0: 0, 1: 0, 2: 1, 3: 1}
"""Ranks 0 and 1 share stage 0, ranks 2 and 3 share stage 1."""


def tensor_parallel(slow: int, collective: int = 0):
    """One microbatch; the two ranks of a stage meet in the middle of each forward, rank ``slow`` 4 ms late.

    The collective itself takes ``collective`` ms.
    """

    def program(rank):
        stage = STAGE[rank]
        for step in range(5):
            if stage == 1:
                yield Post((step, "in"), Kind.RECV, peer=rank - 2, stage=1, microbatch=0, group=2)
                yield Wait((step, "in"))
            yield Compute(Kind.FORWARD, (9 if rank == slow else 5) * MS, stage, 0)
            yield Post((step, "sum"), Kind.COLLECTIVE, group=stage)
            yield Wait((step, "sum"))
            yield Compute(Kind.FORWARD, 5 * MS, stage, 0)
            if stage == 0:
                yield Post((step, "out"), Kind.SEND, peer=rank + 2, stage=0, microbatch=0, group=2)
                yield Post((step, "back"), Kind.RECV, peer=rank + 2, stage=0, microbatch=0, tag=1, group=2)
                yield Wait((step, "back"))
            yield Compute(Kind.BACKWARD, 20 * MS, stage, 0)
            if stage == 1:
                yield Post((step, "back"), Kind.SEND, peer=rank - 2, stage=1, microbatch=0, tag=1, group=2)
            yield Compute(Kind.OPTIMIZER, 1 * MS)

    programs = {rank: list(program(rank)) for rank in STAGE}
    return as_one_forward(simulate(programs, groups=[(0, 1), (2, 3), (0, 1, 2, 3)], collective=collective * MS))


def as_one_forward(trace):
    """Both parts of a forward as the one span that encloses the collective."""
    spans = trace.spans
    forward = np.flatnonzero(spans["kind"] == Kind.FORWARD)  # by rank and time: first part, second part, ...
    spans = spans.copy()
    spans["end_ns"][forward[::2]] = spans["end_ns"][forward[1::2]]
    return replace(trace, spans=sorted_spans(np.delete(spans, forward[1::2])))


def test_a_wait_for_a_tensor_parallel_twin_inside_a_forward_is_a_collective_wait():
    # stage 0: 0-5, rank 0 waits 5-9 for rank 1, both 9-14; stage 1: F 14-24, B 24-44; stage 0: B 44-64, optimizer 65
    found = diagnose(tensor_parallel(slow=1))
    assert found.steps.median_s == pytest.approx(0.065)
    assert [row.busy_fraction * 65 for row in found.ranks] == pytest.approx([31, 35, 31, 31])
    assert [row.where.collective * 65 for row in found.ranks] == pytest.approx([4, 0, 0, 0])
    assert [row.where.late_sender * 65 for row in found.ranks] == pytest.approx([30, 30, 34, 34])


def test_what_began_inside_the_forward_of_a_slow_twin_is_charged_to_it():
    assert found_work(tensor_parallel(slow=1)) == {("forward", 0, 1)}
    assert found_work(tensor_parallel(slow=2)) == {("forward", 1, 2)}


def found_work(trace):
    found = diagnose(trace).root_cause
    assert found is not None
    return {(origin.op, origin.stage, origin.rank) for origin in found.origins if origin.what == "work"}


def split_backward(weight_of_stage_0: int):
    """F, B of the input and W take 10 each, but for W on stage 0; two ranks, one microbatch, optimizer 1."""

    def program(rank):
        for step in range(5):
            if rank == 1:
                yield Post((step, "in"), Kind.RECV, peer=0, stage=1, microbatch=0)
                yield Wait((step, "in"))
            yield Compute(Kind.FORWARD, 10 * MS, rank, 0)
            if rank == 0:
                yield Post((step, "out"), Kind.SEND, peer=1, stage=0, microbatch=0)
                yield Post((step, "back"), Kind.RECV, peer=1, stage=0, microbatch=0, tag=1)
                yield Wait((step, "back"))
            yield Compute(Kind.BACKWARD, 10 * MS, rank, 0)
            if rank == 1:
                yield Post((step, "back"), Kind.SEND, peer=0, stage=1, microbatch=0, tag=1)
            yield Compute(Kind.WEIGHT, (weight_of_stage_0 if rank == 0 else 10) * MS, rank, 0)
            yield Compute(Kind.OPTIMIZER, 1 * MS)

    return simulate({rank: list(program(rank)) for rank in range(2)})


def test_a_weight_gradient_fills_the_wait_after_its_backward():
    # rank 0 F 0-10; rank 1 F 10-20, B 20-30, W 30-40, optimizer 41; rank 0 B 30-40, W 40-50, optimizer 51
    found = diagnose(split_backward(10))
    assert found.steps.median_s == pytest.approx(0.051)
    assert [astuple(row.why) for row in found.ranks] == [pytest.approx(astuple(Why(bubble=20 / 51)))] * 2
    assert [(row.forward_s, row.backward_s, row.weight_s) for row in found.stages] == [pytest.approx((0.01,) * 3)] * 2


def test_a_heavy_weight_gradient_is_told_from_the_backward_that_it_was_split_off():
    # W on stage 0 takes 20: a step takes 61, and 56 with the mean of 15 on both. Equal: rank 1 ends at 46, goes on at
    # 66, so that it waits 20 for the schedule, and 10 more here.
    found = diagnose(split_backward(20))
    assert found.steps.median_s == pytest.approx(0.061)
    assert [astuple(row.why) for row in found.ranks] == [
        pytest.approx(astuple(Why(bubble=20 / 61))),
        pytest.approx(astuple(Why(bubble=20 / 61, imbalance=10 / 61))),
    ]
    origins = found.root_cause.origins if found.root_cause else ()
    assert [(o.what, o.op, o.stage, o.rank) for o in origins] == [
        ("schedule", None, None, None),
        ("work", "weight", 0, 0),
    ]
    assert [o.fraction * 2 * 61 for o in origins] == pytest.approx([40, 10])
