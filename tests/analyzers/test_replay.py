"""The replay engine, against an independent longest path and against the factory as the world that it predicts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdiag.analyzers import program as rank_program
from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.graph import Graph, build_graphs
from ppdiag.analyzers.program import COMPUTE, START
from ppdiag.analyzers.replay import Walk, World, replay
from ppdiag.analyzers.shape import label
from ppdiag.analyzers.steps import find_steps
from ppdiag.analyzers.why import CHOICES, eight_worlds
from ppdiag.model import Kind
from tests.analyzers.factory import MS, Pipeline
from tests.analyzers.strategies import TICK, OfKind, OfOp, OfPair, pipelines, times

if TYPE_CHECKING:
    from ppdiag.analyzers.schedules import Op
    from ppdiag.trace import Trace


def graph_of(trace: Trace) -> Graph:
    steps = find_steps(trace)
    labelled, _ = label(trace, steps)
    return build_graphs(rank_program.build(labelled, steps), steps)[0][0]


@settings(max_examples=15)
@given(pipelines(), st.sampled_from(CHOICES))
def test_the_walk_finds_the_longest_path(pipeline: Pipeline, choice: tuple[bool, ...]) -> None:
    graph = graph_of(pipeline.trace())
    world = eight_worlds(graph)[choice]
    found = replay_once(graph, world)
    assert found == pytest.approx(longest_paths(graph, world), abs=1e-9)


def replay_once(graph: Graph, world: World) -> np.ndarray:
    """When each join is passed in the first step, the ranks starting as measured."""
    first: np.ndarray = every_step_once(graph, world)[:, 0]
    return first


def every_step_once(graph: Graph, world: World) -> np.ndarray:
    """When each join is passed in each step (J x K), the ranks starting as measured."""
    walk = Walk(graph, [world], keep_joins=True)
    walk.again(graph.start_RK[:, None, :], np.ones((1, len(graph.steps_K)), bool))
    assert walk.join_JWK is not None
    return walk.join_JWK[:, 0]


def longest_paths(graph: Graph, world: World) -> list[float]:
    """The same, edge by edge: no levels, no vectors, no cumulative sums."""
    edges = defaultdict(list)
    for e, (src, dst) in enumerate(zip(graph.src_E, graph.dst_E, strict=True)):
        edges[dst].append((e, src))
    work = graph.work_NK if world.work_NK is None else world.work_NK

    def weight(e: int) -> float:
        first, last, link = graph.first_E[e] + 1, graph.last_E[e] + 1, graph.link_E[e]
        host = sum(graph.host_NK[first:last, 0]) * (0.0 if world.host_R is not None else 1.0)
        free = world.transfer_L is not None and link >= 0
        if free and graph.optional_E[e]:
            return -np.inf
        return host + sum(work[first:last, 0]) + (0.0 if free else graph.transfer_EK[e, 0])

    starts = dict(zip(graph.start_joins, graph.start_RK[:, 0], strict=True))

    @cache
    def passed(join: int) -> float:
        return starts[join] if join in starts else max(passed(src) + weight(e) for e, src in edges[join])

    return [passed(join) for join in range(len(graph.joins_J))]


@st.composite
def steady(draw: st.DrawFn) -> Pipeline:
    """Every step alike, and a tail that all ranks wait for: the second step is as all that follow."""
    pipeline = draw(pipelines())
    return replace(
        pipeline,
        duration=EveryStep(OfOp(draw(times()), least=TICK)),
        host_gap=EveryStep(OfOp(draw(times(10)))),
        before_optimizer=OfRank(draw(times())),
        between=OfRank(draw(times())),
        tail=pipeline.tail or 0,
        tail_of_all=True,
        steps=4,
    )


class EveryStep:
    def __init__(self, duration: OfOp) -> None:
        self.duration = duration

    def __call__(self, op: Op, rank: int, _step: int) -> int:
        return self.duration(op, rank, 0)

    def __repr__(self) -> str:
        return f"EveryStep({self.duration})"


class OfRank:
    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __call__(self, rank: int, _step: int) -> int:
        return self.values[rank % len(self.values)]

    def __repr__(self) -> str:
        return f"OfRank({self.values})"


def in_world(pipeline: Pipeline, *, host: bool, transfers: bool, work: bool) -> Pipeline:
    """The pipeline with what a world takes away taken away where it is made."""
    changed = pipeline
    if not host:
        changed = replace(changed, host_gap=0, before_optimizer=OfPair([0]), between=OfPair([0]))
    if not transfers:
        changed = replace(changed, transfer=OfPair([0]), tail=0, rendezvous=False)
    if not work:
        changed = replace(changed, duration=mean_of_kind(pipeline))
    return changed


def mean_of_kind(pipeline: Pipeline):
    """Every op takes the mean of its kind over all stages and microbatches; a whole backward is a kind of its own."""
    ops = [op for order in pipeline.orders for op in order]
    split = {(op.stage, op.microbatch) for op in ops if op.kind is Kind.WEIGHT}

    def kind(op: Op) -> tuple[Kind, bool]:
        return op.kind, op.kind is Kind.BACKWARD and (op.stage, op.microbatch) in split

    every = defaultdict(list)
    for rank in range(len(pipeline.orders) * pipeline.replicas):
        for op in pipeline.orders[rank % len(pipeline.orders)]:
            every[kind(op)].append(pipeline.duration(op, rank, 0))
    return lambda op, rank, step: round(sum(every[kind(op)]) / len(every[kind(op)]))  # noqa: ARG005


@settings(max_examples=15)
@given(steady())
def test_worlds_with_free_transfers_last_as_long_as_the_job_made_that_way(pipeline: Pipeline) -> None:
    graph = graph_of(pipeline.trace())
    worlds = eight_worlds(graph)
    choices = [(True, True, True), *((host, False, work) for host, work in product((True, False), repeat=2))]
    predicted = replay(graph, [worlds[choice] for choice in choices]).duration_WK[:, -1]
    for (host, transfers, work), seconds in zip(choices, predicted, strict=True):
        made = in_world(pipeline, host=host, transfers=transfers, work=work)
        assert seconds == pytest.approx(last_step_s(made), abs=1e-6), (host, transfers, work)


def last_step_s(pipeline: Pipeline) -> float:
    return float(find_steps(pipeline.trace()).duration_s[-1])


@settings(max_examples=20)
@given(pipelines(), st.data())
def test_a_delay_of_one_op_makes_no_world_shorter(pipeline: Pipeline, data: st.DataObject) -> None:
    graph = graph_of(pipeline.trace())
    op = data.draw(st.sampled_from(np.flatnonzero(graph.what_N == COMPUTE).tolist()))
    delayed_NK = graph.work_NK.copy()
    delayed_NK[op] += data.draw(st.integers(1, 100)) * TICK / 1e9
    delayed = replace(graph, work_NK=delayed_NK)
    for choice in CHOICES:
        before = replay_once(graph, eight_worlds(graph)[choice])
        after = replay_once(delayed, eight_worlds(delayed)[choice])
        assert (after >= before - 1e-9).all()


@settings(max_examples=20)
@given(steady(), st.data())
def test_a_delay_of_one_op_in_every_step_makes_no_world_of_a_steady_run_shorter(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(pipeline.orders) - 1))
    delayed_op = data.draw(st.sampled_from(pipeline.orders[position]))
    delay = data.draw(st.integers(1, 50)) * TICK

    def duration(op: Op, rank: int, step: int) -> int:
        return pipeline.duration(op, rank, step) + delay * (op == delayed_op and rank == position)

    before, after = (graph_of(job.trace()) for job in (pipeline, replace(pipeline, duration=duration)))
    worlds = [list(eight_worlds(graph).values()) for graph in (before, after)]
    time = [replay(graph, every).duration_WK[:, -1] for graph, every in zip((before, after), worlds, strict=True)]
    assert (time[1] >= time[0] - 1e-9).all()


@settings(max_examples=20)
@given(pipelines())
def test_from_the_same_starts_no_join_is_passed_later_without_host_time_or_transfers(pipeline: Pipeline) -> None:
    graph = graph_of(pipeline.trace())
    worlds = eight_worlds(graph)
    passed = {choice: every_step_once(graph, worlds[choice]) for choice in CHOICES}
    for work, other in product((True, False), repeat=2):
        assert (passed[False, other, work] <= passed[True, other, work] + 1e-9).all()
        assert (passed[other, False, work] <= passed[other, True, work] + 1e-9).all()


# Of a single step this cannot be said: it begins where its first rank begins and ends where the next one's first rank
# does, so that a rank which comes earlier in one step may make that step longer, and the next one shorter.
@settings(max_examples=40)
@given(pipelines())
def test_taking_host_time_or_transfers_away_makes_no_run_longer(pipeline: Pipeline) -> None:
    graph = graph_of(pipeline.trace())
    worlds = eight_worlds(graph)
    time = dict(zip(CHOICES, replay(graph, [worlds[c] for c in CHOICES]).duration_WK.mean(axis=1), strict=True))
    for work, other in product((True, False), repeat=2):
        assert time[False, other, work] <= time[True, other, work] + 1e-9
        assert time[other, False, work] <= time[other, True, work] + 1e-9


@settings(max_examples=20)
@given(pipelines(), st.data())
def test_a_delay_of_one_op_makes_no_run_shorter_in_any_world(pipeline: Pipeline, data: st.DataObject) -> None:
    graph = graph_of(pipeline.trace())
    op = data.draw(st.sampled_from(np.flatnonzero(graph.what_N == COMPUTE).tolist()))
    delayed_NK = graph.work_NK.copy()
    delayed_NK[op] += data.draw(st.integers(1, 100)) * TICK / 1e9
    before, after = eight_worlds(graph), eight_worlds(replace(graph, work_NK=delayed_NK))
    for choice in CHOICES:
        if after[choice].work_NK is None:
            after[choice] = replace(after[choice], work_NK=delayed_NK)
    every = [World(), *(before[choice] for choice in CHOICES), *(after[choice] for choice in CHOICES)]
    _, *mean_s = replay(graph, every).duration_WK.mean(axis=1)
    assert (np.array(mean_s[len(CHOICES) :]) >= np.array(mean_s[: len(CHOICES)]) - 1e-9).all()


def test_a_run_of_which_one_step_is_known_is_no_longer_without_its_host_time() -> None:
    # the ranks of two replicas start this step at other times than the next: which is the first differs by the world
    orders = schedules.order("1F1B", ranks=2, chunks=1, microbatches=4)
    between = OfPair([0, 31 * TICK, 13 * TICK, 7 * TICK])
    pipeline = Pipeline(orders, [0, 1], between=between, host_gap=TICK, steps=2, replicas=2, tail=3 * TICK)
    graph = graph_of(pipeline.trace())
    worlds = eight_worlds(graph)
    kept, prompt = replay(graph, [World(), worlds[False, True, True]]).duration_WK.tolist()
    assert len(kept) == 1
    assert prompt[0] <= kept[0]


GRID = [
    (name, ranks, chunks, microbatches)
    for name, ranks, chunks, microbatches in product(
        ("GPipe", "1F1B", "Interleaved1F1B"), (2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 4, 8, 12, 16, 24, 32)
    )
    if (chunks == 1) == (name != "Interleaved1F1B")
    and not (name == "Interleaved1F1B" and (microbatches % ranks or microbatches * chunks * ranks > 512))
    and not (name == "1F1B" and microbatches < ranks)
]


@pytest.mark.parametrize(("name", "ranks", "chunks", "microbatches"), GRID)
def test_equal_work_takes_as_long_as_the_closed_formula(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    # Every stage computes F for 10 ms and B for 20 ms, V stages a rank. Huang 2019, Narayanan 2021: a rank is busy for
    # V M (F + B) and idle for (P - 1) (F + B); a fraction of (P - 1) / (V M + P - 1) of the pipeline's time.
    orders = schedules.order(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    pipeline = Pipeline(orders, schedules.stage_ranks(name, ranks, chunks), steps=2, optimizer=0)
    graph = graph_of(pipeline.trace())
    nothing = eight_worlds(graph)[CHOICES[-1]]
    seconds = replay(graph, [World(), nothing]).duration_WK[1, 0]
    assert seconds == pytest.approx(0.030 * (chunks * microbatches + ranks - 1), abs=1e-9)


def test_a_measured_step_is_replayed_from_its_own_starts() -> None:
    orders = schedules.order("1F1B", ranks=2, chunks=1, microbatches=2)
    graph = graph_of(Pipeline(orders, [0, 1], optimizer=1 * MS, steps=3).trace())
    assert graph.what_N[graph.joins_J[graph.start_joins]].tolist() == [START, START]
    # rank 1: F0 10-20, B0 20-40, F1 40-50, B1 50-70; rank 0: F0 F1 0-20, B0 40-60, B1 70-90, optimizer 90-91
    assert replay(graph, [World()]).duration_WK.tolist() == [pytest.approx([0.091, 0.091])]


def test_worlds_that_are_too_many_at_once_are_replayed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = schedules.order("1F1B", ranks=3, chunks=1, microbatches=4)
    pipeline = Pipeline(
        orders, [0, 1, 2], duration=OfKind(5 * MS), host_gap=1 * MS, between=OfPair([3 * MS, 0]), steps=6
    )
    graph = graph_of(pipeline.trace())
    worlds = list(eight_worlds(graph).values())
    whole = replay(graph, worlds, keep_joins=True)
    monkeypatch.setattr("ppdiag.analyzers.replay.MOST_FACTOR_BYTES", 1)  # two worlds at once
    parts = replay(graph, worlds, keep_joins=True)
    assert parts.duration_WK.tolist() == whole.duration_WK.tolist()
    assert parts.join_JWK is not None
    assert parts.join_JWK.tolist() == whole.join_JWK.tolist()  # type: ignore[union-attr]


def test_the_replay_error_of_a_steady_job_is_nil() -> None:
    orders = schedules.order("1F1B", ranks=3, chunks=1, microbatches=4)
    pipeline = Pipeline(orders, [0, 1, 2], duration=OfKind(5 * MS), host_gap=1 * MS, steps=6)
    assert diagnose(pipeline.trace()).replay_error_fraction == pytest.approx(0.0, abs=1e-9)
