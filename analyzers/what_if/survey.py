"""Every single change of a run that makes sense, and what each would do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.analyzers.planning import orders
from ppdiag.analyzers.what_if.change import Change, LinkFactor, Place
from ppdiag.analyzers.what_if.layers import best_split
from ppdiag.analyzers.what_if.measured_layers import known_layers, measured_layers
from ppdiag.analyzers.what_if.predict import Prediction, predict
from ppdiag.analyzers.what_if.run import link_time, stage_seconds
from ppdiag.errors import BadShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ppdiag.analyzers.what_if.run import Run

MOST_PLACES = 3
"""Stages, ranks and links of a survey: those that take longest."""
SCHEDULES = (("gpipe", None), ("1f1b", None), ("interleaved", 2), ("interleaved", 4), ("zb-h1", None), ("zb-v", None),
             ("dualpipe-v", None))  # fmt: skip
FASTER = 10.0
"""How many times as fast the links of a survey get: nearly free."""


class Refused(NamedTuple):
    """A change that cannot be made, and why."""

    change: Change
    reason: str


class Answer(NamedTuple):
    """What changes would do, the most gain first, and those that cannot be made."""

    predictions: tuple[Prediction, ...]
    refused: tuple[Refused, ...]


def answer(run: Run, changes: Iterable[Change], *, limit_bytes: float | None = None) -> Answer:
    """Predicts each change; one that cannot be, or does not fit into ``limit_bytes`` of a rank, is refused."""
    predictions, refused = [], []
    for change in changes:
        try:
            found = predict(run, change)
        except BadShape as error:
            refused.append(Refused(change, str(error)))
            continue
        reason = None if limit_bytes is None else found.memory.refusal(limit_bytes)
        if reason is None:
            predictions.append(found)
        else:
            refused.append(Refused(change, reason))
    return Answer(tuple(sorted(predictions, key=lambda found: -found.gain)), tuple(refused))


def single_changes(run: Run, *, now: Sequence[int] | None = None, limit_bytes: float | None = None) -> list[Change]:
    """The changes of a survey.

    Args:
        run: the run.
        now: layers of each stage, where they are known: then (and where the record has the layers) the best split of
            them is among the changes.
        limit_bytes: what a rank may hold at most.
    """
    microbatches = run.shape.microbatches
    found = [Change(microbatches=times * microbatches) for times in (2, 4)]
    found += [Change(schedule=name, chunks=chunks) for name, chunks in SCHEDULES if not _is_own(run, name, chunks)]
    unknown = now is None and measured_layers(run.trace, run.shape) is None
    found.append(Change(even="stage") if unknown else best_layers(run, now, limit_bytes=limit_bytes))
    found += [Change(even="microbatch"), *([Change(even="rank")] if len(run.shape.pipelines) > 1 else [])]
    found += [Change(repair=(place,)) for place in (*_slow_stages(run), *_slow_ranks(run))]
    if run.graph.links:
        found += [Change(links=(LinkFactor(stages, FASTER),)) for stages in (*_slow_links(run), None)]
        found.append(Change(overlap=True))
    return [*found, Change(checkpoint=True)]


def best_layers(run: Run, now: Sequence[int] | None = None, *, limit_bytes: float | None = None) -> Change:
    """The split of the layers whose longest stage is shortest, as a change.

    Args:
        run: the run.
        now: layers of each stage; None for those of the record.
        limit_bytes: what a rank may hold at most.

    Raises:
        BadShape: ``now`` does not fit the run or is not recorded, or no split fits into the memory.
    """
    known = known_layers(run, given=now)
    counts, times = known.counts, known.times(stage_seconds(run.graph, run.stages))
    most = _most_layers(run, counts, limit_bytes)
    split = best_split(times, run.stages, most_S=most)
    if split is None:
        room = ",".join(map(str, most or ()))
        raise BadShape(f"{sum(counts)} layers do not fit: the stages have room for {room}")
    return Change(layers=split, layers_now=counts)


def _most_layers(run: Run, counts: Sequence[int], limit_bytes: float | None) -> list[int] | None:
    """How many layers each stage has room for; None where the record or the user does not tell.

    All of a rank's memory is taken to grow with its layers, and its stages to share the room.
    """
    held = predict(run, Change()).memory.bytes_R
    if limit_bytes is None or held is None:
        return None
    most = [0] * run.stages
    for rank, size in zip(run.shape.pipelines[0], held, strict=True):
        own = run.shape.stages[rank]
        layers = sum(counts[stage] for stage in own)
        for stage in own:
            most[stage] = int(limit_bytes / size * layers / len(own))
    return most


def _is_own(run: Run, name: str, chunks: int | None) -> bool:
    return orders.SCHEDULES[name].known_as == run.job.schedule_name and chunks in (None, run.shape.vpp)


def _slow_stages(run: Run) -> list[Place]:
    """The stages that take longer than the mean, the longest first."""
    seconds = stage_seconds(run.graph, run.stages)
    slow = [stage for stage in np.argsort(-seconds).tolist() if seconds[stage] > seconds.mean()]
    return [Place("stage", stage) for stage in slow[:MOST_PLACES]]


def _slow_ranks(run: Run) -> list[Place]:
    """The ranks that work longer than the others of the same stages, or whose host takes longer, the longest first."""
    graph, held = run.graph, run.shape.stages
    total_R = np.zeros(len(graph.ranks_R))
    np.add.at(total_R, graph.rank_N, (graph.work_NK + graph.host_NK).mean(axis=1))
    if len(run.shape.pipelines) == 1:
        return [Place("rank", int(graph.ranks_R[int(np.argmax(total_R))]))]
    of = [tuple(held[int(rank)]) for rank in graph.ranks_R]
    twins = [np.array([stages == own for stages in of]) for own in of]
    over_R = np.array([total_R[r] - total_R[twins[r]].mean() for r in range(len(of))])
    slow = [r for r in np.argsort(-over_R).tolist() if over_R[r] > 0]
    return [Place("rank", int(graph.ranks_R[r])) for r in slow[:MOST_PLACES]]


def _slow_links(run: Run) -> list[tuple[int, int]]:
    """Pairs of neighbouring stages whose messages take longest."""
    time: dict[tuple[int, int], float] = {}
    for (src, dst), time_K in link_time(run.graph).items():
        for a in run.shape.stages[src]:
            for b in run.shape.stages[dst]:
                if abs(a - b) == 1:
                    pair = min(a, b), max(a, b)
                    time[pair] = max(time.get(pair, 0.0), float(time_K.mean()))
    return sorted(time, key=lambda pair: -time[pair])[:MOST_PLACES]
