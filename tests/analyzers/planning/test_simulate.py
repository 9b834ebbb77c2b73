"""The simulated schedules against closed forms and against published bubble rates."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.analyzers import schedules
from ppdiag.analyzers.planning import orders, simulate
from ppdiag.analyzers.planning.simulate import Durations, program, run, uniform

# Qi et al. 2024 (Zero Bubble Pipeline Parallelism), tables of profiled times (ms: F, B, W, transfer) and of bubble
# rates, first row of each model: P, M, the times, and 1F1B, ZB-H1, ZB-H2.
ZERO_BUBBLE = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
    (32, 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641)),
]


@pytest.mark.parametrize(("ranks", "microbatches", "times", "rates"), ZERO_BUBBLE)
def test_bubble_rates_are_those_of_the_zero_bubble_paper(ranks, microbatches, times, rates):
    forward, backward, weight, transfer = times
    found = []
    for name in ("1f1b", "zb-h1", "zb-h2"):
        work = program(name, ranks=ranks, chunks=1, microbatches=microbatches)
        result = uniform(work, forward=forward, backward=backward, weight=weight, transfer=transfer)
        found.append(round(float(result.span_bubble_fraction_W[0]), 4))
    assert tuple(found) == rates


@pytest.mark.parametrize(
    ("name", "known_as", "shape"),
    [
        ("gpipe", "GPipe", (4, 1, 4)),
        ("1f1b", "1F1B", (8, 1, 32)),
        ("interleaved", "Interleaved1F1B", (4, 2, 8)),
        ("interleaved", "Interleaved1F1B", (8, 4, 64)),
        ("looped-bfs", "LoopedBFS", (4, 3, 8)),
        ("zb-h1", "1F1B with split W", (4, 1, 8)),
        ("zb-v", "ZBVZeroBubble", (4, 2, 8)),
    ],
)
def test_the_simulated_bubble_is_that_of_the_closed_form(name, known_as, shape):
    ranks, chunks, microbatches = shape
    work = program(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    result = uniform(work, forward=1, backward=1, weight=1)
    expected = schedules.bubble_fraction(known_as, ranks, chunks, microbatches)
    assert expected is not None
    assert result.bubble_fraction_W[0] == pytest.approx(expected)
    assert result.bubble_over_ideal_W[0] == pytest.approx(expected / (1 - expected))


def test_every_shape_idles_as_the_published_formulas_say():
    # (P-1) / (M+P-1) for GPipe and 1F1B, (P-1) / (VM+P-1) interleaved where M is a multiple of P; F = B
    for ranks, microbatches, chunks in product(range(1, 9), range(1, 33), range(1, 5)):
        expected = (ranks - 1) / (chunks * microbatches + ranks - 1)
        names = ("gpipe", "1f1b") if chunks == 1 else ("interleaved",) if microbatches % ranks == 0 else ()
        for name in names:
            work = program(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
            found = uniform(work, forward=1, backward=1).bubble_fraction_W[0]
            assert found == pytest.approx(expected), (name, ranks, chunks, microbatches)


def test_naive_idles_all_but_one_rank_at_a_time():
    result = uniform(program("naive", ranks=8, chunks=1, microbatches=3), forward=1, backward=2)
    assert result.bubble_fraction_W[0] == pytest.approx(0.875)


def test_zb_h2_and_zb_v_leave_no_bubble_between_a_ranks_first_op_and_last():
    for name, chunks in (("zb-h2", 1), ("zb-v", 2)):
        result = uniform(program(name, ranks=4, chunks=chunks, microbatches=12), forward=1, backward=1, weight=1)
        assert result.span_bubble_fraction_W[0] == pytest.approx(0)


def test_gpipe_of_4_and_4_takes_14_slots():
    assert uniform(program("gpipe", ranks=4, chunks=1, microbatches=4), forward=1, backward=1).makespan_W[0] == 14


def test_a_heavy_stage_sets_the_pace_of_all():
    # Stage 1 starts after one forward (1), works 8 x 6, waits 2 for its first gradient (it has run three forwards by 7;
    # the gradient is back at 9), and stage 0 has a backward (2) left.
    forward_SW = np.array([[1.0], [2.0], [1.0], [1.0]])
    times = Durations(forward_SW, 2 * forward_SW, 0 * forward_SW, np.zeros(1))
    assert run(program("1f1b", ranks=4, chunks=1, microbatches=8), times).makespan_W[0] == 53


def test_worlds_do_not_touch_each_other():
    work = program("interleaved", ranks=4, chunks=2, microbatches=8)
    scale_W = np.array([1.0, 3.0, 0.5])
    forward_SW = np.ones((8, 1)) * scale_W
    together = run(work, Durations(forward_SW, 2 * forward_SW, 0 * forward_SW, 0.1 * scale_W)).makespan_W
    alone = uniform(work, forward=1, backward=2, transfer=0.1).makespan_W[0]
    assert together == pytest.approx(alone * scale_W)


@pytest.mark.parametrize(("name", "messages"), [("1f1b", 48), ("interleaved", 112), ("zb-v", 96)])
def test_messages_cross_ranks_only(name, messages):
    # 8 microbatches, both ways: 3 boundaries of 4 stages; 7 of 8; of a V 6, since its tip lies on one rank
    chunks = orders.SCHEDULES[name].chunks or 2
    assert program(name, ranks=4, chunks=chunks, microbatches=8).messages == messages


@given(
    name=st.sampled_from(sorted(orders.SCHEDULES)),
    ranks=st.integers(1, 5),
    chunks=st.integers(1, 3),
    microbatches=st.integers(1, 12),
    transfer=st.floats(0, 3),
)
def test_nothing_starts_before_what_it_needs(name, ranks, chunks, microbatches, transfer):
    chunks = orders.SCHEDULES[name].chunks or chunks
    if orders.refusal(name, ranks=ranks, chunks=chunks, microbatches=microbatches):
        return
    work = program(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    result = uniform(work, forward=1.0, backward=1.5, weight=0.5, transfer=transfer)
    start, end = result.start_OW[:, 0], result.end_OW[:, 0]
    for i in range(len(work.ops)):
        for j in (work.before_O[i], work.source_O[i]):
            assert j == simulate.NO_OP or start[i] >= end[j] - 1e-9
    assert np.all(result.span_RW <= result.makespan_W + 1e-9)
    assert np.all(result.bubble_fraction_W >= -1e-9)


def test_a_backward_with_its_weight_gradient_inside_takes_both():
    # DualPipeV splits only some backwards; every rank has 8 microbatches of F, B and W in two stages all the same
    result = uniform(program("dualpipe-v", ranks=4, chunks=2, microbatches=8), forward=1, backward=1, weight=1)
    assert result.busy_RW[:, 0] == pytest.approx([48] * 4)
