"""Which edge each join waited for, and the chain of spans that made a step as long as it was.

Each join is passed when the last of its edges arrives: its *binding* edge. Followed backward from any join, binding
edges lead over the ops, host gaps and messages that made it as late as it was, and over nothing else.

Shape letters: N events, J joins, E edges, K steps.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.edges import CHAIN
from ppdiag.analyzers.messages import MISSING
from ppdiag.analyzers.program import COMPUTE
from ppdiag.model import Kind
from ppdiag.origins import CriticalPath, CriticalSpan

if TYPE_CHECKING:
    from ppdiag.analyzers.graph import Graph

SAME_S = 1e-12
"""Edges within this time of each other arrive at once; the rank's own counts then: it did not wait."""
SHORTEST_S = 1e-9
"""Shorter spans are the rounding of sums of doubles."""


@dataclass(frozen=True, slots=True)
class Bindings:
    """The binding edges of a graph's joins.

    Attributes:
        binding_JK: the edge for which each join waited; ``MISSING`` for the ranks' starts.
        chain_J: the edge from the join before on the same rank; ``MISSING`` for starts and meeting points.
        wait_JK: how long the rank stood at the join.
    """

    binding_JK: np.ndarray
    chain_J: np.ndarray
    wait_JK: np.ndarray


def bindings(graph: Graph, join_JK: np.ndarray) -> Bindings:
    """Of the measured world, whose joins are passed at ``join_JK``."""
    reach_EK = reach(graph, join_JK, graph.host_NK + graph.work_NK) + graph.transfer_EK
    new = np.flatnonzero(np.diff(graph.dst_E, prepend=-1))
    count = np.diff(new, append=len(graph.dst_E))
    last_DK = np.maximum.reduceat(reach_EK, new, axis=0)
    binds = reach_EK >= np.repeat(last_DK, count, axis=0) - SAME_S
    edge_EK = np.where(binds, np.arange(len(graph.dst_E))[:, None], len(graph.dst_E))
    binding_JK = np.full(join_JK.shape, MISSING)
    binding_JK[graph.dst_E[new]] = np.minimum.reduceat(edge_EK, new, axis=0)
    return Bindings(binding_JK, _chain_of_joins(graph), waits(graph, join_JK, graph.host_NK + graph.work_NK))


def reach(graph: Graph, join_JK: np.ndarray, time_NK: np.ndarray) -> np.ndarray:
    """When each edge's post is reached if its rank does what takes ``time_NK`` (E x K)."""
    done_NK = np.cumsum(time_NK, axis=0)
    reached: np.ndarray = done_NK[graph.last_E] - done_NK[graph.first_E] + join_JK[graph.src_E]
    return reached


def waits(graph: Graph, join_JK: np.ndarray, time_NK: np.ndarray) -> np.ndarray:
    """How long each rank stood at each of its joins, in a world in which its events take ``time_NK`` (J x K)."""
    chain_J = _chain_of_joins(graph)
    own = np.flatnonzero(chain_J != MISSING)
    arrived = reach(graph, join_JK, time_NK)[chain_J[own]]
    wait_JK = np.zeros_like(join_JK)
    wait_JK[own] = np.maximum(join_JK[own] - arrived, 0.0)
    return wait_JK


def _chain_of_joins(graph: Graph) -> np.ndarray:
    chain_J = np.full(len(graph.joins_J), MISSING)
    chain = np.flatnonzero((graph.link_E == CHAIN) & (graph.joins_J[graph.dst_E] != MISSING))
    chain_J[graph.dst_E[chain]] = chain
    return chain_J


def critical_path(graph: Graph, join_JK: np.ndarray, step: int) -> CriticalPath:
    """The spans for which one step took as long as it did, in order of time.

    A span is an op, a host gap or a message. Where the chain comes from the step before, it begins with that.

    Args:
        graph: a structure with this one step.
        join_JK: when its joins are passed in the measured world (K = 1).
        step: its number in the record.
    """
    edge_J = bindings(graph, join_JK).binding_JK[:, 0]
    ends = join_JK[graph.end_joins[graph.sources], 0]
    join = int(graph.end_joins[graph.sources[np.argmin(ends)]])
    end_s = float(ends.min())
    spans: list[CriticalSpan] = []
    while edge_J[join] != MISSING:
        spans += _spans_of_edge(graph, int(edge_J[join]), float(join_JK[join, 0]))
        join = int(graph.src_E[edge_J[join]])
    begin_s = float(graph.start_RK[graph.sources, 0].min())
    rank = int(graph.ranks_R[graph.rank_N[graph.joins_J[join]]])
    before = CriticalSpan(rank, "step before", None, None, None, begin_s, float(join_JK[join, 0]))
    kept = [
        _since(span, begin_s)
        for span in [before, *reversed(spans)]
        if span.end_s - max(span.start_s, begin_s) > SHORTEST_S
    ]
    return _summed(step, end_s - begin_s, kept)


def _since(span: CriticalSpan, begin_s: float) -> CriticalSpan:
    """The part of a span within the step, in seconds from the step's begin."""
    return replace(span, start_s=max(span.start_s, begin_s) - begin_s, end_s=span.end_s - begin_s)


def _spans_of_edge(graph: Graph, edge: int, end_s: float) -> list[CriticalSpan]:
    """What an edge consists of, the latest first: its message, then the ops and host gaps of its rank."""
    found = []
    transfer_s = max(float(graph.transfer_EK[edge, 0]), 0.0)
    rank = int(graph.ranks_R[graph.rank_N[graph.last_E[edge]]])
    if graph.link_E[edge] != CHAIN:
        link = graph.links[graph.link_E[edge]]
        ends = None if link.dst is None else (link.src, link.dst)
        what = "collective" if link.dst is None else "message"
        where = rank if link.dst is None else link.src
        found.append(CriticalSpan(where, what, None, None, ends, end_s - transfer_s, end_s))
        end_s -= transfer_s
    for n in range(int(graph.last_E[edge]), int(graph.first_E[edge]), -1):
        work_s, host_s = float(graph.work_NK[n, 0]), float(graph.host_NK[n, 0])
        if graph.what_N[n] == COMPUTE:
            op = Kind(int(graph.kind_N[n])).name.lower()
            stage, microbatch = (int(v) if v >= 0 else None for v in (graph.stage_N[n], graph.microbatch_N[n]))
            found.append(CriticalSpan(rank, op, stage, microbatch, None, end_s - work_s, end_s))
            end_s -= work_s
        found.append(CriticalSpan(rank, "host", None, None, None, end_s - host_s, end_s))
        end_s -= host_s
    return found


def _summed(step: int, length_s: float, spans: list[CriticalSpan]) -> CriticalPath:
    by_what: dict[str, float] = defaultdict(float)
    by_rank: dict[int, float] = defaultdict(float)
    by_stage: dict[int, float] = defaultdict(float)
    for span in spans:
        seconds = span.end_s - span.start_s
        by_what[span.what] += seconds
        by_rank[span.rank] += seconds
        if span.stage is not None:
            by_stage[span.stage] += seconds
    return CriticalPath(step, length_s, tuple(spans), dict(by_what), dict(by_rank), dict(by_stage))
