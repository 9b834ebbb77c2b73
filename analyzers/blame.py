"""Which stage, rank or link a cause sits at: the run replayed with each candidate repaired, one world each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.replay import World, replay
from ppdiag.analyzers.why import Ops, repaired_rank, repaired_stage
from ppdiag.diagnosis import Cause

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ppdiag.analyzers.graph import Graph, Link

MOST_CANDIDATES = 48
"""Candidates replayed for one cause; those with the most time of their own come first."""
MOST_BYTES = 1 << 30
"""Bound on the work of candidates that is held at once."""
MOST_STAGES, MOST_SLOW_RANKS = 8, 4
"""Stages and ranks replayed with the others' work: one that explains most of an imbalance is among the slowest."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place that a cause may sit at, and what repairing it alone would gain.

    Attributes:
        stage, rank, link: the place; a link is a pair of ranks, in the direction in which more time goes by.
        group: index of a process group, whose collectives are the place.
        collectives: the place is all collectives, of several groups.
        gain_s: mean step time that repairing it saves.
    """

    gain_s: float
    stage: int | None = None
    rank: int | None = None
    link: tuple[int, int] | None = None
    group: int | None = None
    collectives: bool = False


def candidates(cause: Cause, graph: Graph) -> list[Candidate]:
    """Places of a cause, the largest gain first; none for the bubble, which has no place."""
    if cause is Cause.IMBALANCE:
        ops = Ops.of(graph)
        stages, ranks = _stages(graph, ops), _slow_ranks(graph, ops)
        return _ranked(graph, [*stages[0], *ranks[0]], chain(stages[1], ranks[1]))
    if cause is Cause.HOST:
        return _ranked(graph, *_hosts(graph))
    if cause is Cause.COMMUNICATION:
        return _ranked(graph, *_links(graph))
    return []


def _ranked(graph: Graph, places: Sequence[dict[str, object]], worlds: Iterable[World]) -> list[Candidate]:
    """The places with what repairing each gains; the worlds are made and replayed some at a time."""
    some = max(1, MOST_BYTES // max(1, graph.work_NK.nbytes))
    worlds, gains = iter(worlds), []
    while part := list(islice(worlds, some)):
        time_WK = replay(graph, [World(), *part]).duration_WK
        gains += (time_WK[0] - time_WK[1:]).mean(axis=1).tolist()
    found = [Candidate(gain_s=float(gain), **place) for place, gain in zip(places, gains, strict=True)]  # type: ignore[arg-type]
    return sorted(found, key=lambda candidate: -candidate.gain_s)


def _stages(graph: Graph, ops: Ops) -> tuple[list[dict[str, object]], Iterable[World]]:
    total = work_of_stages(graph)
    heaviest = sorted(total, key=lambda stage: -total[stage])[:MOST_STAGES]
    return [{"stage": s} for s in heaviest], (World(work_NK=repaired_stage(graph, s, ops)) for s in heaviest)


def work_of_stages(graph: Graph) -> dict[int, float]:
    """Seconds of work of each stage, over all its ranks and all steps."""
    staged = graph.stage_N >= 0
    work_S = np.bincount(graph.stage_N[staged], weights=graph.work_NK.sum(axis=1)[staged])
    return {int(stage): float(work_S[stage]) for stage in np.unique(graph.stage_N[staged])}


def _slow_ranks(graph: Graph, ops: Ops) -> tuple[list[dict[str, object]], Iterable[World]]:
    """The ranks furthest above the others: one may be slower than its twins, or in all stages that it holds."""
    slowest = np.argsort(-_excess_of_ranks(graph), kind="stable")[:MOST_SLOW_RANKS]
    return (
        [{"rank": int(graph.ranks_R[r])} for r in slowest],
        (World(work_NK=repaired_rank(graph, int(r), ops)) for r in slowest),
    )


def _excess_of_ranks(graph: Graph) -> np.ndarray:
    """Work of each rank over the mean of those with its first stage; of one without such twins, over that of all."""
    count = len(graph.ranks_R)
    work_R = graph.work_R
    stage_R = np.full(count, np.iinfo(np.int64).max)
    staged = graph.stage_N >= 0
    np.minimum.at(stage_R, graph.rank_N[staged], graph.stage_N[staged])
    _, number, twins = np.unique(stage_R, return_inverse=True, return_counts=True)
    number = number.ravel()
    mean = np.bincount(number, weights=work_R) / twins
    return work_R - np.where(twins[number] > 1, mean[number], work_R.mean())


def _hosts(graph: Graph) -> tuple[list[dict[str, object]], list[World]]:
    host_R = np.zeros(len(graph.ranks_R))
    np.add.at(host_R, graph.rank_N, graph.host_NK.sum(axis=1))
    latest = np.argsort(-host_R, kind="stable")[:MOST_CANDIDATES]
    worlds = []
    for r in latest:
        factor = np.ones(len(graph.ranks_R))
        factor[r] = 0.0
        worlds.append(World(host_R=factor))
    return [{"rank": int(graph.ranks_R[r])} for r in latest], worlds


def _links(graph: Graph) -> tuple[list[dict[str, object]], list[World]]:
    """Each pair of ranks (both directions together), each process group, and all groups together."""
    time_L = _time_of_links(graph)
    cables: dict[object, list[int]] = {}
    for index, link in enumerate(graph.links):
        cables.setdefault(_cable(link), []).append(index)
    slowest = sorted(cables.values(), key=lambda members: -time_L[members].sum())[:MOST_CANDIDATES]
    places: list[dict[str, object]] = []
    worlds = []
    for members in slowest:
        factor = np.ones(len(graph.links))
        factor[members] = 0.0
        worlds.append(World(transfer_L=factor))
        link = graph.links[max(members, key=lambda index: time_L[index])]
        places.append({"group": link.src} if link.dst is None else {"link": (link.src, link.dst)})
    of_group = np.array([link.dst is None for link in graph.links], bool)
    if of_group.sum() > 1:
        places.append({"collectives": True})
        worlds.append(World(transfer_L=np.where(of_group, 0.0, 1.0)))
    return places, worlds


def _cable(link: Link) -> object:
    return link if link.dst is None else (min(link.src, link.dst), max(link.src, link.dst))


def _time_of_links(graph: Graph) -> np.ndarray:
    time_L = np.zeros(len(graph.links))
    message = (graph.link_E >= 0) & ~graph.optional_E
    seconds = np.where(np.isfinite(graph.transfer_EK[message]), graph.transfer_EK[message], 0.0).sum(axis=1)
    np.add.at(time_L, graph.link_E[message], seconds)
    return time_L
