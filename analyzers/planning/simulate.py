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
        peak_R: activations that each rank keeps at most until their backward, in stages of one microbatch.
        peak_until_weight_R: the same until their weight gradient; of those only a part is left after the backward.
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
    peak_until_weight_R: tuple[int, ...]

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
    by_rank = np.argsort(work.rank_O, kind="stable")
    starts = np.searchsorted(work.rank_O[by_rank], np.arange(work.ranks))
    busy_RW = np.add.reduceat(duration_OW[by_rank], starts)
    first_RW = np.minimum.reduceat(start_OW[by_rank], starts)
    span_RW = np.maximum.reduceat(end_OW[by_rank], starts) - first_RW
    return Times(start_OW, end_OW, busy_RW, span_RW, end_OW.max(axis=0) - start_OW.min(axis=0))


def _compile(ops_of_ranks: Sequence[Sequence[Op]], rank_of_stage: Sequence[int]) -> Program:
    ops = [op for own in ops_of_ranks for op in own]
    rank_O = np.repeat(np.arange(len(ops_of_ranks)), [len(own) for own in ops_of_ranks])
    kind_O, stage_O, microbatch_O = np.array(ops, dtype=np.int64).reshape(-1, 3).T
    before_O = np.arange(-1, len(ops) - 1)
    before_O[1:][rank_O[1:] != rank_O[:-1]] = NO_OP
    source_O, whole_O = _sources(kind_O, stage_O, microbatch_O)
    level_O = _levels(before_O.tolist(), source_O.tolist())
    by_level = np.argsort(level_O, kind="stable")
    place = np.append(np.argsort(by_level), NO_OP)  # NO_OP stays NO_OP
    home_S = np.array(rank_of_stage)
    source_O, stage_O = place[source_O][by_level], stage_O[by_level]
    return Program(
        ops=tuple(ops[i] for i in by_level.tolist()),
        rank_O=rank_O[by_level],
        kind_O=kind_O[by_level],
        stage_O=stage_O,
        microbatch_O=microbatch_O[by_level],
        before_O=place[before_O][by_level],
        source_O=source_O,
        crosses_O=(source_O != NO_OP) & (home_S[stage_O[source_O]] != home_S[stage_O]),
        whole_O=whole_O[by_level],
        level_starts=np.searchsorted(level_O[by_level], np.arange(level_O.max() + 2)),
        peak_R=tuple(peak_activations(ops_of_ranks)),
        peak_until_weight_R=tuple(_peaks_until_weight(kind_O, whole_O, rank_O)),
    )


def _peaks_until_weight(kind_O: np.ndarray, whole_O: np.ndarray, rank_O: np.ndarray) -> list[int]:
    """Forwards on each rank whose weight gradient, or whole backward, is still to come, at most."""
    change_O = np.where(kind_O == Kind.FORWARD, 1, np.where((kind_O == Kind.WEIGHT) | whole_O, -1, 0))
    starts = np.flatnonzero(np.diff(rank_O, prepend=-1))
    return [int(np.cumsum(own).max()) for own in np.split(change_O, starts[1:])]


def _sources(kind_O: np.ndarray, stage_O: np.ndarray, microbatch_O: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each op, the op of another stage whose output it needs, or ``NO_OP``; and which backwards have no own W."""
    stages, microbatches = int(stage_O.max()) + 1, int(microbatch_O.max()) + 1
    # A stage more at each end, in which there is no op: what the first and the last stage need.
    op_KSM = np.full((max(Kind) + 1, stages + 2, microbatches), NO_OP)
    op_KSM[kind_O, stage_O + 1, microbatch_O] = np.arange(len(kind_O))
    step_O = np.where(kind_O == Kind.FORWARD, -1, 1)
    source_O = op_KSM[kind_O, stage_O + 1 + step_O, microbatch_O]
    source_O[kind_O == Kind.WEIGHT] = NO_OP
    whole_O = (kind_O == Kind.BACKWARD) & (op_KSM[Kind.WEIGHT, stage_O + 1, microbatch_O] == NO_OP)
    return source_O, whole_O


def _levels(before: Sequence[int], source: Sequence[int]) -> np.ndarray:
    """For each op, how many ops there are at most on a path to it.

    Ranks take turns: each runs on as far as its inputs are known.

    Raises:
        ValueError: some wait for each other.
    """
    unknown = NO_OP - 1
    level = [unknown] * len(before) + [NO_OP]  # the last one is that of NO_OP
    next_on_rank: dict[int, int] = {previous: i for i, previous in enumerate(before) if previous != NO_OP}
    waiting: dict[int, int] = {}
    ready = [i for i, previous in enumerate(before) if previous == NO_OP]
    while ready:
        i = ready.pop()
        earlier, input_level = level[before[i]], level[source[i]]
        if input_level == unknown:
            waiting[source[i]] = i
            continue
        level[i] = 1 + max(input_level, earlier)
        if i in next_on_rank:
            ready.append(next_on_rank[i])
        if i in waiting:
            ready.append(waiting.pop(i))
    if unknown in level:
        raise ValueError("the order of ops contradicts itself: some wait for each other")
    return np.array(level[:-1])
