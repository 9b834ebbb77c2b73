"""Finds the pipeline in a trace: which ranks form one, which stages each holds, how many microbatches run.

Labels that a framework adapter recorded are kept. Those of hand-written loops (flag INFERRED) are filled in from who
talks to whom and from the order of the ops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers import plausibility
from ppdiag.analyzers.messages import number_rows
from ppdiag.analyzers.steps import Steps, pipeline_work
from ppdiag.model import NONE, PIPELINE_KINDS, Flag, Kind
from ppdiag.trace import rank_slices

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ppdiag.trace import Trace


@dataclass(frozen=True, slots=True)
class Shape:
    """The pipeline of a job.

    Attributes:
        pipelines: the replicas, each a tuple of ranks in order along the pipeline.
        stages: the stages of each rank, ascending.
        microbatches: M, of one call of the pipeline's schedule.
        accumulation: calls of the schedule in one step.
        inferred: stages were found from the messages, not named by a framework.
        doubt: why stages that were found cannot be right; empty where nothing speaks against them.
    """

    pipelines: tuple[tuple[int, ...], ...]
    stages: dict[int, tuple[int, ...]]
    microbatches: int
    accumulation: int
    inferred: bool
    doubt: str = ""

    @property
    def pp(self) -> int:
        """P, ranks along the pipeline."""
        return max(len(pipeline) for pipeline in self.pipelines)

    @property
    def vpp(self) -> int:
        """V, virtual stages of a rank."""
        return max(len(stages) for stages in self.stages.values())

    def stages_of_link(self, src: int, dst: int) -> tuple[int, int]:
        """The stages at the ends of a link of two ranks: the first neighbours among those that they hold."""
        pairs = [(a, b) for a in self.stages[src] for b in self.stages[dst] if abs(a - b) == 1]
        return pairs[0] if pairs else (self.stages[src][0], self.stages[dst][0])


def label(trace: Trace, steps: Steps) -> tuple[Trace, Shape]:
    """The trace with stage, chunk and microbatch filled in where they were missing, and the pipeline's shape.

    Raises:
        BadShape: the user has stated a layout that is none of so many ranks.
    """
    spans = trace.spans.copy()
    work = pipeline_work(spans) & (steps.number >= 0)
    pipelines = _pipelines(spans, steps)
    inferred = bool((work & (spans["stage"] == NONE)).any())
    _fill_microbatches(spans, work, steps.number)
    trace, stated = _stated(trace, steps, pipelines)
    if stated:
        _fill_stages(spans, work, stated)
        seen = set(steps.ranks.tolist())
        pipelines = [kept for ranks in stated if (kept := tuple(rank for rank in ranks if rank in seen))]
    elif inferred:
        pipelines = [_by_first_forward(spans, work & (steps.number == steps.kept[-1]), ranks) for ranks in pipelines]
        _fill_stages(spans, work, pipelines)
    accumulation = _separate_schedule_calls(spans, steps)
    slices = rank_slices(spans["rank"])
    stages = {int(rank): _stages_of(spans, work, slices[int(rank)]) for rank in steps.ranks}
    pipelines = [tuple(sorted(ranks, key=lambda rank: stages[rank])) for ranks in pipelines]
    _fill_message_stages(spans, stages)
    in_steps = work & np.isin(steps.number, steps.kept)
    total = _forwards_of_one_stage(spans, in_steps, steps.number)
    ops = spans[in_steps]
    doubt = plausibility.doubt(ops, steps.number[in_steps], pipelines, trace.clock_error_s * 1e9) if inferred else ""
    shape = Shape(tuple(pipelines), stages, max(1, total // accumulation), accumulation, inferred, doubt)
    warnings = [*trace.warnings, *([doubt] if doubt else [])]
    if trace.layout.vpp not in (None, shape.vpp):
        warnings.append(f"the record has {shape.vpp} virtual stages a rank, and --vpp {trace.layout.vpp} was stated")
    return replace(trace, spans=spans, warnings=tuple(warnings)), shape


def _stated(
    trace: Trace, steps: Steps, by_messages: list[tuple[int, ...]]
) -> tuple[Trace, tuple[tuple[int, ...], ...]]:
    """The pipelines as the user states them; none where he does not, or the messages contradict him."""
    if not trace.layout:
        return trace, ()
    world_size = trace.job.world_size or int(steps.ranks.max()) + 1
    stated = trace.layout.pipelines(world_size)
    own = {rank: number for number, ranks in enumerate(stated) for rank in ranks}
    across = next((ranks for ranks in by_messages if len({own[rank] for rank in ranks}) > 1), None)
    if across is not None:
        other = next(rank for rank in across if own[rank] != own[across[0]])
        warning = (
            f"the layout that was stated is not used: by it ranks {across[0]} and {other} are of two pipelines, and "
            "messages join them; look at --pp, --tp, --dp and --order"
        )
        return replace(trace, warnings=(*trace.warnings, warning)), ()
    sizes = trace.layout.sizes(world_size)
    return replace(trace, job=replace(trace.job, tp=sizes["tp"], dp=sizes["dp"])), stated


def _pipelines(spans: np.ndarray, steps: Steps) -> list[tuple[int, ...]]:
    """Ranks joined by point-to-point messages within steps; each set is one pipeline."""
    root = {int(rank): int(rank) for rank in steps.ranks}

    def find(rank: int) -> int:
        while root[rank] != rank:
            rank = root[rank]
        return rank

    message = np.isin(spans["kind"], (Kind.SEND, Kind.RECV)) & (steps.number >= 0)  # one end's record is enough
    for a, b in np.unique(np.stack([spans["rank"][message], spans["peer"][message]], axis=1), axis=0).tolist():
        if a in root and b in root:
            root[max(find(a), find(b))] = min(find(a), find(b))
    members: dict[int, list[int]] = {}
    for rank in root:
        members.setdefault(find(rank), []).append(rank)
    return [tuple(ranks) for ranks in members.values()]


def _fill_microbatches(spans: np.ndarray, work: np.ndarray, number: np.ndarray) -> None:
    """Numbers unnamed ops of one kind and chunk by their order in the step (first in, first out).

    Numbers that the hooks counted begin at 0 in each step, also where no optimizer told them that one began.
    """
    counted = np.flatnonzero(work & (spans["microbatch"] != NONE) & ((spans["flags"] & np.uint16(Flag.INFERRED)) != 0))
    if len(counted):
        part = spans[counted]
        same = number_rows(part["rank"], number[counted], part["chunk"])
        first = np.full(int(same.max()) + 1, np.iinfo(np.int32).max, np.int32)
        np.minimum.at(first, same, part["microbatch"])
        spans["microbatch"][counted] -= first[same]
    unnamed = np.flatnonzero(work & (spans["microbatch"] == NONE))
    if not len(unnamed):
        return
    part = spans[unnamed]
    same = number_rows(part["rank"], number[unnamed], part["chunk"], part["kind"])
    order = np.lexsort((part["start_ns"], same))
    starts = np.flatnonzero(np.diff(same[order], prepend=-1))
    position = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    spans["microbatch"][unnamed[order]] = position


def _by_first_forward(spans: np.ndarray, work: np.ndarray, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks by when microbatch 0 of a step first reaches them: the order along the pipeline."""
    first = work & (spans["kind"] == Kind.FORWARD) & (spans["microbatch"] == 0)
    never = np.iinfo(np.int64).max
    slices = rank_slices(spans["rank"])
    reached = {rank: int(spans["start_ns"][slices[rank]][first[slices[rank]]].min(initial=never)) for rank in ranks}
    return tuple(sorted(ranks, key=lambda rank: reached[rank]))


def _fill_stages(spans: np.ndarray, work: np.ndarray, pipelines: Iterable[tuple[int, ...]]) -> None:
    """Stage of chunk c on the p-th of P ranks is c * P + p (chunks are laid out as loops)."""
    unnamed = np.flatnonzero(work & (spans["stage"] == NONE))
    slices = rank_slices(spans["rank"][unnamed])
    for ranks in pipelines:
        for position, rank in enumerate(ranks):
            own = unnamed[slices.get(rank, slice(0))]
            chunk = np.maximum(spans["chunk"][own], 0)
            spans["chunk"][own] = chunk
            spans["stage"][own] = chunk * len(ranks) + position


def _separate_schedule_calls(spans: np.ndarray, steps: Steps) -> int:
    """Gives the microbatches of the 2nd, 3rd, ... schedule call of a step numbers of their own; returns the calls."""
    calls = (spans["kind"] == Kind.SCHEDULE) & ((spans["flags"] & np.uint16(Flag.EVALUATION)) == 0)
    if not calls.any():
        return 1
    most = 1
    labelled = spans["microbatch"] != NONE
    per_call = int(spans["microbatch"][labelled].max(initial=0)) + 1
    slices = rank_slices(spans["rank"])
    for rank in steps.ranks:
        own = np.arange(len(spans))[slices[int(rank)]]
        begins = np.sort(spans["start_ns"][own[calls[own]]])
        call = np.searchsorted(begins, spans["start_ns"][own], "right")
        step = np.maximum(steps.number[own], 0)
        first_call = np.full(int(step.max(initial=0)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(first_call, step, np.where(call > 0, call, np.iinfo(np.int64).max))
        within = np.where((call > 0) & labelled[own] & (steps.number[own] >= 0), call - first_call[step], 0)
        spans["microbatch"][own] += (within * per_call).astype(np.int32)
        most = max(most, int(within[np.isin(steps.number[own], steps.kept)].max(initial=0)) + 1)
    return most


def _stages_of(spans: np.ndarray, work: np.ndarray, own: slice) -> tuple[int, ...]:
    return tuple(np.unique(spans["stage"][own][work[own]]).tolist())


def _fill_message_stages(spans: np.ndarray, stages: dict[int, tuple[int, ...]]) -> None:
    """A message of a rank with one stage belongs to that stage."""
    unnamed = np.flatnonzero(np.isin(spans["kind"], (Kind.SEND, Kind.RECV)) & (spans["stage"] == NONE))
    slices = rank_slices(spans["rank"][unnamed])
    for rank, own in stages.items():
        if len(own) == 1:
            spans["stage"][unnamed[slices.get(rank, slice(0))]] = own[0]


def _forwards_of_one_stage(spans: np.ndarray, in_steps: np.ndarray, number: np.ndarray) -> int:
    """Median over steps and stages of the forwards of one stage on one rank in a step."""
    forwards = in_steps & (spans["kind"] == Kind.FORWARD)
    if not forwards.any():
        forwards = in_steps & np.isin(spans["kind"], PIPELINE_KINDS)
    part = spans[forwards]
    counts = np.bincount(number_rows(part["rank"], part["stage"], number[forwards]))
    return int(np.median(counts))
