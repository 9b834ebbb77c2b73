"""Slow workers as a map of replicas and pipeline positions: the step replayed with one row or one column as it was.

All work is made equal but that of one replica (a row) or of one position along the pipeline (a column), which keeps
what was measured; host time and transfers are kept throughout. How many times as long the step then takes is the
slowdown of the row or column. A rank that is slow makes both its row and its column slow, so that its own slowdown is
the smaller of the two: one replay for each row and column finds it, not one for each rank.

Source of the estimate: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI '25), section
4.2, whose slowdowns of ranks are the smaller of those of their replica and their stage.

Shape letters: D replicas, P positions along the pipeline, R ranks, K steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.replay import World, replay
from ppdiag.analyzers.why import equal_work
from ppdiag.origins import Workers

if TYPE_CHECKING:
    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.shape import Shape

MOST_STEPS = 8
"""Steps that are replayed: slow workers are slow in all."""
MOST_WORLDS = 16
"""Rows and columns replayed at once."""


def workers(graph: Graph, shape: Shape) -> Workers | None:
    """The map; None where the pipelines of a job have not all as many ranks, or there is one rank alone."""
    if len({len(ranks) for ranks in shape.pipelines}) != 1 or len(graph.ranks_R) < 2:
        return None
    rank_DP = np.array(shape.pipelines)
    groups = [*rank_DP, *rank_DP.T]
    few = graph.only(np.unique(np.linspace(0, len(graph.steps_K) - 1, MOST_STEPS).round().astype(int)))
    slowdowns = _slowdowns(few, groups)
    rows, columns = slowdowns[: len(rank_DP)], slowdowns[len(rank_DP) :]
    map_DP = np.minimum(rows[:, None], columns[None, :])
    return Workers(
        ranks=tuple(tuple(row) for row in rank_DP.tolist()),
        replica_slowdown=tuple(rows.tolist()),
        position_slowdown=tuple(columns.tolist()),
        slowdown=tuple(tuple(row) for row in map_DP.tolist()),
    )


def _slowdowns(graph: Graph, groups: list[np.ndarray]) -> np.ndarray:
    """For each group of ranks, its own work's step over that of all work equal; 1 where that takes no time."""
    equal_NK = equal_work(graph)
    found: list[float] = []
    for at in range(0, len(groups), MOST_WORLDS):
        masks = [np.isin(graph.ranks_R, group).astype(float) for group in groups[at : at + MOST_WORLDS]]
        worlds = [World(), World(equal_NK), *(World(equal_NK, measured_R=mask) for mask in masks)]
        mean_W = replay(graph, worlds).duration_WK.mean(axis=1)
        found += (mean_W[2:] / mean_W[1]).tolist() if mean_W[1] > 0 else [1.0] * len(masks)
    return np.array(found)
