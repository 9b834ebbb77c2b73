"""Host time whose cause the record names: how much of it there is, and what the step would be without it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.replay import World
from ppdiag.analyzers.symptoms import severity
from ppdiag.analyzers.verdict import LEAST_COVERED
from ppdiag.diagnosis import WORTH_SAYING, Cause, percent
from ppdiag.model import Kind
from ppdiag.trace import rank_slices

if TYPE_CHECKING:
    from ppdiag.analyzers.diagnose import Analysis
    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.symptoms import Evidence, Gain
    from ppdiag.diagnosis import Symptom
    from ppdiag.model import HostCause

MOST_RANKS = 4
"""Ranks that a symptom names."""


def symptom_of(evidence: Evidence, cause: HostCause, words: Symptom, what: str) -> Symptom | None:
    """A symptom with its numbers, where the cause holds ranks up for 5 % of the time, of all ranks together.

    Args:
        evidence: of the run.
        cause: of the host time.
        words: the symptom without evidence, severity and gain; ``{rank}`` in its advice is the rank held up most.
        what: the cause in words, of many.
    """
    share = union_share(evidence.analysis, cause)
    if share < WORTH_SAYING:
        return None
    held_s = seconds_of(evidence.analysis, cause)
    worst = sorted(held_s, key=lambda rank: -held_s[rank])[:MOST_RANKS]
    gain = gain_without(evidence, cause)
    advice = replace(
        words.advice[0],
        action=words.advice[0].action.format(rank=worst[0]),
        gain_fraction=gain.fraction,
        gain_range=gain.over_steps,
    )
    ranks = "1 rank" if len(held_s) == 1 else f"{len(held_s)} ranks"
    numbers = [f"{what} on {ranks} cover {percent(share)} of the time"]
    for rank in worst:
        stages = ", ".join(map(str, evidence.shape.stages.get(rank, ())))
        mean_ms = held_s[rank] / len(evidence.analysis.steps.kept) * 1e3
        numbers.append(f"rank {rank} (stage {stages}): {mean_ms:.1f} ms a step on average")
    covers = gain.fraction >= LEAST_COVERED * evidence.gains[Cause.HOST]
    return replace(
        words,
        severity=severity(share),
        evidence=tuple(numbers),
        advice=(advice,),
        replaces="host-stall" if covers else "",
    )


def seconds_of(analysis: Analysis, cause: HostCause) -> dict[int, float]:
    """Seconds of a cause on each rank that has any, in the time of the analysed steps."""
    spans = spans_of(analysis, cause)
    time_s = (spans["end_ns"] - spans["start_ns"]) / 1e9
    return {rank: float(time_s[own].sum()) for rank, own in rank_slices(spans["rank"]).items()}


def union_share(analysis: Analysis, cause: HostCause) -> float:
    """Share of the time of the analysed steps in which at least one rank is held up by the cause.

    Pauses that come at the same time on all ranks count once, since they cost once.
    """
    spans = spans_of(analysis, cause)
    if not len(spans):
        return 0.0
    spans = spans[np.argsort(spans["start_ns"])]
    reached = np.maximum.accumulate(spans["end_ns"])
    begin = np.maximum(spans["start_ns"], np.append(spans["start_ns"][:1], reached[:-1]))
    covered_s = float(np.maximum(spans["end_ns"] - begin, 0).sum()) / 1e9
    return covered_s / float(analysis.steps.duration_s.sum())


def gain_without(evidence: Evidence, cause: HostCause) -> Gain:
    """What is saved where each rank's host time is less by the cause's, by a replay.

    The cause's time counts as far as there is host time: what passes beside a wait or inside an op costs nothing here.
    """
    cause_s = seconds_of(evidence.analysis, cause)

    def world(graph: Graph) -> World:
        host_R = np.zeros(len(graph.ranks_R))
        np.add.at(host_R, graph.rank_N, graph.host_NK.sum(axis=1))
        part = len(graph.steps_K) / len(evidence.analysis.steps.kept)
        own_R = np.array([part * cause_s.get(int(rank), 0.0) for rank in graph.ranks_R])
        return World(
            host_R=1.0 - np.divide(np.minimum(own_R, host_R), host_R, out=np.zeros_like(host_R), where=host_R > 0)
        )

    return evidence.gain(world)


def spans_of(analysis: Analysis, cause: HostCause) -> np.ndarray:
    """The spans of a cause in the time of the analysed steps."""
    spans, steps = analysis.trace.spans, analysis.steps
    inside = (spans["start_ns"] >= steps.start_ns[0]) & (spans["end_ns"] <= steps.end_ns[-1])
    return spans[(spans["kind"] == Kind.HOST) & (spans["op"] == cause) & inside]
