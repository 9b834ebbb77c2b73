"""Finds the steps of a job: where each begins, which are complete, and which are warm-up.

A step lasts from the first pipeline op of step k on any rank to the first of step k+1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.stuck import find_hang
from ppdiag.diagnosis import STUCK
from ppdiag.errors import NoPipelineFound
from ppdiag.model import COMPUTE_KINDS, PIPELINE_KINDS, WAIT_KINDS, Flag, Kind
from ppdiag.trace import rank_slices

if TYPE_CHECKING:
    from ppdiag.trace import Trace

WARM_UP_FACTOR = 1.3
"""Leading steps this much longer than the median of all others are warm-up (lazy connections, compilation, caches)."""
NO_STEP = -1


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a trace. K is the number of steps that are analysed, R of ranks with pipeline work.

    Attributes:
        number: step of each span of the trace, ``NO_STEP`` for spans that belong to none.
        ranks: the ranks with pipeline work, ascending (R).
        kept: numbers of the analysed steps, ascending (K).
        start_ns: when each analysed step began (K).
        end_ns: when it ended, which is when its successor began (K).
        dropped: complete or incomplete steps that are not analysed.
        recorded: the number that the record gives each step; ``number`` counts without long holes.
        warnings: why a step was cut short or assumed, one sentence each.
    """

    number: np.ndarray
    ranks: np.ndarray
    kept: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    dropped: int
    recorded: np.ndarray
    warnings: tuple[str, ...] = ()

    @property
    def duration_s(self) -> np.ndarray:
        """Length of each analysed step (K)."""
        return (self.end_ns - self.start_ns) / 1e9

    def only(self, numbers: np.ndarray) -> Steps:
        """The same with only these steps analysed; the others count as dropped."""
        chosen = np.isin(self.kept, numbers)
        return replace(
            self,
            kept=self.kept[chosen],
            start_ns=self.start_ns[chosen],
            end_ns=self.end_ns[chosen],
            dropped=self.dropped + int((~chosen).sum()),
        )


def find_steps(trace: Trace) -> Steps:
    """The steps of a trace.

    Raises:
        NoPipelineFound: there is no forward or backward in the record, or no step that all ranks completed.
    """
    spans = trace.spans
    work = pipeline_work(spans)
    if not work.any() or _without_neighbours(spans, work):
        raise NoPipelineFound(
            f"{trace.job.source}: no pipeline stage was recorded (no forward or backward of a microbatch between "
            "sends and receives); ppdiag explains pipeline-parallel jobs only"
        )
    number, recorded = _without_holes(_number_spans(spans, work))
    ranks, rank_index = np.unique(spans["rank"][work], return_inverse=True)
    first = _first_starts(number[work], rank_index.ravel(), spans["start_ns"][work], len(ranks))
    complete = np.flatnonzero((first < _NEVER).all(axis=1))
    if not len(complete):
        raise NoPipelineFound(_incomplete_message(trace, first, ranks))
    start = first.min(axis=1)
    kept, end, warnings = _measured_steps(spans, number, complete, start)
    usable = _without_warm_up(kept, end - start[kept], _interrupted(spans, start[kept], end))
    return Steps(
        number=number,
        ranks=ranks,
        kept=kept[usable],
        start_ns=start[kept[usable]],
        end_ns=end[usable],
        dropped=int((start < _NEVER).sum()) - int(usable.sum()),
        recorded=recorded,
        warnings=warnings,
    )


def _without_neighbours(spans: np.ndarray, work: np.ndarray) -> bool:
    """Whether all work was inferred, and no rank sent or received: data parallelism, or no parallelism at all."""
    inferred = (spans["flags"][work] & np.uint16(Flag.INFERRED)) != 0
    return bool(inferred.all()) and not np.isin(spans["kind"], (Kind.SEND, Kind.RECV)).any()


_NEVER = np.iinfo(np.int64).max


def pipeline_work(spans: np.ndarray) -> np.ndarray:
    """Mask of the spans that are pipeline work: F, B, W outside initialisation, and outside evaluation in training."""
    ignored = ((spans["flags"] & np.uint16(Flag.INIT)) != 0) | _flagged_evaluation(spans)
    return np.isin(spans["kind"], PIPELINE_KINDS) & ~ignored


def _flagged_evaluation(spans: np.ndarray) -> np.ndarray:
    """Mask of the spans that say that they are evaluation between training; none where there is no training."""
    training = (spans["kind"] == Kind.BACKWARD).any()
    return ((spans["flags"] & np.uint16(Flag.EVALUATION)) != 0) & training


def _evaluation(spans: np.ndarray) -> np.ndarray:
    """The same, and the messages of those ops: hand-written loops do not say of a message that it is evaluation."""
    flagged = _flagged_evaluation(spans)
    ops = np.isin(spans["kind"], PIPELINE_KINDS)
    if not (flagged & ops).any():
        return flagged
    message, op = _ops_of_messages(spans, ops)
    flagged[message] |= flagged[op]
    return flagged


def _number_spans(spans: np.ndarray, work: np.ndarray) -> np.ndarray:
    """The step of every span: by optimizer steps, else by pipeline steps, else where the pipeline has drained."""
    counted = np.isin(spans["kind"], (*COMPUTE_KINDS, *WAIT_KINDS)) & ((spans["flags"] & np.uint16(Flag.INIT)) == 0)
    counted &= ~_evaluation(spans)
    if (spans["kind"] == Kind.OPTIMIZER).any():
        number = spans["step"].astype(np.int64)
    elif (spans["kind"] == Kind.SCHEDULE).any():
        number = _count_before(spans, spans["kind"] == Kind.SCHEDULE)
    else:
        number = _count_before(spans, _drained(spans, work))
        message, op = _ops_of_messages(spans, work)
        number[message] = number[op]
    return np.where(counted, number, NO_STEP)


def _without_holes(number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts the steps from 0 with holes of one at most, and the number that each had: probes may have slept long."""
    known, index = np.unique(number[number >= 0], return_inverse=True)
    dense = np.cumsum(np.minimum(np.diff(known, prepend=known[:1]), 2))
    counted = number.copy()
    counted[number >= 0] = dense[index.ravel()]
    recorded = np.full(int(dense.max(initial=-1)) + 1, NO_STEP, np.int64)
    recorded[dense] = known
    return counted, recorded


def _count_before(spans: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """For each span, how many marked spans of its rank began at or before it was posted, less one."""
    number = np.empty(len(spans), np.int64)
    for own in rank_slices(spans["rank"]).values():
        number[own] = np.searchsorted(np.sort(spans["start_ns"][own][marks[own]]), spans["post_ns"][own], "right") - 1
    return number


def _drained(spans: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Marks the forwards that begin a step: no microbatch is in flight.

    A later rank of 1F1B has none in flight between any two of its microbatches. So the rank that drains least often
    tells how many forwards a step has, and those that drain more often begin a step each time after so many.
    """
    ops = np.flatnonzero(work & np.isin(spans["kind"], (Kind.FORWARD, Kind.BACKWARD)))
    forwards_of, begins_of = [], []
    for part in rank_slices(spans["rank"][ops]).values():
        own = ops[part]
        forward = spans["kind"][own] == Kind.FORWARD
        change = np.where(forward, 1, -1)
        in_flight = np.cumsum(change) - change
        forwards_of.append(own[forward])
        begins_of.append(np.flatnonzero(in_flight[forward] == 0))
    lengths = [_usual_distance(begins, len(own)) for own, begins in zip(forwards_of, begins_of, strict=True)]
    marks = np.zeros(len(spans), bool)
    for own, begins, length in zip(forwards_of, begins_of, lengths, strict=True):
        marks[own[begins] if length == max(lengths) else own[:: max(lengths)]] = True
    return marks


def _usual_distance(begins: np.ndarray, count: int) -> int:
    """Median number of forwards from one that begins a step to the next, of ``count`` in all."""
    return int(np.median(np.diff(begins, append=count))) if len(begins) else 0


def _ops_of_messages(spans: np.ndarray, ops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every send and receive, and its op: for a receive the one it lies in or before, for a send the one before it."""
    messages, found = [], []
    op, sent = np.flatnonzero(ops), np.flatnonzero(np.isin(spans["kind"], (Kind.SEND, Kind.RECV)))
    messages_of = rank_slices(spans["rank"][sent])
    for rank, part in rank_slices(spans["rank"][op]).items():
        own = op[part]  # sorted by start
        message = sent[messages_of.get(rank, slice(0))]
        begins = spans["start_ns"][own]
        before = np.maximum(np.searchsorted(begins, spans["post_ns"][message], "right") - 1, 0)
        around = np.maximum(np.searchsorted(begins, spans["start_ns"][message], "right") - 1, 0)
        inside = spans["start_ns"][message] < spans["end_ns"][own[around]]
        following = np.minimum(np.searchsorted(begins, spans["end_ns"][message], "left"), len(own) - 1)
        receive = spans["kind"][message] == Kind.RECV
        messages.append(message)
        found.append(own[np.where(~receive, before, np.where(inside, around, following))])
    return np.concatenate(messages), np.concatenate(found)


def _first_starts(number: np.ndarray, rank: np.ndarray, start_ns: np.ndarray, ranks: int) -> np.ndarray:
    """First start of work of each step on each rank (steps x ranks); ``_NEVER`` where a rank has none."""
    first = np.full((max(int(number.max()), 0) + 1, ranks), _NEVER, np.int64)
    valid = number >= 0
    np.minimum.at(first, (number[valid], rank[valid]), start_ns[valid])
    return first


def _measured_steps(
    spans: np.ndarray, number: np.ndarray, complete: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """The complete steps whose end is known, and their ends: a step ends where the next begins on any rank."""
    following = np.append(start[1:], _NEVER)
    ended = complete[(following[complete] < _NEVER) & (following[complete] > start[complete])]
    if len(ended):
        return ended, following[ended], ()
    last = complete[-1:]
    end = spans["end_ns"][number == last[0]].max()
    if end <= start[last[0]]:
        raise NoPipelineFound("the only complete step of the record takes no time")
    return last, np.array([end]), ("only one complete step was recorded: its end is taken from its last op",)


def _interrupted(spans: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """Mask of the steps in which an evaluation began: their length says nothing of training."""
    evaluation = np.sort(spans["start_ns"][_flagged_evaluation(spans) & np.isin(spans["kind"], PIPELINE_KINDS)])
    return np.searchsorted(evaluation, end_ns, "left") > np.searchsorted(evaluation, start_ns, "left")


def _without_warm_up(kept: np.ndarray, duration_ns: np.ndarray, interrupted: np.ndarray) -> np.ndarray:
    """Mask of the steps to analyse: not the first, not long ones that lead, not interrupted ones."""
    usable = ~interrupted if not interrupted.all() else np.ones(len(kept), bool)
    if len(kept) > 2:
        usable[0] = False
        for i in range(1, len(kept) - 2):
            if duration_ns[i] <= WARM_UP_FACTOR * np.median(duration_ns[i + 1 :]):
                break
            usable[i] = False
    return usable if usable.any() else np.arange(len(kept)) == len(kept) - 1


def _incomplete_message(trace: Trace, first: np.ndarray, ranks: np.ndarray) -> str:
    steps = ", ".join(f"rank {rank}: {int((first[:, i] < _NEVER).sum())}" for i, rank in enumerate(ranks[:8]))
    stopped = [f"rank {r} was in {facts.inside}" for r, facts in sorted(trace.ranks.items()) if facts.inside][:8]
    hang = find_hang(trace.ranks, step_s=0.0)
    stuck = [f"the job stands still. {hang.action} (ppdiag explain {STUCK})"] if hang is not None else []
    return "; ".join(
        [f"{trace.job.source}: no step was begun by all ranks (steps seen by {steps})", *stopped, *stuck],
    )
