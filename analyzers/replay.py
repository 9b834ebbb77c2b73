"""Replays a step under other durations: the longest path through its graph, for many worlds and all steps in one pass.

A *world* is a choice of durations: host time of each rank kept or zero, transfers of each link kept or zero, work as
measured or some other. Each value of the pass is a numpy vector over (world x step); the graph is walked once, level
by level (a max-plus recurrence).

Where a step begins on a rank depends on how the step before ended there, so that the pass is repeated with the ends of
each step as the start of the next until the starts settle: what a world does to one step reaches the next.

Shape letters: R ranks, N events, J joins, E edges, K steps, W worlds, L links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.graph import START, Graph

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_BYTES = 128 << 20
"""Bound on the edge weights held at once: more steps are replayed block by block."""
MOST_KEPT_BYTES = 256 << 20
"""Times of edges up to this size are kept from one pass to the next; larger ones are computed again in each."""
BARRED_S = 1e12
"""An edge this early binds nobody."""
MOST_PASSES = 6
SETTLED_FRACTION = 1e-6
"""Starts that move by less than this share of the step have settled."""


@dataclass(frozen=True, slots=True)
class World:
    """A choice of durations.

    Attributes:
        work_NK: compute time of each event; None keeps the measured.
        host_R: factor on the host time of each rank; None keeps it.
        transfer_L: factor on the transfers of each link; None keeps them. At 0 a send waits for nobody. What an
            inferred message took over the usual is a wait for work as it was: it is kept only where work is.
    """

    work_NK: np.ndarray | None = None
    host_R: np.ndarray | None = None
    transfer_L: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """Results of a replay.

    Attributes:
        duration_WK: length of each step in each world, in seconds.
        join_JWK: when each join is passed; only kept where asked for, else None.
    """

    duration_WK: np.ndarray
    join_JWK: np.ndarray | None = None


def replay(graph: Graph, worlds: Sequence[World], *, keep_joins: bool = False) -> Replay:
    """The step times of all worlds; the first world must keep everything (it anchors the starts)."""
    shape = (len(worlds), len(graph.steps_K))
    start_RWK = np.repeat(graph.start_RK[:, None, :], len(worlds), axis=1)
    weights = _Weights(graph, worlds)
    duration_WK, join_JWK = np.empty(shape), None
    for _ in range(MOST_PASSES):
        join_JWK, end_RWK, duration_WK = _pass(graph, weights, start_RWK, keep_joins=keep_joins)
        settled = _next_starts(graph, end_RWK, duration_WK)
        moved = np.abs(settled - start_RWK).max(initial=0.0)
        start_RWK = settled
        if moved <= SETTLED_FRACTION * duration_WK.max(initial=0.0):
            break
    return Replay(duration_WK, join_JWK)


def _next_starts(graph: Graph, end_RWK: np.ndarray, duration_WK: np.ndarray) -> np.ndarray:
    """When each rank starts each step, from how the step before ended in that world.

    The measured starts are shifted by as much as the world's ends differ from those of the world that keeps all; a step
    whose predecessor is not among the steps is taken to follow itself.
    """
    ahead_RWK = end_RWK - duration_WK
    shift_RWK = ahead_RWK - ahead_RWK[:, :1]
    before = np.searchsorted(graph.steps_K, graph.steps_K - 1)
    follows = graph.steps_K[np.minimum(before, len(graph.steps_K) - 1)] == graph.steps_K - 1
    origin = np.where(follows, before, np.arange(len(graph.steps_K)))
    starts = graph.start_RK[:, None, :] + shift_RWK[:, :, origin]
    zero_WK = starts[graph.sources].min(axis=0) - graph.start_RK[graph.sources].min(axis=0)
    return starts - zero_WK


def _pass(
    graph: Graph, weights: _Weights, start_RWK: np.ndarray, *, keep_joins: bool
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    _, worlds, steps = start_RWK.shape
    end_RWK = np.empty_like(start_RWK)
    kept = np.empty((len(graph.joins_J), worlds, steps)) if keep_joins else None
    for part in weights.blocks:
        weight, time = weights.of(part)
        time[graph.start_joins] = start_RWK[:, :, part]
        _walk(graph, weight, time)
        end_RWK[:, :, part] = time[graph.end_joins]
        if kept is not None:
            kept[:, :, part] = time
    duration_WK = end_RWK[graph.sources].min(axis=0) - start_RWK[graph.sources].min(axis=0)
    return kept, end_RWK, duration_WK


def _walk(graph: Graph, weight: np.ndarray, time: np.ndarray) -> None:
    """Fills ``time`` (J x W x K), whose starts are set, by the longest path; ``weight`` (E x W x K) is consumed."""
    joins, edges = len(time), len(weight)
    time, weight = time.reshape(joins, -1), weight.reshape(edges, -1)
    new = np.flatnonzero(np.diff(graph.dst_E, prepend=-1))  # first edge of each join; edges of a join are adjacent
    bounds = np.searchsorted(new, graph.level_starts)
    starts = graph.level_starts.tolist()
    for level in range(len(starts) - 1):
        edges_here = slice(starts[level], starts[level + 1])
        joins_here = new[bounds[level] : bounds[level + 1]]
        reached = weight[edges_here]
        reached += time[graph.src_E[edges_here]]
        time[graph.dst_E[joins_here]] = np.maximum.reduceat(reached, joins_here - edges_here.start, axis=0)


class _Weights:
    """What each edge adds in each world: a small matrix product an edge, factors (W x F) times times (F x K).

    The rows of times are host time, work in each of its variants, the excess of inferred messages where there is any,
    transfer, and what every world keeps; a last row is what bars an edge: a send's wait where transfers are free.
    """

    def __init__(self, graph: Graph, worlds: Sequence[World]) -> None:
        self.graph = graph
        works = {id(world.work_NK): world.work_NK for world in worlds}
        self.sums_NK = [np.cumsum(graph.host_NK, axis=0)]
        self.sums_NK += [np.cumsum(graph.work_NK if work is None else work, axis=0) for work in works.values()]
        rows = len(self.sums_NK) + (graph.excess_EK is not None)
        self.factor_EWF = np.zeros((len(graph.src_E), len(worlds), rows + 3))
        rank_E = graph.rank_N[graph.last_E]
        for w, world in enumerate(worlds):
            factor = self.factor_EWF[:, w]
            factor[:, 0] = 1.0 if world.host_R is None else world.host_R[rank_E]
            factor[:, 1 + list(works).index(id(world.work_NK))] = 1.0
            # CHAIN is -1: the appended 1
            transfer_E = 1.0 if world.transfer_L is None else np.append(world.transfer_L, 1.0)[graph.link_E]
            if graph.excess_EK is not None:
                factor[:, -4] = transfer_E if world.work_NK is None else 0.0
            factor[:, -3] = transfer_E
            factor[:, -2] = 1.0
            factor[:, -1] = graph.optional_E & (transfer_E == 0.0)
        steps = len(graph.steps_K)
        edge_bytes = 8 * (self.factor_EWF.shape[1] + self.factor_EWF.shape[2])
        block = min(steps, max(1, BLOCK_BYTES // max(1, edge_bytes * len(graph.src_E))))
        self.blocks = [slice(first, min(first + block, steps)) for first in range(0, steps, block)]
        self._buffers: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._keep = 8 * self.factor_EWF.shape[2] * len(graph.src_E) * steps <= MOST_KEPT_BYTES
        self._times: dict[int, np.ndarray] = {}

    def of(self, part: slice) -> tuple[np.ndarray, np.ndarray]:
        """The weights of a block of steps (E x W x K), and room for the times of its joins (J x W x K).

        Both are reused by the next block of the same length: fresh memory costs more than the arithmetic.
        """
        edges, worlds, rows = self.factor_EWF.shape
        steps = part.stop - part.start
        if steps not in self._buffers:
            joins = len(self.graph.joins_J)
            self._buffers[steps] = np.empty((edges, worlds, steps)), np.empty((joins, worlds, steps))
        key = part.start if self._keep else -steps
        if part.start not in self._times:
            times = self._times.setdefault(key, np.empty((edges, rows, steps)))
            self._fill_times(part, times)
        weight, time = self._buffers[steps]
        np.matmul(self.factor_EWF, self._times[key], out=weight)
        return weight, time

    def _fill_times(self, part: slice, times: np.ndarray) -> None:
        """The rows of times of each edge (E x F x K).

        A negative transfer is an error of the clocks, not a transfer: every world keeps it.
        """
        graph = self.graph
        for row, sums_NK in enumerate(self.sums_NK):
            sums = np.ascontiguousarray(sums_NK[:, part])
            np.subtract(sums.take(graph.last_E, axis=0), sums.take(graph.first_E, axis=0), out=times[:, row])
        transfer_EK = np.maximum(graph.transfer_EK[:, part], -BARRED_S)
        np.maximum(transfer_EK, 0.0, out=times[:, -3])
        np.minimum(transfer_EK, 0.0, out=times[:, -2])
        times[:, -1] = -BARRED_S
        if graph.excess_EK is not None:
            times[:, -4] = graph.excess_EK[:, part]
            times[:, -3] -= times[:, -4]


def event_times(graph: Graph, world: World, join_JK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When each event begins and ends (N x K each) in a world, given when its joins are passed (J x K)."""
    work_NK = graph.work_NK if world.work_NK is None else world.work_NK
    host_NK = graph.host_NK if world.host_R is None else graph.host_NK * world.host_R[graph.rank_N][:, None]
    done_NK = np.cumsum(host_NK + work_NK, axis=0)
    since_join = done_NK - done_NK[graph.joins_J[graph.join_N]]
    end_NK = join_JK[graph.join_N] + since_join
    begin_NK = end_NK - np.where((graph.what_N == START)[:, None], 0.0, work_NK)
    return begin_NK, end_NK
