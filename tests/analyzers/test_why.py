"""The split of imbalance: a difference between twins is data where it changes, a slow rank where it lasts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import analyse, diagnose
from ppdiag.analyzers.graph import build_graphs
from ppdiag.analyzers.program import build
from ppdiag.analyzers.replay import World, replay
from ppdiag.analyzers.shape import label
from ppdiag.analyzers.steps import find_steps
from ppdiag.model import Flag, Kind
from tests.analyzers.factory import MS, Pipeline


def twins(duration):
    """Two replicas of two ranks and four microbatches, joined by an all-reduce; the second is ranks 2 and 3."""
    orders = schedules.order("1F1B", ranks=2, chunks=1, microbatches=4)
    return diagnose(Pipeline(orders, [0, 1], duration=duration, replicas=2, tail=1 * MS, steps=9).trace())


def usual(op):
    return (10 if op.kind is Kind.FORWARD else 20) * MS


def test_a_replica_that_is_slow_in_every_step_is_a_slow_rank():
    found = twins(lambda op, rank, _step: usual(op) * (2 if rank >= 2 else 1))
    assert found.imbalance.rank == pytest.approx(found.why.imbalance)
    assert found.why.imbalance > 0.1


def test_a_replica_that_is_slow_in_every_other_step_has_more_data_then():
    # of seven analysed steps (the first is warm-up, the last has no end) one replica is slow in four, one in three
    found = twins(lambda op, rank, step: usual(op) * (2 if (rank >= 2) == bool(step % 2) else 1))
    assert found.steps.count % 2 == 1
    assert found.imbalance.microbatch > 5 * found.imbalance.rank
    assert found.why.imbalance > 0.1


def test_long_microbatches_are_data():
    found = twins(lambda op, _rank, _step: usual(op) * (3 if op.microbatch == 2 else 1))
    assert found.imbalance.microbatch == pytest.approx(found.why.imbalance)


def test_the_replay_error_is_small_where_every_step_has_other_data():
    found = twins(lambda op, rank, step: usual(op) + (7 * step + 5 * op.microbatch + 3 * rank) % 11 * MS)
    assert found.replay_error_fraction < 1e-6


def test_a_heavy_stage_comes_before_a_larger_bubble():
    orders = schedules.order("1F1B", ranks=4, chunks=1, microbatches=4)
    found = diagnose(
        Pipeline(
            orders, list(range(4)), duration=lambda op, _rank, _step: usual(op) * (2 if op.stage == 3 else 1), steps=6
        ).trace()
    )
    assert found.why.bubble > found.why.imbalance > 0.1
    assert (found.verdict.cause, found.verdict.stage, found.verdict.confidence) == ("imbalance", 3, "measured")


def test_a_stage_that_is_a_little_heavier_does_not():
    orders = schedules.order("1F1B", ranks=4, chunks=1, microbatches=4)
    found = diagnose(
        Pipeline(
            orders,
            list(range(4)),
            duration=lambda op, _rank, _step: usual(op) * 5 // (4 if op.stage == 3 else 5),
            steps=6,
        ).trace()
    )
    assert found.verdict.cause == "bubble"


def graph_of_inferred_messages():
    """F and B of one microbatch over two ranks, 5 ms a message; the messages are a source's guess."""
    orders = schedules.order("1F1B", ranks=2, chunks=1, microbatches=1)
    trace = Pipeline(orders, [0, 1], transfer=lambda _src, _dst: 5 * MS, steps=4).trace()
    spans = trace.spans.copy()
    spans["flags"][np.isin(spans["kind"], [Kind.SEND, Kind.RECV])] |= np.uint16(Flag.INFERRED)
    trace = replace(trace, spans=spans)
    steps = find_steps(trace)
    trace, _ = label(trace, steps)
    return build_graphs(build(trace, steps), steps)[0][0]


def test_inferred_messages_of_the_usual_time_are_transfers():
    graph = graph_of_inferred_messages()
    assert not graph.excess_EK.any()


def test_what_an_inferred_message_takes_over_the_usual_is_kept_only_where_work_is_as_measured():
    graph = graph_of_inferred_messages()
    graph = replace(graph, excess_EK=np.where(graph.transfer_EK > 0, 0.002, 0.0))
    as_measured, other_work = replay(graph, [World(), World(work_NK=graph.work_NK.copy())]).duration_WK
    assert as_measured.tolist() == pytest.approx(graph.duration_K.tolist())
    assert (as_measured - other_work).tolist() == pytest.approx([0.004] * len(as_measured))  # there and back


def test_a_heavy_stage_behind_a_slow_link_is_the_stages_imbalance_all_the_same():
    # Stage 0 takes three times as long, and all wait for the link of stages 2 and 3: equal stages alone gain nothing.
    def duration(op, _rank, _step):
        return (3 if op.stage == 0 else 1) * (MS if op.kind is Kind.FORWARD else 2 * MS)

    def transfer(source, target):
        return 6 * MS if {source, target} == {2, 3} else 0

    orders = schedules.order("1F1B", ranks=4, chunks=1, microbatches=8)
    trace = Pipeline(orders, [0, 1, 2, 3], duration=duration, transfer=transfer, steps=5).trace()
    shares = analyse(trace).shares
    assert (shares.kept_K - shares.equalised_K["stage"]).min() > 0
    found = diagnose(trace)
    assert found.why.imbalance > 0.05
    assert found.imbalance.stage == pytest.approx(found.why.imbalance)
