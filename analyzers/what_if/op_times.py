"""What each op of a run took, so that the same ops can be laid out in another order.

Shape letters: N events, O ops, K steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.analyzers.messages import MISSING
from ppdiag.analyzers.program import POST
from ppdiag.analyzers.what_if.run import TORCH, collective_time, is_op, op_event
from ppdiag.model import Kind

if TYPE_CHECKING:
    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.schedules import Op
    from ppdiag.analyzers.what_if.run import Run

ASSUMED_WEIGHT_SHARE = 0.5
"""The weight gradient's part of a backward that was never split: a matrix product for each, input and weights."""


class OpKey(NamedTuple):
    """An op of a rank (its index in the graph)."""

    rank: int
    kind: int
    stage: int
    microbatch: int


class Times(NamedTuple):
    """Times of one op in each step (K): its work, and the host's time.

    The host's before its messages (``around``), between its inputs and its start (``enter``), and between its end and
    its send (``leave``).
    """

    work: np.ndarray
    around: np.ndarray
    enter: np.ndarray
    leave: np.ndarray


@dataclass(frozen=True)
class OpTimes:
    """The ops of a run and their times.

    Attributes:
        times: of each op.
        holder: rank index that holds (replica, stage).
        first: first op of each rank index: what came before it is the step's, not the op's.
        per_call: M, of one call of the schedule.
        first_stage_whole: where the backward is split, W of the first stage takes all of it, as its input needs no
            gradient (torch).
    """

    times: dict[OpKey, Times]
    holder: dict[tuple[int, int], int]
    first: dict[int, OpKey]
    per_call: int
    first_stage_whole: bool = False

    @cached_property
    def steps(self) -> int:
        """K."""
        return len(next(iter(self.times.values())).work)

    @cached_property
    def nothing(self) -> np.ndarray:
        """No time (K)."""
        return np.zeros(self.steps)

    @cached_property
    def kinds(self) -> frozenset[int]:
        """Kinds of ops that there are."""
        return frozenset(key.kind for key in self.times)

    @cached_property
    def weight_share(self) -> float | None:
        """The weight gradient's part of the backwards that were split; None where none was.

        The first stage is left out: its input needs no gradient.
        """
        weight = [key for key in self.times if key.kind == Kind.WEIGHT and key.stage > 0]
        weight_s = sum(float(self.times[key].work.sum()) for key in weight)
        inputs = (key._replace(kind=int(Kind.BACKWARD)) for key in weight)
        input_s = sum(float(self.times[key].work.sum()) for key in inputs if key in self.times)
        return weight_s / (weight_s + input_s) if weight_s > 0 else None

    @cached_property
    def usual_around(self) -> dict[tuple[int, int], np.ndarray]:
        """Median over the ops of a rank and kind of the host time before them (K)."""
        rows: dict[tuple[int, int], list[np.ndarray]] = {}
        for key, times in self.times.items():
            if self.first[key.rank] != key:
                rows.setdefault((key.rank, key.kind), []).append(times.around)
        return {name: np.median(np.stack(values), axis=0) for name, values in rows.items()}

    def share_of(self, kind: Kind, stage: int) -> float:
        """The part of a backward that an op of this kind takes where a stage of the new order splits it."""
        weight = ASSUMED_WEIGHT_SHARE if self.weight_share is None else self.weight_share
        if stage == 0 and self.first_stage_whole:
            weight = 1.0
        return weight if kind is Kind.WEIGHT else 1.0 - weight

    def split_work(self, rank: int, op: Op, source: int) -> np.ndarray | None:
        """Work of a backward of the input, or of a weight gradient, that was measured as such (K); else None."""
        weight = OpKey(rank, int(Kind.WEIGHT), op.stage, source)
        return self._work(weight._replace(kind=int(op.kind))) if weight in self.times else None

    def work(self, rank: int, stage: int, microbatch: int, kind: Kind) -> np.ndarray:
        """Work of one op (K); that of a backward, or of a weight gradient, is the whole backward's."""
        key = OpKey(rank, int(kind), stage, microbatch)
        if kind is Kind.FORWARD:
            return self._work(key)
        return self._work(key._replace(kind=int(Kind.BACKWARD))) + self._work(key._replace(kind=int(Kind.WEIGHT)))

    def _work(self, key: OpKey) -> np.ndarray:
        return self.times[key].work if key in self.times else self.nothing


def op_times(run: Run, graph: Graph) -> OpTimes:
    """The times of all ops of the graph (the run's own, or one of the same events and other times)."""
    label = _labels(graph)
    rows, number = np.unique(label[is_op(graph)], axis=0, return_inverse=True)
    number_N = np.full(len(graph.what_N), MISSING, np.int64)
    number_N[is_op(graph)] = number.ravel()
    following, before = op_event(graph), _op_before(graph)
    host_NK = graph.host_NK + collective_time(graph)
    sends = (graph.what_N == POST) & (graph.kind_N == Kind.SEND) & (before != MISSING)
    own, inside = is_op(graph), following != MISSING
    count = len(rows)
    columns = (
        _summed(graph.work_NK[own], number_N[own], count),
        _summed(host_NK[inside & ~own & ~sends], number_N[following[inside & ~own & ~sends]], count),
        _summed(host_NK[own], number_N[own], count),
        _summed(host_NK[sends], number_N[before[sends]], count),
    )
    keys = [OpKey(*row) for row in rows.tolist()]
    times = {key: Times(*(column[i] for column in columns)) for i, key in enumerate(keys)}
    first = {int(graph.rank_N[i]): OpKey(*label[i].tolist()) for i in np.flatnonzero(own)[::-1].tolist()}
    return OpTimes(times, _holders(run), first, run.shape.microbatches, run.job.framework == TORCH)


def _labels(graph: Graph) -> np.ndarray:
    """Rank, kind, stage and microbatch of each event (N x 4)."""
    return np.stack([graph.rank_N, graph.kind_N, graph.stage_N, graph.microbatch_N], axis=1).astype(np.int64)


def _op_before(graph: Graph) -> np.ndarray:
    """The last event of an op before each event, on its rank; ``MISSING`` before the first (N)."""
    index = np.where(is_op(graph), np.arange(len(graph.what_N)), MISSING)
    before = np.maximum.accumulate(index)
    same = (before != MISSING) & (graph.rank_N[before] == graph.rank_N)
    return np.where(same, before, MISSING)


def _summed(time: np.ndarray, number: np.ndarray, count: int) -> np.ndarray:
    sums = np.zeros((count, time.shape[1]))
    np.add.at(sums, number, time)
    return sums


def _holders(run: Run) -> dict[tuple[int, int], int]:
    index = {int(rank): i for i, rank in enumerate(run.graph.ranks_R)}
    return {
        (replica, stage): index[rank]
        for replica, ranks in enumerate(run.shape.pipelines)
        for rank in ranks
        for stage in run.shape.stages[rank]
    }


def source_microbatch(microbatch: int, count: int, measured: int) -> int:
    """Which of the measured microbatches one of ``count`` takes after.

    The first and the last take after their like, for what is done once (the first use of a buffer, the reduction of
    gradients in the last backward); the others after the others in turn.

    >>> [source_microbatch(m, 8, 4) for m in range(8)]
    [0, 1, 2, 1, 2, 1, 2, 3]
    """
    if count == measured:
        return microbatch
    if microbatch == 0:
        return 0
    if microbatch == count - 1:
        return measured - 1
    return 1 + (microbatch - 1) % (measured - 2) if measured > 2 else microbatch % measured


def stage_mix(stages: int, measured: int, ends: tuple[float, float] = (0.0, 0.0)) -> list[list[tuple[int, float]]]:
    """Which measured stages each of ``stages`` takes its layers from, and how much of each: all in the model's order.

    Args:
        stages: how many there are to be.
        measured: how many there were.
        ends: share of the first measured stage that is embedding, and of the last that is head and loss: they stay on
            the first and the last stage.

    >>> stage_mix(2, 4), stage_mix(4, 2)[1]
    ([[(0, 1.0), (1, 1.0)], [(2, 1.0), (3, 1.0)]], [(0, 0.5)])
    >>> stage_mix(4, 2, (0.0, 0.5))[2:]
    [[(1, 0.25)], [(1, 0.75)]]
    """
    layers = [1.0] * measured
    layers[0] -= ends[0]
    layers[-1] -= ends[1]
    mix = []
    for stage in range(stages):
        low, high = stage * measured, (stage + 1) * measured  # in 1/stages of a measured stage
        parts = range(low // stages, -(-high // stages))
        shares = {s: layers[s] * (min(high, (s + 1) * stages) - max(low, s * stages)) / stages for s in parts}
        if stage == 0:
            shares[0] += ends[0]
        if stage == stages - 1:
            shares[measured - 1] += ends[1]
        mix.append(list(shares.items()))
    return mix
