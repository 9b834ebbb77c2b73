"""When each op of a schedule runs, given how long each takes: the longest path, for many sets of durations in one pass.

An op starts when the op before it on its rank has ended and its input has arrived: F of stage s needs F of stage s-1,
B of stage s needs B of stage s+1; an input from another rank arrives a transfer later. Transfers do not occupy a rank.

Shape letters: O ops, W worlds (sets of durations), R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.analyzers.planning import orders
from ppdiag.analyzers.schedules import Op, peak_activations
from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_OP = -1


@dataclass(frozen=True, slots=True)
class Program:
    """The ops of all ranks, sorted so that each comes after all that it needs.

    Attributes:
        ops: the ops, in the order of the arrays.
        rank_O: rank of each op.
        kind_O, stage_O, microbatch_O: of each op.
        before_O: the op before it on its rank, or ``NO_OP``.
        source_O: the op whose output it needs, or ``NO_OP``.
        crosses_O: that output comes from another rank.
        whole_O: a backward whose weight gradient is no op of its own.
        level_starts: bounds of runs of ops that do not need each other.
        peak_R: activations that each rank keeps at most, in stages of one microbatch.
    """

    ops: tuple[Op, ...]
    rank_O: np.ndarray
    kind_O: np.ndarray
    stage_O: np.ndarray
    microbatch_O: np.ndarray
    before_O: np.ndarray
    source_O: np.ndarray
    crosses_O: np.ndarray
    whole_O: np.ndarray
    level_starts: np.ndarray
    peak_R: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """P."""
        return len(self.peak_R)

    @property
    def messages(self) -> int:
        """Messages between ranks in one step, activations and gradients together."""
        return int(self.crosses_O.sum())


class Durations(NamedTuple):
    """How long ops take, in any unit: F, B and W of each stage (stage x world), and a transfer (world).

    B is the backward of the input. Where W is no op of its own, the backward takes both.
    """

    forward_SW: np.ndarray
    backward_SW: np.ndarray
    weight_SW: np.ndarray
    transfer_W: np.ndarray


@dataclass(frozen=True, slots=True)
class Times:
    """When the ops run.

    Attributes:
        start_OW, end_OW: of each op.
        busy_RW: time in which each rank works.
        span_RW: from each rank's first op to its last.
        makespan_W: from the first op on any rank to the last.
    """

    start_OW: np.ndarray
    end_OW: np.ndarray
    busy_RW: np.ndarray
    span_RW: np.ndarray
    makespan_W: np.ndarray

    @property
    def bubble_fraction_W(self) -> np.ndarray:
        """Idle share of the makespan, mean of the ranks: bubble / total."""
        return 1.0 - self.busy_RW.mean(axis=0) / self.makespan_W

    @property
    def bubble_over_ideal_W(self) -> np.ndarray:
        """Idle time over the time without any bubble: bubble / ideal."""
        return self.makespan_W / self.busy_RW.mean(axis=0) - 1.0

    @property
    def span_bubble_fraction_W(self) -> np.ndarray:
        """Idle share of the longest span of one rank: what is left where the steps of the ranks may be skewed."""
        return 1.0 - self.busy_RW.mean(axis=0) / self.span_RW.max(axis=0)


def program(name: str, *, ranks: int, chunks: int, microbatches: int) -> Program:
    """The program of a schedule.

    Raises:
        ValueError: the schedule has no such shape.
    """
    ops_of_ranks = orders.order(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    return _compile(ops_of_ranks, orders.stage_ranks(name, ranks, chunks))


def uniform(work: Program, *, forward: float, backward: float, weight: float = 0.0, transfer: float = 0.0) -> Times:
    """The times where every stage takes as long."""
    stages = int(work.stage_O.max()) + 1
    column = np.ones((stages, 1))
    return run(work, Durations(forward * column, backward * column, weight * column, np.array([transfer])))


def run(work: Program, durations: Durations) -> Times:
    """The times of all worlds."""
    table_KSW = np.zeros((max(Kind) + 1, *durations.forward_SW.shape))
    table_KSW[Kind.FORWARD], table_KSW[Kind.BACKWARD] = durations.forward_SW, durations.backward_SW
    table_KSW[Kind.WEIGHT] = durations.weight_SW
    duration_OW = table_KSW[work.kind_O, work.stage_O]
    duration_OW += work.whole_O[:, None] * durations.weight_SW[work.stage_O]
    delay_OW = work.crosses_O[:, None] * durations.transfer_W
    count, worlds = duration_OW.shape
    end_OW = np.zeros((count + 1, worlds))  # the last row is the end of NO_OP
    bounds = work.level_starts.tolist()
    for first, last in pairwise(bounds):
        ready = end_OW[work.source_O[first:last]] + delay_OW[first:last]
        np.maximum(ready, end_OW[work.before_O[first:last]], out=ready)
        end_OW[first:last] = ready + duration_OW[first:last]
    return _times(work, end_OW[:-1], duration_OW)


def _times(work: Program, end_OW: np.ndarray, duration_OW: np.ndarray) -> Times:
    start_OW = end_OW - duration_OW
    own_RO = [np.flatnonzero(work.rank_O == rank) for rank in range(work.ranks)]
    busy_RW = np.stack([duration_OW[own].sum(axis=0) for own in own_RO])
    span_RW = np.stack([end_OW[own].max(axis=0) - start_OW[own].min(axis=0) for own in own_RO])
    return Times(start_OW, end_OW, busy_RW, span_RW, end_OW.max(axis=0) - start_OW.min(axis=0))


def _compile(ops_of_ranks: Sequence[Sequence[Op]], rank_of_stage: Sequence[int]) -> Program:
    ops = [op for own in ops_of_ranks for op in own]
    rank_of_op = [rank for rank, own in enumerate(ops_of_ranks) for _ in own]
    index = {op: number for number, op in enumerate(ops)}
    before = [NO_OP if i == 0 or rank_of_op[i - 1] != rank_of_op[i] else i - 1 for i in range(len(ops))]
    source = [NO_OP if op.kind is Kind.WEIGHT else index.get(_needed(op), NO_OP) for op in ops]
    level = _levels(before, source)
    by_level = np.argsort(level, kind="stable")
    place = np.append(np.argsort(by_level), NO_OP)  # NO_OP stays NO_OP
    stage_O = np.array([op.stage for op in ops])[by_level]
    whole = [op.kind is Kind.BACKWARD and op._replace(kind=Kind.WEIGHT) not in index for op in ops]
    source_O = place[np.array(source)][by_level]
    home_S = np.array(rank_of_stage)
    return Program(
        ops=tuple(ops[i] for i in by_level),
        rank_O=np.array(rank_of_op)[by_level],
        kind_O=np.array([int(op.kind) for op in ops])[by_level],
        stage_O=stage_O,
        microbatch_O=np.array([op.microbatch for op in ops])[by_level],
        before_O=place[np.array(before)][by_level],
        source_O=source_O,
        crosses_O=(source_O != NO_OP) & (home_S[stage_O[source_O]] != home_S[stage_O]),
        whole_O=np.array(whole)[by_level],
        level_starts=np.searchsorted(level[by_level], np.arange(level.max() + 2)),
        peak_R=tuple(peak_activations(ops_of_ranks)),
    )


def _needed(op: Op) -> Op:
    """The op of another stage whose output this one, F or B, needs."""
    return op._replace(stage=op.stage + (-1 if op.kind is Kind.FORWARD else 1))


def _levels(before: Sequence[int], source: Sequence[int]) -> np.ndarray:
    """For each op, how many ops there are at most on a path to it.

    Ranks take turns: each runs on as far as its inputs are known.
    """
    level = [NO_OP] * len(before)
    next_on_rank: dict[int, int] = {previous: i for i, previous in enumerate(before) if previous != NO_OP}
    waiting: dict[int, int] = {}
    ready = [i for i, previous in enumerate(before) if previous == NO_OP]
    while ready:
        i = ready.pop()
        if source[i] != NO_OP and level[source[i]] == NO_OP:
            waiting[source[i]] = i
            continue
        level[i] = 1 + max(level[j] if j != NO_OP else NO_OP for j in (before[i], source[i]))
        ready += [next_on_rank[i]] if i in next_on_rank else []
        ready += [waiting.pop(i)] if i in waiting else []
    if NO_OP in level:
        raise ValueError("the order of ops contradicts itself: some wait for each other")
    return np.array(level)
