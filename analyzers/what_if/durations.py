"""Changes that leave every op where it is: the measured graph with other work, host time and transfers.

Shape letters: N events, E edges, K steps, R ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.edges import CHAIN
from ppdiag.analyzers.messages import MISSING
from ppdiag.analyzers.what_if.measured_layers import known_layers
from ppdiag.analyzers.what_if.op_times import OpKey, op_times
from ppdiag.analyzers.what_if.run import is_op, stage_seconds
from ppdiag.analyzers.why import equalised_work
from ppdiag.errors import BadShape
from ppdiag.model import Kind

if TYPE_CHECKING:
    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.what_if.change import Change, LinkFactor, Place
    from ppdiag.analyzers.what_if.run import Run


def changed(run: Run, change: Change) -> Graph:
    """The graph of the run with all of the change that leaves the order as it is.

    Raises:
        BadShape: the change names a stage, rank or link that there is not.
    """
    _check(run, change)
    graph = run.graph
    for place in change.repair:
        graph = _repaired(run, graph, place)
    if change.even:
        graph = replace(graph, work_NK=equalised_work(graph)[change.even])
    if change.layers is not None:
        graph = _other_layers(run, graph, change)
    if change.repair or change.even or change.layers is not None:
        graph = _without_excess(graph)
    if change.checkpoint:
        graph = _recomputing(run, graph)
    for link in change.links:
        graph = _faster(run, graph, link)
    return _overlapped(graph) if change.overlap else graph


def _check(run: Run, change: Change) -> None:
    numbers = {"stage": range(run.stages), "rank": run.graph.ranks_R.tolist()}
    for place in change.repair:
        known = numbers[place.what]
        if place.number not in known:
            raise BadShape(f"the run has {place.what}s {known[0]} to {known[-1]}, not {place.number}")
    for link in change.links:
        if not any(_concerns(run, link, number) for number in range(len(run.graph.links))):
            named = "" if link.stages is None else f" between stages {link.stages[0]} and {link.stages[1]}"
            raise BadShape(f"no message goes{named or ' over any link'} in this run")


def _repaired(run: Run, graph: Graph, place: Place) -> Graph:
    """Who is repaired takes no longer for an op than the others: than the twins that hold the same stage, if any."""
    own = is_op(graph) & (graph.stage_N == place.number)
    others = is_op(graph) & ~own
    if place.what == "rank":
        rank = int(np.searchsorted(graph.ranks_R, place.number))
        own = is_op(graph) & (graph.rank_N == rank)
        others = is_op(graph) & ~own
        twins = others & np.isin(graph.stage_N, run.shape.stages[place.number])
        others = twins if twins.any() else others
        graph = replace(graph, host_NK=_usual_host(graph, rank))
    work_NK = graph.work_NK.copy()
    for kinds in ((Kind.FORWARD,), (Kind.BACKWARD, Kind.WEIGHT)):
        of_kind = np.isin(graph.kind_N, kinds)
        if (own & of_kind).any():
            ratio_K = _mean_op(graph, others & of_kind) / np.maximum(_mean_op(graph, own & of_kind), 1e-12)
            work_NK[own & of_kind] *= np.minimum(ratio_K, 1.0)
    return replace(graph, work_NK=work_NK)


def _mean_op(graph: Graph, chosen: np.ndarray) -> np.ndarray:
    """Mean time of the chosen ops for a stage and microbatch (K); nothing is infinitely long where there are none."""
    if not chosen.any():
        return np.full(len(graph.steps_K), np.inf)
    labels = np.stack([graph.rank_N[chosen], graph.stage_N[chosen], graph.microbatch_N[chosen]])
    return np.asarray(graph.work_NK[chosen].sum(axis=0) / np.unique(labels, axis=1).shape[1])


def _usual_host(graph: Graph, rank: int) -> np.ndarray:
    """Host time (N x K) in which a rank has no more of it than the others have on average."""
    totals_RK = np.zeros((len(graph.ranks_R), len(graph.steps_K)))
    np.add.at(totals_RK, graph.rank_N, graph.host_NK)
    own, others = totals_RK[rank], np.delete(totals_RK, rank, axis=0)
    if not len(others):
        return graph.host_NK
    factor_K = np.minimum(others.mean(axis=0) / np.maximum(own, 1e-12), 1.0)
    return np.where((graph.rank_N == rank)[:, None], graph.host_NK * factor_K, graph.host_NK)


def _other_layers(run: Run, graph: Graph, change: Change) -> Graph:
    """Each stage's ops take as much more or less as its layers do."""
    assert change.layers is not None
    if len(change.layers) != run.stages:
        split = ",".join(map(str, change.layers))
        raise BadShape(f"the run has {run.stages} stages, and {split} is for {len(change.layers)}")
    known = known_layers(run, total=sum(change.layers), given=change.layers_now)
    stage_S = stage_seconds(graph, run.stages)
    factor_S = known.times(stage_S).of(change.layers) / np.maximum(stage_S, 1e-12)
    factor_N = np.where(is_op(graph), factor_S[np.maximum(graph.stage_N, 0)], 1.0)
    return replace(graph, work_NK=graph.work_NK * factor_N[:, None])


def _without_excess(graph: Graph) -> Graph:
    """What an inferred message took over the usual is a wait for work as it was: it goes with that work."""
    if graph.excess_EK is None:
        return graph
    return replace(graph, transfer_EK=graph.transfer_EK - graph.excess_EK, excess_EK=None)


def _recomputing(run: Run, graph: Graph) -> Graph:
    """Before each backward its forward runs again."""
    times = op_times(run, graph).times
    work_NK = graph.work_NK.copy()
    seen = set()
    for event in np.flatnonzero(is_op(graph) & (graph.kind_N == Kind.BACKWARD)).tolist():
        labels = int(graph.rank_N[event]), int(graph.stage_N[event]), int(graph.microbatch_N[event])
        name = OpKey(labels[0], int(Kind.FORWARD), *labels[1:])
        if name in times and name not in seen:
            seen.add(name)
            work_NK[event] += times[name].work
    return replace(graph, work_NK=work_NK)


def _faster(run: Run, graph: Graph, link: LinkFactor) -> Graph:
    """Messages of a link, or all messages and collectives, take a share of their time."""
    chosen_L = np.array([_concerns(run, link, number) for number in range(len(graph.links))], bool)
    chosen_E = np.append(chosen_L, False)[graph.link_E]  # CHAIN is -1: the appended False
    surplus_EK = 0.0 if graph.excess_EK is None else graph.excess_EK
    transfer_EK = graph.transfer_EK - surplus_EK
    faster_EK = np.where(chosen_E[:, None] & (transfer_EK > 0), transfer_EK / link.faster, transfer_EK) + surplus_EK
    return replace(graph, transfer_EK=faster_EK)


def _concerns(run: Run, link: LinkFactor, number: int) -> bool:
    src, dst = run.graph.links[number]
    if link.stages is None:
        return True
    if dst is None:
        return False
    a, b = link.stages
    ends = run.shape.stages[src], run.shape.stages[dst]
    return (a in ends[0] and b in ends[1]) or (b in ends[0] and a in ends[1])


def _overlapped(graph: Graph) -> Graph:
    """No send is waited for, and a message travels though its receive is not posted."""
    waits = graph.joins_J[graph.dst_E]
    same_rank = (graph.rank_N[graph.last_E] == graph.rank_N[waits]) & (graph.joins_J[graph.src_E] != MISSING)
    own_post = (graph.link_E != CHAIN) & same_rank & (waits != MISSING)
    barred = graph.optional_E | own_post
    return replace(graph, transfer_EK=np.where(barred[:, None], -np.inf, graph.transfer_EK))
