"""The median step for drawing: measured ops and idle time, and the same order with equal work on the same axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.program import COMPUTE
from ppdiag.analyzers.replay import World, event_times, replay
from ppdiag.analyzers.why import equal_work
from ppdiag.diagnosis import Place
from ppdiag.drawn_step import IDLE_DTYPE, TIMELINE_DTYPE, Timeline

if TYPE_CHECKING:
    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.program import Program
    from ppdiag.analyzers.steps import Steps
    from ppdiag.analyzers.where import Measured, Stays

PLACES = tuple(Place)
OP_ROWS, IDLE_ROWS = np.dtype(list(TIMELINE_DTYPE)), np.dtype(list(IDLE_DTYPE))


def median_step(program: Program, steps: Steps, graph: Graph, measured: Measured) -> Timeline:
    """The step of median length among those of the most frequent structure."""
    k = int(np.argsort(graph.duration_K)[len(graph.duration_K) // 2])
    at = int(np.searchsorted(steps.kept, graph.steps_K[k]))
    window = (int(steps.start_ns[at]), int(steps.end_ns[at]))
    equal, equal_step_s = _equal_work(graph, k)
    return Timeline(
        step=int(steps.recorded[graph.steps_K[k]]),
        step_s=float(graph.duration_K[k]),
        equal_work_step_s=equal_step_s,
        measured=_measured(program, window),
        equal_work=equal,
        idle=_idle(measured, window),
    )


def _measured(program: Program, window: tuple[int, int]) -> np.ndarray:
    events = program.events
    events = events[(events["what"] == COMPUTE) & (events["end_ns"] > window[0]) & (events["begin_ns"] < window[1])]
    spans = program.trace.spans[events["span"]]
    rows = np.empty(len(events), OP_ROWS)
    for name in ("rank", "kind", "stage", "microbatch"):
        rows[name] = spans[name]
    rows["start_s"] = (np.maximum(events["begin_ns"], window[0]) - window[0]) / 1e9
    rows["end_s"] = (np.minimum(events["end_ns"], window[1]) - window[0]) / 1e9
    return rows


def _equal_work(graph: Graph, k: int) -> tuple[np.ndarray, float]:
    nothing = World(equal_work(graph), np.zeros(len(graph.ranks_R)), np.zeros(len(graph.links)))
    found = replay(graph, [World(), nothing], keep_joins=True)
    assert found.join_JWK is not None
    begin_NK, end_NK = event_times(graph, nothing, found.join_JWK[:, 1])
    ops = np.flatnonzero(graph.what_N == COMPUTE)
    rows = np.empty(len(ops), OP_ROWS)
    rows["rank"] = graph.ranks_R[graph.rank_N[ops]]
    rows["kind"], rows["stage"], rows["microbatch"] = graph.kind_N[ops], graph.stage_N[ops], graph.microbatch_N[ops]
    rows["start_s"], rows["end_s"] = begin_NK[ops, k], end_NK[ops, k]
    return rows, float(found.duration_WK[1, k])


def _idle(measured: Measured, window: tuple[int, int]) -> np.ndarray:
    parts = [_idle_of_rank(rank, stays, window) for rank, stays in measured.stays.items()]
    return np.concatenate(parts) if parts else np.empty(0, IDLE_ROWS)


def _idle_of_rank(rank: int, stays: Stays, window: tuple[int, int]) -> np.ndarray:
    """The waits of the rank inside the window, and as host time what neither compute nor a wait covers."""
    known = [(PLACES.index(place), _clip(stay, window)) for place, stay in stays.waiting.items()]
    covered = np.concatenate([_clip(stays.busy, window), *(stay for _, stay in known)])
    covered = covered[np.argsort(covered[:, 0], kind="stable")]
    begin = np.append(window[0], np.maximum.accumulate(covered[:, 1]) if len(covered) else [])
    gaps = np.stack([begin, np.append(covered[:, 0], window[1])], axis=1)
    known.append((PLACES.index(Place.HOST), gaps[gaps[:, 1] > gaps[:, 0]]))
    rows = np.empty(sum(len(stay) for _, stay in known), IDLE_ROWS)
    rows["rank"] = rank
    rows["place"] = np.repeat([place for place, _ in known], [len(stay) for _, stay in known])
    stretch = np.concatenate([stay for _, stay in known])
    rows["start_s"], rows["end_s"] = ((stretch - window[0]) / 1e9).T
    return rows


def _clip(intervals: np.ndarray, window: tuple[int, int]) -> np.ndarray:
    clipped = np.clip(intervals, *window)
    return clipped[clipped[:, 1] > clipped[:, 0]]
