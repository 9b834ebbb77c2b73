"""What each place of a pipeline contributes to the difference between two runs of the same job.

A place is the work of a stage, the host of a rank, the transfers between two ranks, the collectives of a group, or the
optimizer. Run A is replayed with one place as it is in B, and B with that place as it is in A; what the place
contributes is the mean of the two effects. What is left of the whole difference comes from several places together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.analyzers.program import COMPUTE
from ppdiag.analyzers.replay import World, replay
from ppdiag.comparison import PlaceChange, What
from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ppdiag.analyzers.diagnose import Analysis
    from ppdiag.analyzers.graph import Graph, Link
    from ppdiag.trace import ProcessGroup

MOST_PLACES = 32
"""Places replayed; those whose own time differs most come first, the others count as together."""
WORLDS_AT_ONCE = 8
"""Each world with other work holds its own times of all ops."""


MOST_OF_IT = 0.8
"""One rank is named where so much of the change of its stage's work is its own."""
KIND_BITS, STAGE_BITS, MICROBATCH_BITS = 4, 16, 22
"""Of the number of an op."""


class _Place(NamedTuple):
    """What and where: a stage, a rank, the two ends of a cable, the members of a group."""

    what: What
    where: tuple[int, ...]


def place_changes(a: Analysis, b: Analysis) -> list[PlaceChange]:
    """The difference of the mean step times (B less A), by place; the largest first. They sum to it.

    Both must be of one shape: the same ranks, stages and microbatches.
    """
    totals_a, totals_b = _Totals.of(a), _Totals.of(b)
    places = _candidates(totals_a, totals_b)
    forth = _effects(a, totals_a, totals_b, places)
    back = _effects(b, totals_b, totals_a, places)
    found = []
    for place, there, here in zip(places, forth, back, strict=True):
        sides = [effect for effect in (there, None if here is None else -here) if effect is not None]
        change = _named(place, (*a.trace.groups, *b.trace.groups), float(np.mean(sides)) if sides else 0.0)
        if place.what is What.WORK:
            change = replace(change, rank=_one_rank(place.where[0], totals_a, totals_b))
        found.append(change)
    found.sort(key=lambda change: -abs(change.change_s))
    kept = float(b.shares.kept_K.mean() - a.shares.kept_K.mean())
    whole = float(b.shares.duration_K.mean() - a.shares.duration_K.mean())
    together = kept - sum(change.change_s for change in found)
    return [
        *found,
        PlaceChange(What.TOGETHER, None, None, None, None, together),
        PlaceChange(What.UNEXPLAINED, None, None, None, None, whole - kept),
    ]


@dataclass(frozen=True, slots=True)
class _Totals:
    """Seconds a step of each place of a run, and of each op."""

    by_place: Mapping[_Place, float]
    op_keys: np.ndarray
    """Sorted numbers of the ops (rank, kind, stage, microbatch)."""
    op_s: np.ndarray

    @classmethod
    def of(cls, run: Analysis) -> _Totals:
        by_place: dict[_Place, float] = {}
        steps = sum(len(graph.steps_K) for graph in run.graphs)
        keys, times = [], []
        for graph in run.graphs:
            ops, key = _ops(graph)
            keys.append(key)
            times.append(graph.work_NK[ops].sum(axis=1) / steps)
            for place, seconds in _seconds(graph, run).items():
                by_place[place] = by_place.get(place, 0.0) + seconds / steps
        op_keys, index = np.unique(np.concatenate(keys), return_inverse=True)
        return cls(by_place, op_keys, np.bincount(index.ravel(), np.concatenate(times), len(op_keys)))

    def of_ops(self, keys: np.ndarray) -> np.ndarray:
        """Seconds a step of these ops; nan for those that the run does not have."""
        at = np.minimum(np.searchsorted(self.op_keys, keys), len(self.op_keys) - 1)
        return np.where(self.op_keys[at] == keys, self.op_s[at], np.nan)


def _one_rank(stage: int, a: _Totals, b: _Totals) -> int | None:
    """The one rank among several of a stage at which its work changed; None where all did, or there is only one."""
    own = ((a.op_keys >> MICROBATCH_BITS) & ((1 << STAGE_BITS) - 1)) == stage + 1
    ranks, index = np.unique(a.op_keys[own] >> (KIND_BITS + STAGE_BITS + MICROBATCH_BITS), return_inverse=True)
    difference = np.nan_to_num(b.of_ops(a.op_keys[own]) - a.op_s[own])
    change_R = np.abs(np.bincount(index.ravel(), difference, len(ranks)))
    if len(ranks) < 2 or change_R.max() < MOST_OF_IT * change_R.sum():
        return None
    return int(ranks[change_R.argmax()])


def _ops(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """The compute events of a graph, and a number for (rank, kind, stage, microbatch) of each."""
    ops = np.flatnonzero(graph.what_N == COMPUTE)
    key = graph.ranks_R[graph.rank_N[ops]].astype(np.int64)
    columns = (graph.kind_N, KIND_BITS), (graph.stage_N, STAGE_BITS), (graph.microbatch_N, MICROBATCH_BITS)
    for column, bits in columns:
        key = (key << bits) + (column[ops].astype(np.int64) + 1)
    return ops, key


def _seconds(graph: Graph, run: Analysis) -> dict[_Place, float]:
    """Seconds of each place, over all steps of a graph."""
    found: dict[_Place, float] = {}
    work_N = graph.work_NK.sum(axis=1)
    for stage in np.unique(graph.stage_N[graph.stage_N >= 0]).tolist():
        found[_Place(What.WORK, (stage,))] = float(work_N[graph.stage_N == stage].sum())
    found[_Place(What.OPTIMIZER, ())] = float(work_N[graph.kind_N == Kind.OPTIMIZER].sum())
    host_R = np.bincount(graph.rank_N, graph.host_NK.sum(axis=1), len(graph.ranks_R))
    for rank, seconds in zip(graph.ranks_R.tolist(), host_R.tolist(), strict=True):
        found[_Place(What.HOST, (rank,))] = seconds
    message = (graph.link_E >= 0) & ~graph.optional_E
    transfer_E = np.maximum(graph.transfer_EK[message], 0.0).sum(axis=1)
    transfer_L = np.bincount(graph.link_E[message], transfer_E, len(graph.links))
    for link, seconds in zip(graph.links, transfer_L.tolist(), strict=True):
        place = _place_of_link(link, run)
        found[place] = found.get(place, 0.0) + seconds
    return found


def _place_of_link(link: Link, run: Analysis) -> _Place:
    if link.dst is None:
        return _Place(What.COLLECTIVE, run.trace.groups[link.src].ranks)
    return _Place(What.TRANSFER, (min(link.src, link.dst), max(link.src, link.dst)))


def _candidates(a: _Totals, b: _Totals) -> list[_Place]:
    places = dict.fromkeys([*a.by_place, *b.by_place])
    difference = {place: abs(b.by_place.get(place, 0.0) - a.by_place.get(place, 0.0)) for place in places}
    return sorted((p for p in places if difference[p] > 0), key=lambda place: -difference[place])[:MOST_PLACES]


def _effects(run: Analysis, own: _Totals, other: _Totals, places: Sequence[_Place]) -> list[float | None]:
    """What the run's mean step time changes by when each place is as in the other; None where it cannot be made so."""
    steps = sum(len(graph.steps_K) for graph in run.graphs)
    total_s = np.zeros(len(places))
    possible = [place.what in (What.WORK, What.OPTIMIZER) or own.by_place.get(place, 0.0) > 0 for place in places]
    for graph in run.graphs:
        ops, key = _ops(graph)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = other.of_ops(key) / own.of_ops(key)
        ratio_N = np.ones(len(graph.what_N))
        ratio_N[ops] = np.where(np.isfinite(ratio), ratio, 1.0)
        for first in range(0, len(places), WORLDS_AT_ONCE):
            part = range(first, min(first + WORLDS_AT_ONCE, len(places)))
            worlds = [_world(graph, run, ratio_N, (places[i], own, other)) for i in part]
            time_WK = replay(graph, [World(), *worlds]).duration_WK
            total_s[part.start : part.stop] += (time_WK[1:] - time_WK[0]).sum(axis=1)
    return [float(effect) / steps if can else None for effect, can in zip(total_s, possible, strict=True)]


def _world(graph: Graph, run: Analysis, ratio_N: np.ndarray, change: tuple[_Place, _Totals, _Totals]) -> World:
    """The world in which one place is as in the other run."""
    place, own, other = change
    if place.what in (What.WORK, What.OPTIMIZER):
        optimizer = graph.kind_N == Kind.OPTIMIZER
        here = optimizer if place.what is What.OPTIMIZER else (graph.stage_N == place.where[0]) & ~optimizer
        return World(work_NK=graph.work_NK * np.where(here, ratio_N, 1.0)[:, None])
    seconds = own.by_place.get(place, 0.0)
    factor = other.by_place.get(place, 0.0) / seconds if seconds > 0 else 1.0
    if place.what is What.HOST:
        return World(host_R=np.where(graph.ranks_R == place.where[0], factor, 1.0))
    return World(transfer_L=np.array([factor if _place_of_link(x, run) == place else 1.0 for x in graph.links]))


def _named(place: _Place, groups: Sequence[ProcessGroup], change_s: float) -> PlaceChange:
    where = place.where
    group = None
    if place.what is What.COLLECTIVE:
        group = next(group.name for group in groups if group.ranks == where)
    return PlaceChange(
        place.what,
        stage=where[0] if place.what is What.WORK else None,
        rank=where[0] if place.what is What.HOST else None,
        link=(where[0], where[1]) if place.what is What.TRANSFER else None,
        group=group,
        change_s=change_s,
    )
