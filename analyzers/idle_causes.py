"""Why a rank stood idle at each moment: the waits of the replayed worlds compared, gap by gap.

A rank's step is its ops and the gaps around them. In each of the eight worlds each gap has a length; its Shapley shares
over them are those of :mod:`ppdiag.analyzers.why`, of one gap instead of the step. What a rank stood in tells the cause
where that is one by itself (a transfer, the host); of waits for others the gap takes the cause with the largest share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.analyzers.program import COMPUTE, END, START
from ppdiag.analyzers.replay import event_times, replay
from ppdiag.analyzers.where import by_begin, contains
from ppdiag.analyzers.why import CHOICES, eight_worlds, shapley
from ppdiag.diagnosis import Cause, Place
from ppdiag.exported import CAUSES, IDLE_SPAN_DTYPE, PLACES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ppdiag.analyzers.diagnose import Analysis
    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.where import Stays

MOST_TIMES = 1 << 22
"""Event times of one world held at once."""
OF_ITSELF = {
    Place.TRANSFER: Cause.COMMUNICATION,
    Place.HOST: Cause.HOST,
    Place.UNEXPLAINED: Cause.UNEXPLAINED,
}
"""Places that are a cause by themselves."""


class _Gaps(NamedTuple):
    """The gaps of one rank, by their begin in ns; the cause is an index in ``CAUSES``."""

    begin_ns: np.ndarray
    cause: np.ndarray


def idle_spans(run: Analysis) -> np.ndarray:
    """All idle time of the analysed steps, with its place and its cause (``IDLE_SPAN_DTYPE``)."""
    gaps = _gaps_by_rank(run)
    bounds = np.stack([run.steps.start_ns, run.steps.end_ns])
    parts = [_of_rank(rank, stays, bounds, gaps[rank]) for rank, stays in sorted(run.measured.stays.items())]
    return np.concatenate(parts) if parts else np.zeros(0, IDLE_SPAN_DTYPE)


def _of_rank(rank: int, stays: Stays, bounds: np.ndarray, gaps: _Gaps) -> np.ndarray:
    taken = by_begin(np.concatenate([stays.busy, *stays.waiting.values()]))
    places = {**stays.waiting, Place.HOST: _between(taken, bounds)}
    parts = []
    for place, stretches in places.items():
        inside = _within(stretches, bounds)
        rows = np.zeros(len(inside), IDLE_SPAN_DTYPE)
        rows["rank"], rows["place"] = rank, PLACES.index(place)
        rows["start_ns"], rows["end_ns"] = inside.T
        if place in OF_ITSELF:
            rows["cause"] = CAUSES.index(OF_ITSELF[place])
        else:
            at = np.searchsorted(gaps.begin_ns, inside.mean(axis=1), "right") - 1
            rows["cause"] = gaps.cause[np.maximum(at, 0)]
        parts.append(rows)
    found = np.concatenate(parts)
    return found[np.argsort(found["start_ns"], kind="stable")]


def _between(taken: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """What intervals (sorted by begin) leave free from the first bound to the last (n x 2)."""
    first, last = bounds[0].min(), bounds[1].max()
    begin = np.append(first, np.maximum.accumulate(taken[:, 1]) if len(taken) else [])
    end = np.append(taken[:, 0], last)
    free = np.stack([np.maximum(begin, first), np.minimum(end, last)], axis=1)
    return free[free[:, 1] > free[:, 0]]


def _within(intervals: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The parts of intervals (disjoint, sorted) that lie in a step, cut where a step begins."""
    if not len(intervals):
        return np.zeros((0, 2), np.int64)
    edges = np.unique(np.concatenate([intervals.ravel(), bounds.ravel()]))
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    return pieces[contains(intervals, pieces[:, 0]) & contains(bounds.T, pieces[:, 0])]


def _gaps_by_rank(run: Analysis) -> dict[int, _Gaps]:
    """The gaps of all steps of each rank."""
    parts: dict[int, list[_Gaps]] = {int(rank): [] for rank in run.steps.ranks}
    zero_ns = dict(zip(run.steps.kept.tolist(), run.steps.start_ns.tolist(), strict=True))
    for graph in run.graphs:
        for part in _in_parts(graph):
            for rank, gaps in _gaps_of(part, np.array([zero_ns[step] for step in part.steps_K.tolist()])):
                parts[rank].append(gaps)
    found = {}
    for rank, own in parts.items():
        begin_ns = np.concatenate([gaps.begin_ns for gaps in own])
        order = np.argsort(begin_ns, kind="stable")
        found[rank] = _Gaps(begin_ns[order], np.concatenate([gaps.cause for gaps in own])[order])
    return found


def _in_parts(graph: Graph) -> Iterator[Graph]:
    """The graph with some of its steps at a time."""
    size = max(1, MOST_TIMES // len(graph.what_N))
    for first in range(0, len(graph.steps_K), size):
        yield graph.only(np.arange(first, min(first + size, len(graph.steps_K))))


def _gaps_of(graph: Graph, zero_ns: np.ndarray) -> Iterator[tuple[int, _Gaps]]:
    """The gaps of each rank: before each op, and after the last; with the cause that takes most of each."""
    worlds = eight_worlds(graph)
    found = replay(graph, [worlds[choice] for choice in CHOICES], keep_joins=True)
    assert found.join_JWK is not None
    stops = np.flatnonzero(np.isin(graph.what_N, (START, COMPUTE, END)))
    length: dict[tuple[bool, ...], np.ndarray] = {}
    kept_begin_s = np.zeros(0)
    for w, choice in enumerate(CHOICES):
        begin_NK, end_NK = event_times(graph, worlds[choice], found.join_JWK[:, w])
        length[choice] = begin_NK[stops[1:]] - end_NK[stops[:-1]]
        kept_begin_s = end_NK[stops[:-1]] if w == 0 else kept_begin_s
    cause_GK = _largest(length)
    same_rank = graph.rank_N[stops[1:]] == graph.rank_N[stops[:-1]]
    for r, rank in enumerate(graph.ranks_R.tolist()):
        own = same_rank & (graph.rank_N[stops[:-1]] == r)
        begin_ns = zero_ns + np.rint(1e9 * kept_begin_s[own]).astype(np.int64)
        yield rank, _Gaps(begin_ns.ravel(), cause_GK[own].ravel())


def _largest(length: dict[tuple[bool, ...], np.ndarray]) -> np.ndarray:
    """Of each gap the cause with the largest share of it (an index in ``CAUSES``); of equals the bubble."""
    shares = {Cause.BUBBLE: length[CHOICES[-1]], **shapley(length)}
    order = [Cause.BUBBLE, Cause.IMBALANCE, Cause.COMMUNICATION, Cause.HOST]
    largest = np.argmax(np.stack([shares[cause] for cause in order]), axis=0)
    return np.array([CAUSES.index(cause) for cause in order], np.uint8)[largest]
