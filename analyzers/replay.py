"""Replays a step under other durations: the longest path through its graph, for many worlds and all steps in one pass.

A *world* is a choice of durations: host time of each rank kept or zero, transfers of each link kept or zero, work as
measured or some other. Each value of the pass is a numpy vector over (world x step); the graph is walked once, level
by level (a max-plus recurrence).

Where a step begins on a rank depends on how the step before ended there, so that the walk is repeated with the ends of
each step as the start of the next until the starts settle: what a world does to one step reaches the next. Only those
worlds and steps are walked again in which a moved start binds a join; in most, ranks start long before their first
message comes. Steps that follow each other are taken to begin again after their last. Their mean length is then the
cycle time of a max-plus recurrence, which no shorter duration can raise: so no world's mean step is longer than that of
a world that keeps more.

Source: Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity" (1992), chapter 3, for the cycle time.

Shape letters: R ranks, N events, J joins, E edges (S of them from a rank's start), K steps, W worlds, L links, F rows
of times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.analyzers.program import START

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.analyzers.graph import Graph

BLOCK_BYTES = 192 << 20
"""Bound on the times of edges and joins held at once: more steps are replayed block by block."""
MOST_FACTOR_BYTES = 512 << 20
"""Bound on the factors of edges in worlds: more worlds are replayed one part after the other."""
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
        host_NK: host time before each event; None keeps the measured.
        host_R: factor on the host time of each rank; None keeps it.
        transfer_L: factor on the transfers of each link; None keeps them. At 0 a send waits for nobody. What an
            inferred message took over the usual is a wait for work as it was: it is kept only where work is.
        measured_R: share of each rank's work that stays as measured although ``work_NK`` is another; None is none.
    """

    work_NK: np.ndarray | None = None
    host_R: np.ndarray | None = None
    transfer_L: np.ndarray | None = None
    measured_R: np.ndarray | None = None
    host_NK: np.ndarray | None = None


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
    most = max(2, MOST_FACTOR_BYTES // (8 * len(graph.src_E) * _rows(graph, worlds)))
    if len(worlds) > most:
        parts = [[worlds[0], *worlds[at : at + most - 1]] for at in range(1, len(worlds), most - 1)]
        return _joined([replay(graph, part, keep_joins=keep_joins) for part in parts])
    walk = Walk(graph, worlds, keep_joins=keep_joins)
    walk.again(walk.start_RWK, np.ones(walk.start_RWK.shape[1:], bool))
    before_K = _before(graph.steps_K)
    for _ in range(MOST_PASSES - 1):
        start_RWK, _ = _next_starts(walk, before_K)
        bound_WK = walk.bound_by(start_RWK)
        if not bound_WK.any():
            walk.start_at(start_RWK)
            break
        walk.again(start_RWK, bound_WK)
    duration_WK = walk.duration_WK
    duration_WK[:, before_K] += _next_starts(walk, before_K)[1]
    return Replay(duration_WK, walk.join_JWK)


def _joined(parts: Sequence[Replay]) -> Replay:
    """One replay of several that have their first world in common."""
    durations = [parts[0].duration_WK[:1], *(part.duration_WK[1:] for part in parts)]
    joins = [part.join_JWK for part in parts if part.join_JWK is not None]
    kept = np.concatenate([joins[0][:, :1], *(join_JWK[:, 1:] for join_JWK in joins)], axis=1) if joins else None
    return Replay(np.concatenate(durations), kept)


def _before(steps_K: np.ndarray) -> np.ndarray:
    """Index of the step before each: that of the number before, else the last of those that follow this one.

    >>> _before(np.array([3, 4, 5, 9])).tolist()
    [2, 0, 1, 3]
    """
    first = np.flatnonzero(np.diff(steps_K, prepend=steps_K[0] - 2) != 1)
    before = np.arange(-1, len(steps_K) - 1)
    before[first] = np.append(first[1:], len(steps_K)) - 1
    return before


def _next_starts(walk: Walk, before_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When each rank starts each step, from how the step before ended in that world; and how much longer that one was.

    The measured starts are shifted by as much as the world's ends differ from those of the world that keeps all. Where
    one of several sources was measured to start later than its end says, another may be the first: the step before then
    lasts until that one starts (W x K).
    """
    graph = walk.graph
    ahead_RWK = walk.end_RWK - walk.duration_WK
    shift_RWK = ahead_RWK - ahead_RWK[:, :1]
    starts = graph.start_RK[:, None, :] + shift_RWK[:, :, before_K]
    zero_WK = starts[graph.sources].min(axis=0) - graph.start_RK[graph.sources].min(axis=0)
    return starts - zero_WK, zero_WK


class Walk:
    """Longest paths through a graph in many worlds, for given starts; walked again where other starts change them.

    Attributes:
        start_RWK: the starts with which each world and step was walked; at first the measured ones.
        end_RWK: when each rank ended.
        join_JWK: when each join was passed; None unless asked for.
    """

    def __init__(self, graph: Graph, worlds: Sequence[World], *, keep_joins: bool = False) -> None:
        self.graph = graph
        self.start_RWK = np.repeat(graph.start_RK[:, None, :], len(worlds), axis=1)
        self.end_RWK = np.empty_like(self.start_RWK)
        shape = self.start_RWK.shape[1:]
        self.join_JWK = np.empty((len(graph.joins_J), *shape)) if keep_joins else None
        works, hosts = _variants(worlds, "work_NK"), _variants(worlds, "host_NK")
        self._variants = [graph.host_NK if host is None else host for host in hosts.values()]
        self._variants += [graph.work_NK if work is None else work for work in works.values()]
        self._factor_EWF = _factors(graph, worlds)
        rank_of_join = np.full(len(graph.joins_J), -1)
        rank_of_join[graph.start_joins] = np.arange(len(graph.ranks_R))
        self._first_S = np.flatnonzero(rank_of_join[graph.src_E] >= 0)
        self._rank_S = rank_of_join[graph.src_E[self._first_S]]
        self._weight_SWK = np.empty((len(self._first_S), *shape))
        self._passed_SWK = np.empty_like(self._weight_SWK)
        self._levels = _levels(graph)

    @property
    def duration_WK(self) -> np.ndarray:
        """Length of each step in each world."""
        sources = self.graph.sources
        return self.end_RWK[sources].min(axis=0) - self.graph.start_RK[sources].min(axis=0)

    def bound_by(self, start_RWK: np.ndarray) -> np.ndarray:
        """Mask of the worlds and steps in which these starts pass some join at another time than those walked with."""
        if not len(self._first_S):
            return np.zeros(start_RWK.shape[1:], bool)
        settled = SETTLED_FRACTION * self.duration_WK.max(initial=0.0)
        old = self.start_RWK[self._rank_S] + self._weight_SWK
        new = start_RWK[self._rank_S] + self._weight_SWK
        later = new > self._passed_SWK + settled
        earlier = (old >= self._passed_SWK - settled) & (new < old - settled)
        return np.asarray((later | earlier).any(axis=0))

    def start_at(self, start_RWK: np.ndarray) -> None:
        """Takes over starts that bind no join."""
        self.start_RWK = start_RWK
        if self.join_JWK is not None:
            self.join_JWK[self.graph.start_joins] = start_RWK

    def again(self, start_RWK: np.ndarray, chosen_WK: np.ndarray) -> None:
        """Walks from these starts, in all worlds and steps that have one chosen."""
        worlds, steps = np.flatnonzero(chosen_WK.any(axis=1)), np.flatnonzero(chosen_WK.any(axis=0))
        factor_EWF = self._factor_EWF if len(worlds) == len(chosen_WK) else self._factor_EWF[:, worlds]
        rows = factor_EWF.shape[2]
        step_bytes = 8 * (rows * len(factor_EWF) + len(worlds) * len(self.graph.joins_J))
        blocks = np.array_split(steps, -(-len(steps) // max(1, BLOCK_BYTES // max(1, step_bytes))))
        room = None
        for block in blocks:
            if room is None or room.steps != len(block):
                room = _Room(self.graph, worlds=len(worlds), rows=rows, steps=len(block))
            self._walk(room, factor_EWF, start_RWK, (slice(None), worlds[:, None], block))

    def _walk(self, room: _Room, factor_EWF: np.ndarray, start_RWK: np.ndarray, place: tuple[Any, ...]) -> None:
        """Walks one block of worlds and steps (``place``: all, worlds, steps), level by level."""
        graph, time_JWK = self.graph, room.time_JWK
        self._fill_times(room, place[2])
        time_JWK[graph.start_joins] = start_RWK[place]
        time = time_JWK.reshape(len(time_JWK), -1)
        for first, last, new in self._levels:
            reached_EWK = room.reached_EWK[: last - first]
            np.matmul(factor_EWF[first:last], room.times_EFK[first:last], out=reached_EWK)
            reached, before = reached_EWK.reshape(last - first, -1), room.before[: last - first]
            time.take(graph.src_E[first:last], axis=0, out=before, mode="clip")  # "raise" would copy
            reached += before
            time[graph.dst_E[new]] = np.maximum.reduceat(reached, new - first, axis=0)
        self.start_RWK[place] = start_RWK[place]
        self.end_RWK[place] = time_JWK[graph.end_joins]
        self._weight_SWK[place] = factor_EWF[self._first_S] @ room.times_EFK[self._first_S]
        self._passed_SWK[place] = time_JWK[graph.dst_E[self._first_S]]
        if self.join_JWK is not None:
            self.join_JWK[place] = time_JWK

    def _fill_times(self, room: _Room, steps: np.ndarray) -> None:
        """The rows of times of each edge (E x F x K).

        A negative transfer is an error of the clocks, not a transfer: every world keeps it.
        """
        graph, times = self.graph, room.times_EFK
        for row, time_NK in enumerate(self._variants):
            time_NK.take(steps, axis=1, out=room.sums_NK, mode="clip")
            np.cumsum(room.sums_NK, axis=0, out=room.sums_NK)
            room.sums_NK.take(graph.last_E, axis=0, out=room.until_EK, mode="clip")
            room.sums_NK.take(graph.first_E, axis=0, out=room.since_EK, mode="clip")
            np.subtract(room.until_EK, room.since_EK, out=times[:, row])
        graph.transfer_EK.take(steps, axis=1, out=room.until_EK, mode="clip")
        np.maximum(room.until_EK, -BARRED_S, out=room.until_EK)
        np.maximum(room.until_EK, 0.0, out=times[:, -3])
        np.minimum(room.until_EK, 0.0, out=times[:, -2])
        times[:, -1] = -BARRED_S
        if graph.excess_EK is not None:
            graph.excess_EK.take(steps, axis=1, out=room.until_EK, mode="clip")
            times[:, -4] = room.until_EK
            times[:, -3] -= times[:, -4]


def _levels(graph: Graph) -> list[tuple[int, int, np.ndarray]]:
    """For each level its first edge, the end of its edges, and the first edge of each of its joins."""
    new = np.flatnonzero(np.diff(graph.dst_E, prepend=-1))  # edges of a join are adjacent
    bounds = graph.level_starts.tolist()
    joins = np.split(new, np.searchsorted(new, bounds[1:-1]))
    return list(zip(bounds[:-1], bounds[1:], joins, strict=True))


def _variants(worlds: Sequence[World], name: str) -> dict[int, np.ndarray | None]:
    """The different arrays of this name by their ``id``; first None, the measured one."""
    return {id(getattr(world, name)): getattr(world, name) for world in (World(), *worlds)}


def _rows(graph: Graph, worlds: Sequence[World]) -> int:
    """Rows of times: each variant of host and work, excess where there is any, transfer, what all keep, what bars."""
    variants = len(_variants(worlds, "host_NK")) + len(_variants(worlds, "work_NK"))
    return variants + (graph.excess_EK is not None) + 3


def _factors(graph: Graph, worlds: Sequence[World]) -> np.ndarray:
    """What each edge adds in each world is a small product: factors (W x F) times rows of times (F x K).

    The rows of times are host time and work, each in its variants, the excess of inferred messages where there is any,
    transfer, and what every world keeps; a last row is what bars an edge: a send's wait where transfers are free.
    """
    hosts, works = list(_variants(worlds, "host_NK")), list(_variants(worlds, "work_NK"))
    factor_EWF = np.zeros((len(graph.src_E), len(worlds), _rows(graph, worlds)))
    rank_E = graph.rank_N[graph.last_E]
    for w, world in enumerate(worlds):
        factor = factor_EWF[:, w]
        factor[:, hosts.index(id(world.host_NK))] = 1.0 if world.host_R is None else world.host_R[rank_E]
        measured_E = 0.0 if world.measured_R is None else world.measured_R[rank_E]
        factor[:, len(hosts) + works.index(id(world.work_NK))] = 1.0 - measured_E
        factor[:, len(hosts)] += measured_E
        # CHAIN is -1: the appended 1
        transfer_E = 1.0 if world.transfer_L is None else np.append(world.transfer_L, 1.0)[graph.link_E]
        if graph.excess_EK is not None:
            factor[:, -4] = transfer_E if world.work_NK is None else 0.0
        factor[:, -3] = transfer_E
        factor[:, -2] = 1.0
        factor[:, -1] = graph.optional_E & (transfer_E == 0.0)
    return factor_EWF


class _Room:
    """Arrays that a walk fills again and again: fresh memory costs more than the arithmetic."""

    def __init__(self, graph: Graph, *, worlds: int, rows: int, steps: int) -> None:
        edges, events, joins = len(graph.src_E), len(graph.rank_N), len(graph.joins_J)
        widest = int(np.diff(graph.level_starts).max(initial=0))
        self.steps = steps
        self.times_EFK = np.empty((edges, rows, steps))
        self.sums_NK = np.empty((events, steps))
        self.until_EK, self.since_EK = np.empty((edges, steps)), np.empty((edges, steps))
        self.time_JWK = np.empty((joins, worlds, steps))
        self.reached_EWK, self.before = np.empty((widest, worlds, steps)), np.empty((widest, worlds * steps))


def event_times(graph: Graph, world: World, join_JK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When each event begins and ends (N x K each) in a world, given when its joins are passed (J x K)."""
    work_NK = graph.work_NK if world.work_NK is None else world.work_NK
    host_NK = graph.host_NK if world.host_NK is None else world.host_NK
    host_NK = host_NK if world.host_R is None else host_NK * world.host_R[graph.rank_N][:, None]
    done_NK = np.cumsum(host_NK + work_NK, axis=0)
    since_join = done_NK - done_NK[graph.joins_J[graph.join_N]]
    end_NK = join_JK[graph.join_N] + since_join
    begin_NK = end_NK - np.where((graph.what_N == START)[:, None], 0.0, work_NK)
    return begin_NK, end_NK
