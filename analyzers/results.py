"""The tables of a diagnosis: job, steps, phases, stages, links, ranks, warnings."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers import schedules
from ppdiag.analyzers.program import COMPUTE
from ppdiag.analyzers.steps import pipeline_work
from ppdiag.analyzers.validation import whole_or_none
from ppdiag.diagnosis import Job, Phases, RankResult, StageResult
from ppdiag.diagnosis import Steps as StepTimes
from ppdiag.model import PIPELINE_KINDS, Kind
from ppdiag.trace import rank_slices

if TYPE_CHECKING:
    from ppdiag.analyzers.attribution import Attribution
    from ppdiag.analyzers.program import Program
    from ppdiag.analyzers.shape import Shape
    from ppdiag.analyzers.steps import Steps
    from ppdiag.trace import Trace

MOST_RAISED = 160
"""Characters shown of an exception."""
ENDED_EARLY = {
    "raised": "ended with {raised}",
    "interrupted": "was interrupted (Ctrl-C)",
    "killed": "was killed",
}


def job(trace: Trace, steps: Steps, shape: Shape) -> Job:
    """The job's shape; the schedule is the one that the measured order of ops is most like."""
    known = trace.job
    name, match = schedules.recognise(_orders(trace, steps, shape))
    tp = known.tp if known.tp is not None else (1 if len(shape.pipelines) == 1 else None)
    dp = known.dp if known.dp is not None or tp is None else len(shape.pipelines) // tp
    return Job(
        world_size=known.world_size or len(trace.ranks) or len(steps.ranks),
        pp=shape.pp,
        vpp=shape.vpp,
        tp=tp,
        dp=dp,
        microbatches=shape.microbatches,
        framework=known.framework or ("hand-written" if shape.inferred else "unknown"),
        schedule_name=name,
        schedule_match=match,
    )


def _orders(trace: Trace, steps: Steps, shape: Shape) -> list[list[schedules.Op]]:
    """The ops of each rank of the first pipeline, in order, in the first call of the first analysed step."""
    spans = trace.spans
    now = (steps.number == steps.kept[0]) & pipeline_work(spans) & (spans["microbatch"] < shape.microbatches)
    orders = []
    slices = rank_slices(spans["rank"])
    for rank in shape.pipelines[0]:
        own = spans[slices[rank]][now[slices[rank]]]
        rows = zip(own["kind"].tolist(), own["stage"].tolist(), own["microbatch"].tolist(), strict=True)
        orders.append([schedules.Op(Kind(kind), stage, microbatch) for kind, stage, microbatch in rows])
    return orders


def step_times(steps: Steps) -> StepTimes:
    """How long the steps took."""
    p10, median, p90 = np.percentile(steps.duration_s, [10, 50, 90]).tolist()
    return StepTimes(len(steps.kept), steps.dropped, median, p10, p90)


def phases(program: Program, steps: Steps) -> Phases:
    """Pipeline until the last F, B or W ends on any rank; tail until the last op of the step ends; between the rest."""
    events = program.events
    kinds = program.trace.spans["kind"][events["span"]]
    work = (events["what"] == COMPUTE) & np.isin(kinds, PIPELINE_KINDS)
    pipeline_end = _last_end(events[work], steps)
    op_end = np.maximum(_last_end(events[np.isin(kinds, (*PIPELINE_KINDS, Kind.OPTIMIZER))], steps), pipeline_end)
    parts = np.stack([pipeline_end - steps.start_ns, op_end - pipeline_end, steps.end_ns - op_end])
    pipeline_s, tail_s, between_s = (parts.mean(axis=1) / 1e9).tolist()
    return Phases(pipeline_s, tail_s, between_s)


def _last_end(events: np.ndarray, steps: Steps) -> np.ndarray:
    """Last end of each analysed step's events, within the step."""
    last = steps.start_ns.copy()
    at = np.searchsorted(steps.kept, events["step"])
    known = (at < len(steps.kept)) & (steps.kept[np.minimum(at, len(steps.kept) - 1)] == events["step"])
    np.maximum.at(last, at[known], events["end_ns"][known])
    return np.minimum(last, steps.end_ns)


def stages(trace: Trace, steps: Steps, shape: Shape, attribution: Attribution) -> tuple[StageResult, ...]:
    """One row a stage."""
    found = []
    analysed = _analysed_work(trace, steps)
    holders_of: dict[int, list[int]] = defaultdict(list)
    for rank, own in shape.stages.items():
        for stage in own:
            holders_of[stage].append(rank)
    for stage, holders in sorted(holders_of.items()):
        index = np.searchsorted(steps.ranks, holders)
        busy = float(attribution.busy_R[index].mean())
        times = _op_times(analysed[analysed["stage"] == stage])
        parts = attribution.where(index), attribution.why(index)
        peak_bytes = max((peak for rank in holders if (peak := _peak_memory(trace, rank)) is not None), default=None)
        found.append(StageResult(stage, tuple(holders), *times, busy, 1.0 - busy, *parts, peak_bytes))
    return tuple(found)


def ranks(trace: Trace, steps: Steps, shape: Shape, attribution: Attribution) -> tuple[RankResult, ...]:
    """One row a rank."""
    found = []
    analysed = _analysed_work(trace, steps)
    slices = rank_slices(analysed["rank"])
    for r, rank in enumerate(steps.ranks.tolist()):
        facts = trace.ranks.get(rank)
        busy = float(attribution.busy_R[r])
        times = _op_times(analysed[slices[rank]])
        host = facts.host if facts else ""
        parts = attribution.where([r]), attribution.why([r])
        peak_bytes = _peak_memory(trace, rank)
        found.append(RankResult(rank, host, shape.stages[rank], *times, busy, 1.0 - busy, *parts, peak_bytes))
    return tuple(found)


def _peak_memory(trace: Trace, rank: int) -> int | None:
    """The most that a rank's device ever held, its stages together; None where the record does not say."""
    return whole_or_none(trace.ranks[rank].facts, "peak_memory_bytes") if rank in trace.ranks else None


def _analysed_work(trace: Trace, steps: Steps) -> np.ndarray:
    """The spans of F, B and W of the analysed steps."""
    return trace.spans[pipeline_work(trace.spans) & np.isin(steps.number, steps.kept)]


def _op_times(spans: np.ndarray) -> tuple[float, float, float]:
    """Median seconds of one F, B and W among the spans."""
    time_s = (spans["end_ns"] - spans["start_ns"]) / 1e9
    medians = (time_s[spans["kind"] == kind] for kind in PIPELINE_KINDS)
    forward, backward, weight = (float(np.median(times)) if len(times) else 0.0 for times in medians)
    return forward, backward, weight


def warnings(trace: Trace, steps: Steps) -> tuple[str, ...]:
    """What the reader should know about the record, ranks that did not end well included."""
    found = [*trace.warnings, *steps.warnings]
    if len(steps.kept) == 1:
        found.append("one step was analysed: how much steps vary is not known")
    silent = sorted(set(trace.ranks) - set(steps.ranks.tolist()))
    if silent:
        found.append(f"ranks without pipeline work: {', '.join(map(str, silent[:8]))}{', ...' if silent[8:] else ''}")
    alive = [rank for rank, facts in sorted(trace.ranks.items()) if facts.status == "running"]
    if alive:
        found.append(f"ranks that still run: {', '.join(map(str, alive[:8]))}{', ...' if alive[8:] else ''}")
    ended = {rank: facts for rank, facts in trace.ranks.items() if facts.status in ENDED_EARLY}
    last = {rank: int(steps.recorded[steps.number[trace.spans["rank"] == rank].max(initial=0)]) for rank in ended}
    # those that failed outside of a wait come first: the others were left waiting
    for rank, facts in sorted(ended.items(), key=lambda item: (bool(item[1].inside), item[0]))[:16]:
        where = f"{facts.inside}, for {facts.inside_s:.1f} s" if facts.inside else f"step {last[rank]}, between two ops"
        raised = str(facts.facts.get("raised", "an exception")).partition("\n")[0]
        raised = raised if len(raised) <= MOST_RAISED else f"{raised[:MOST_RAISED]}..."
        found.append(f"rank {rank} {ENDED_EARLY[facts.status].format(raised=raised)}, inside {where}")
    return tuple(found)
