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
FUSED, PLAIN, AHEAD = "fused", "plain", "ahead"
"""How a rank passes messages: it waits for each send, together with the next receive (1F1B of torch and Megatron); it
waits for no send, and posts each receive when it needs it; or it posts its receives one op ahead too."""


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


def messaging(graph: Graph) -> str:
    """How the ranks pass messages, as most of their messages show."""
    ops_before = np.cumsum(is_op(graph))
    post_of = np.full(int(graph.span_NK[:, 0].max(initial=0)) + 1, MISSING, np.int64)
    posts = np.flatnonzero(graph.what_N == POST)
    post_of[graph.span_NK[posts, 0]] = posts
    share = {}
    for kind in (Kind.SEND, Kind.RECV):
        waits = np.flatnonzero((graph.what_N == WAIT) & (graph.kind_N == kind))
        post = post_of[graph.span_NK[waits, 0]]
        between = ops_before[waits] - ops_before[np.where(post == MISSING, waits, post)]
        messages = max(1, int(((graph.what_N == POST) & (graph.kind_N == kind)).sum()))
        share[kind] = int((between <= 1).sum()) / messages, int((between >= 1).sum()) / messages
    if share[Kind.SEND][0] > 1 / 2 and len(graph.links):
        return FUSED
    return AHEAD if share[Kind.RECV][1] > 1 / 2 else PLAIN


def stage_seconds(graph: Graph, stages: int) -> np.ndarray:
    """Time of one microbatch through each stage, forward and backward: the median over steps of the mean (S)."""
    found = np.zeros(stages)
    for stage in range(stages):
        own = is_op(graph) & (graph.stage_N == stage)
        labels = np.stack([graph.rank_N[own], graph.microbatch_N[own]])
        count = max(1, np.unique(labels, axis=1).shape[1])
        found[stage] = np.median(graph.work_NK[own].sum(axis=0)) / count
    return found
