"""A measured run as what-if questions need it: its graph, the names of its stages, and how its ranks pass messages.

Shape letters: N events, E edges, K steps, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers import results
from ppdiag.analyzers.edges import CHAIN
from ppdiag.analyzers.messages import MISSING
from ppdiag.analyzers.program import COMPUTE, POST, WAIT
from ppdiag.model import PIPELINE_KINDS, Kind

if TYPE_CHECKING:
    from ppdiag.analyzers.diagnose import Analysis
    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.shape import Shape
    from ppdiag.diagnosis import Job
    from ppdiag.trace import Trace

TORCH = "torch.distributed.pipelining"
"""The framework's name."""
AT_ONCE, FUSED, PLAIN, AHEAD = "at once", "fused", "plain", "ahead"
"""How a rank passes messages. It waits for each send at once, with the next receive posted (Megatron's 1F1B); the same,
but between two forwards or two backwards after the second (torch's 1F1B); it waits for no send, and posts each receive
when it needs it; or it posts its receives one op ahead too."""


@dataclass(frozen=True, slots=True)
class Run:
    """The most frequent structure among the steps of a run.

    Attributes:
        trace: the labelled trace.
        graph: the measured steps.
        shape: the pipeline.
        job: the job's facts, with the schedule that was recognised.
    """

    trace: Trace
    graph: Graph
    shape: Shape
    job: Job

    @property
    def stages(self) -> int:
        """Stages of one pipeline, all virtual ones counted."""
        return 1 + max(stage for own in self.shape.stages.values() for stage in own)


LATE_SHARE = 1 / 8
"""Of the sends of a run in which forwards and backwards overlap, more than these are posted late."""
MOST_TIMES = 20_000_000
"""Times (events x steps) of a graph that are worked with: of a larger one the last steps."""


def run_of(analysis: Analysis) -> Run:
    """The run of a trace that has been taken apart."""
    job = results.job(analysis.trace, analysis.steps, analysis.shape)
    graph = analysis.graphs[0]
    most = max(1, MOST_TIMES // len(graph.what_N))
    if len(graph.steps_K) > most:
        graph = graph.only(np.arange(len(graph.steps_K))[-most:])
    return Run(analysis.trace, graph, analysis.shape, job)


def is_op(graph: Graph) -> np.ndarray:
    """Mask of the events that are pipeline work (N)."""
    return (graph.what_N == COMPUTE) & np.isin(graph.kind_N, PIPELINE_KINDS)


def op_event(graph: Graph) -> np.ndarray:
    """For each event an event of the op that it leads to: the next on its rank; ``MISSING`` after the last (N).

    Posts and waits belong to the op that they stand before or in.
    """
    count = len(graph.what_N)
    index = np.where(is_op(graph), np.arange(count), count)
    following = np.minimum.accumulate(index[::-1])[::-1]
    known = following < count
    known[known] &= graph.rank_N[following[known]] == graph.rank_N[known]
    return np.where(known, following, MISSING)


def collective_time(graph: Graph) -> np.ndarray:
    """What the collective that each event waits for took once all had come (N x K); 0 for other events."""
    time_NK = np.zeros_like(graph.host_NK)
    src = graph.joins_J[graph.src_E]
    own = (graph.link_E != CHAIN) & (src == MISSING)
    time_NK[graph.joins_J[graph.dst_E[own]]] = np.maximum(graph.transfer_EK[own], 0.0)
    return time_NK


def link_time(graph: Graph) -> dict[tuple[int, int], np.ndarray]:
    """The usual time of a message on each link of two ranks, in each step (K)."""
    found = {}
    for number, link in enumerate(graph.links):
        if link.dst is None:
            continue
        own = graph.transfer_EK[(graph.link_E == number) & ~graph.optional_E]
        if len(own):
            positive = np.where(own > 0, own, np.nan)
            nothing = np.isnan(positive).all(axis=0)
            positive[:, nothing] = 0.0
            found[link.src, link.dst] = np.nanmedian(positive, axis=0)
    return found


def message_time(graph: Graph) -> dict[tuple[int, int, int, int], np.ndarray]:
    """The time of each message (K, all alike), by the op that waited for it: rank index, kind, stage, microbatch.

    It is the median over the steps: one late wake-up is no property of a message, and would come again in each copy.
    """
    edges = np.flatnonzero((graph.link_E != CHAIN) & ~graph.optional_E & (graph.joins_J[graph.src_E] != MISSING))
    op = op_event(graph)[graph.joins_J[graph.dst_E[edges]]]
    known = op != MISSING
    labels = np.stack([graph.rank_N, graph.kind_N, graph.stage_N, graph.microbatch_N])[:, op[known]]
    found: dict[tuple[int, int, int, int], np.ndarray] = {}
    for edge, (rank, kind, stage, microbatch) in zip(edges[known].tolist(), labels.T.tolist(), strict=True):
        name = rank, kind, stage, microbatch
        usual = np.full(len(graph.steps_K), np.median(graph.transfer_EK[edge]))
        found[name] = np.maximum(usual, found.get(name, 0.0))
    return found


def messaging(graph: Graph) -> str:
    """How the ranks pass messages, as most of their messages show."""
    sends, posts, between = _ops_between(graph, Kind.SEND)
    if len(sends) and _share(graph, between <= 1, Kind.SEND) > 1 / 2:
        alike = _between_alike(graph, posts)
        return FUSED if not alike.any() or (between[alike] >= 1).mean() > 1 / 2 else AT_ONCE
    _, _, between = _ops_between(graph, Kind.RECV)
    return AHEAD if _share(graph, between >= 1, Kind.RECV) > 1 / 2 else PLAIN


def sends_late(graph: Graph) -> bool:
    """Whether many sends are posted an op later than the op that they belong to."""
    posts = np.flatnonzero((graph.what_N == POST) & (graph.kind_N == Kind.SEND))
    ops = np.flatnonzero(is_op(graph))
    before = ops[np.maximum(np.searchsorted(ops, posts) - 1, 0)]
    own = (graph.stage_N[before] == graph.stage_N[posts]) & (graph.microbatch_N[before] == graph.microbatch_N[posts])
    return bool((~own).mean() > LATE_SHARE) if len(posts) else False


def _ops_between(graph: Graph, kind: Kind) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Events of the waits for messages of a kind and of their posts, and how many events of ops lie between."""
    ops_before = np.cumsum(is_op(graph))
    posted = (graph.what_N == POST) & (graph.kind_N == kind)
    span = graph.span_NK[:, 0]
    post_of = np.full(int(span.max(initial=0)) + 1, MISSING, np.int64)
    post_of[span[posted]] = np.flatnonzero(posted)
    waits = np.flatnonzero((graph.what_N == WAIT) & (graph.kind_N == kind))
    waits = waits[post_of[span[waits]] != MISSING]
    posts = post_of[span[waits]]
    return waits, posts, ops_before[waits] - ops_before[posts]


def _share(graph: Graph, chosen: np.ndarray, kind: Kind) -> float:
    """Share of the messages of a kind that were posted."""
    return float(chosen.sum()) / max(1, int(((graph.what_N == POST) & (graph.kind_N == kind)).sum()))


def _between_alike(graph: Graph, events: np.ndarray) -> np.ndarray:
    """Mask of the events that stand between two ops of one kind of their rank."""
    ops = np.flatnonzero(is_op(graph))
    place = np.clip(np.searchsorted(ops, events), 1, len(ops) - 1)
    before, after = ops[place - 1], ops[place]
    same_rank = (graph.rank_N[before] == graph.rank_N[events]) & (graph.rank_N[after] == graph.rank_N[events])
    return np.asarray(same_rank & (graph.kind_N[before] == graph.kind_N[after]))


def stage_seconds(graph: Graph, stages: int) -> np.ndarray:
    """Time of one microbatch through each stage, forward and backward: the median over steps of the mean (S)."""
    found = np.zeros(stages)
    for stage in range(stages):
        own = is_op(graph) & (graph.stage_N == stage)
        labels = np.stack([graph.rank_N[own], graph.microbatch_N[own]])
        count = max(1, np.unique(labels, axis=1).shape[1])
        found[stage] = np.median(graph.work_NK[own].sum(axis=0)) / count
    return found
