"""The step time of a run with a change: the run replayed as the change would have it.

Where the change leaves the order of the ops, the measured graph is replayed with other durations, and the difference to
its own replay is added to the measured step. Where it does not, the ops are laid out anew, and what the same laying out
of the run as it was leaves unexplained is added, in proportion to the microbatches.

Shape letters: K steps, R ranks along the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.edges import CyclicOrder
from ppdiag.analyzers.replay import Walk, World
from ppdiag.analyzers.what_if import memory, plans
from ppdiag.analyzers.what_if.change import Change
from ppdiag.analyzers.what_if.durations import changed
from ppdiag.analyzers.what_if.layout import lay_out, slowest_replicas
from ppdiag.analyzers.what_if.measured_layers import known_layers
from ppdiag.analyzers.what_if.run import AHEAD
from ppdiag.errors import BadShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.what_if.layout import Plan
    from ppdiag.analyzers.what_if.memory import Held
    from ppdiag.analyzers.what_if.run import Run

MOST_PASSES = 6
LOW, HIGH = 10, 90
"""Percentiles over the steps that a range spans."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a change would do.

    Attributes:
        change: what is different.
        step_K: predicted length of each step, in seconds.
        measured_K: measured length of the same steps.
        work_ratio: how many times the measured samples a step has.
        error_fraction: how far the same way of replaying is from the measured steps where nothing is changed.
        memory: what each rank along the pipeline holds at most.
        memory_now: the same of the run as it was.
        layer_times: where the times of layers are from (``measured_layers.MEASURED``, ``EQUAL``); empty where the
            change is about no layers.
    """

    change: Change
    step_K: np.ndarray
    measured_K: np.ndarray
    work_ratio: float
    error_fraction: float
    memory: Held
    memory_now: Held
    layer_times: str = ""

    @property
    def step_s(self) -> float:
        """Predicted step time: the median over the steps."""
        return float(np.median(self.step_K))

    @property
    def step_range_s(self) -> tuple[float, float]:
        """10th and 90th percentile of the predicted step times."""
        low, high = np.percentile(self.step_K, [LOW, HIGH]).tolist()
        return low, high

    @property
    def gain_K(self) -> np.ndarray:
        """Share of the time of each step that the change saves, for the same samples; below 0 where it costs time."""
        return 1.0 - self.step_K / self.work_ratio / self.measured_K

    @property
    def gain(self) -> float:
        """Share of the step time that the change saves, for the same samples: the median over the steps."""
        return float(np.median(self.gain_K))

    @property
    def gain_range(self) -> tuple[float, float]:
        """10th and 90th percentile of the gain over the steps."""
        low, high = np.percentile(self.gain_K, [LOW, HIGH]).tolist()
        return low, high


def predict(run: Run, change: Change) -> Prediction:
    """The step time of the run with the change.

    Raises:
        BadShape: the change cannot be made: no such stage, rank, link, schedule or split.
    """
    graph = run.graph
    kept_K, ahead_RK = _settled(graph)
    now = plans.measured_plan(run)
    work_ratio = 1.0
    if change.reorders:
        plans.check_whole(run)
        plan = plans.plan_of(run, change)
        if not all((*now.orders, *plan.orders)):
            raise BadShape("some rank has no ops in the record: nothing can be laid out anew")
        replicas = slowest_replicas(run, (now, plan))
        same_K, ahead_RK = _settled(_laid_out(run, graph, now, replicas))
        new_K, _ = _settled(_laid_out(run, changed(run, change), plan, replicas), ahead_RK)
        microbatches = change.microbatches or run.shape.microbatches
        more = microbatches / run.shape.microbatches
        work_ratio = 1.0 if change.keep_batch else more
        step_K = new_K + more * (graph.duration_K - same_K)
    else:
        plan, same_K = now, kept_K
        new_K, _ = _settled(changed(run, change), ahead_RK)
        step_K = graph.duration_K + new_K - kept_K
    error = float(np.median(np.abs(same_K / graph.duration_K - 1.0)))
    held = memory.held(run, plan, now, change), memory.held(run, now, now, Change())
    source = known_layers(run, total=sum(change.layers), given=change.layers_now).source if change.layers else ""
    return Prediction(change, step_K, graph.duration_K, work_ratio, error, *held, source)


def _laid_out(run: Run, graph: Graph, plan: Plan, replicas: Sequence[int]) -> Graph:
    """The graph of a plan; where its ranks would wait for sends in a circle, they do not wait for sends."""
    try:
        return lay_out(run, graph, plan, replicas)
    except CyclicOrder:
        pass
    try:
        return lay_out(run, graph, plan._replace(messaging=AHEAD), replicas)
    except CyclicOrder as error:
        raise BadShape("in this order the ranks would wait for each other in a circle") from error


def _settled(graph: Graph, anchor_RK: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The step times (K), and by how much each rank's end is ahead of the next step's begin (R x K).

    Where a rank begins a step depends on how it ended the one before: the measured starts are shifted by as much as
    the ends differ from ``anchor_RK``, those of the run as it was, until they settle.
    """
    walk = Walk(graph, [World()])
    everything = np.ones((1, len(graph.steps_K)), bool)
    before = np.searchsorted(graph.steps_K, graph.steps_K - 1)
    follows = graph.steps_K[np.minimum(before, len(graph.steps_K) - 1)] == graph.steps_K - 1
    origin = np.where(follows, before, np.arange(len(graph.steps_K)))
    walk.again(walk.start_RWK, everything)
    for _ in range(MOST_PASSES if anchor_RK is not None else 0):
        ahead_RK = walk.end_RWK[:, 0] - walk.duration_WK[0]
        start_RK = graph.start_RK + (ahead_RK - anchor_RK)[:, origin]
        start_RK -= start_RK[graph.sources].min(axis=0) - graph.start_RK[graph.sources].min(axis=0)
        if not walk.bound_by(start_RK[:, None]).any():
            break
        walk.again(start_RK[:, None], everything)
    return walk.duration_WK[0], walk.end_RWK[:, 0] - walk.duration_WK[0]
