"""What each rank did in a step, as one sequence of events: compute, posts of messages, waits.

Compute that is nested in a wait's thread is cut at the wait (a receive inside a forward is no compute), so that the
events of a thread do not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.messages import Messages, match
from ppdiag.analyzers.steps import NO_STEP, Steps, pipeline_work
from ppdiag.model import WAIT_KINDS, Flag, Kind
from ppdiag.trace import rank_slices

if TYPE_CHECKING:
    from ppdiag.trace import Trace

COMPUTE, POST, WAIT = 0, 1, 2
START, END = 3, 4
"""``what`` of the events that stand in a graph for a rank's first and last moment of a step."""

EVENT_DTYPE = np.dtype(
    [
        ("rank", "<i4"),
        ("step", "<i8"),
        ("what", "u1"),
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        ("span", "<i8"),  # index in trace.spans
    ]
)


@dataclass(frozen=True, slots=True)
class Program:
    """The events of all ranks, sorted by step, rank, begin.

    Attributes:
        trace: the labelled trace; ``events["span"]`` points into its spans.
        events: structured array of ``EVENT_DTYPE``; ``step`` is the program's step (see :func:`build`).
        messages: who belongs to whom.
        sources: the ranks that begin a step, having nothing to receive first.
    """

    trace: Trace
    events: np.ndarray
    messages: Messages
    sources: tuple[int, ...]


def build(trace: Trace, steps: Steps) -> Program:
    """The program of every rank.

    A rank's step begins with its first event of that number. On the ranks that begin a step (``sources``) it begins
    with the first compute: what lies before (receives posted in advance, a broadcast of the data) ends the step before.
    """
    spans = trace.spans
    parts = [_compute_events(spans, steps), _post_events(spans, steps), _wait_events(spans, steps)]
    events = np.concatenate(parts)
    sources = _sources(spans, steps)
    _begin_with_compute(events, sources)
    order = np.lexsort((events["what"] == WAIT, events["end_ns"], events["begin_ns"], events["rank"], events["step"]))
    return Program(trace, events[order], match(trace), sources)


def _events(spans: np.ndarray, steps: Steps, chosen: np.ndarray, what: int) -> np.ndarray:
    events = np.empty(len(chosen), EVENT_DTYPE)
    events["rank"] = spans["rank"][chosen]
    events["step"] = steps.number[chosen]
    events["what"] = what
    events["begin_ns"] = spans["start_ns"][chosen]
    events["end_ns"] = spans["end_ns"][chosen]
    events["span"] = chosen
    return events


def _compute_events(spans: np.ndarray, steps: Steps) -> np.ndarray:
    compute = pipeline_work(spans) | (spans["kind"] == Kind.OPTIMIZER)
    chosen = np.flatnonzero(compute & (steps.number != NO_STEP) & np.isin(spans["rank"], steps.ranks))
    events = _events(spans, steps, chosen, COMPUTE)
    return _cut_at_messages(events, spans, steps)


def _messages_in_steps(spans: np.ndarray, steps: Steps) -> np.ndarray:
    waits = np.isin(spans["kind"], WAIT_KINDS)
    return np.flatnonzero(waits & (steps.number != NO_STEP) & np.isin(spans["rank"], steps.ranks))


def _post_events(spans: np.ndarray, steps: Steps) -> np.ndarray:
    events = _events(spans, steps, _messages_in_steps(spans, steps), POST)
    events["begin_ns"] = events["end_ns"] = spans["post_ns"][events["span"]]
    return events


def _wait_events(spans: np.ndarray, steps: Steps) -> np.ndarray:
    chosen = _messages_in_steps(spans, steps)
    waited = (spans["flags"][chosen] & np.uint16(Flag.NEVER_WAITED)) == 0
    return _events(spans, steps, chosen[waited], WAIT)


def _sources(spans: np.ndarray, steps: Steps) -> tuple[int, ...]:
    """Ranks whose first work in the middle analysed step is preceded by no wait for a receive."""
    step = steps.kept[len(steps.kept) // 2]
    now = steps.number == step
    work = pipeline_work(spans) & now
    received = now & (spans["kind"] == Kind.RECV) & ((spans["flags"] & np.uint16(Flag.NEVER_WAITED)) == 0)
    found, first_work = [], {}
    slices = rank_slices(spans["rank"])
    for rank in steps.ranks.tolist():
        own = slices[rank]
        start = spans["start_ns"][own]
        first_work[rank] = start[work[own]].min()
        if not (start[received[own]] <= first_work[rank]).any():
            found.append(rank)
    return tuple(found) or (min(first_work, key=lambda rank: first_work[rank]),)


def _begin_with_compute(events: np.ndarray, sources: tuple[int, ...]) -> None:
    """Moves what lies before a source's first compute of a step to the step before."""
    ranks = np.array(sorted(sources))
    own = np.flatnonzero(np.isin(events["rank"], ranks))
    place = (np.searchsorted(ranks, events["rank"][own]), events["step"][own])
    begin, compute = events["begin_ns"][own], events["what"][own] == COMPUTE
    first = np.full((len(ranks), int(place[1].max(initial=0)) + 1), np.iinfo(np.int64).max)
    np.minimum.at(first, (place[0][compute], place[1][compute]), begin[compute])
    events["step"][own[begin < first[place]]] -= 1


def _cut_at_messages(events: np.ndarray, spans: np.ndarray, steps: Steps) -> np.ndarray:
    """Cuts compute at the posts and waits that its own thread made inside it."""
    inner = _messages_in_steps(spans, steps)
    pieces = [events]
    keep = np.ones(len(events), bool)
    messages = rank_slices(spans["rank"][inner])
    for rank, own in rank_slices(events["rank"]).items():
        mine = inner[messages.get(rank, slice(0))]
        for index in own.start + np.flatnonzero(_encloses(events[own], spans, mine)):
            keep[index] = False
            pieces.append(_cut(events[index], spans, mine))
    pieces[0] = events[keep]
    return np.concatenate(pieces)


def _encloses(compute: np.ndarray, spans: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """Mask of the compute events with a post or a wait of the same rank inside."""
    if not len(inner):
        return np.zeros(len(compute), bool)
    points = np.sort(np.concatenate([spans["post_ns"][inner], spans["start_ns"][inner]]))
    before = np.searchsorted(points, compute["begin_ns"], "left")
    after = np.searchsorted(points, compute["end_ns"], "left")
    return after > before


def _cut(event: np.ndarray, spans: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """The parts of one compute event that lie outside the waits of its thread, cut also at its posts."""
    thread = spans["thread"][event["span"]]
    begin, end = int(event["begin_ns"]), int(event["end_ns"])
    near = (spans["post_ns"][inner] < end) & (spans["end_ns"][inner] > begin)
    mine = inner[near & (spans["thread"][inner] == thread)]
    holes = [(int(t), int(t)) for t in spans["post_ns"][mine] if begin < t < end]
    holes += [
        (max(int(a), begin), min(int(b), end))
        for a, b in zip(spans["start_ns"][mine], spans["end_ns"][mine], strict=True)
        if begin <= a < min(end, b)
    ]
    parts, at = [], begin
    for a, b in sorted(holes):
        if a > at:
            parts.append((at, a))
        at = max(at, b)
    if end > at or not parts:
        parts.append((at, end))
    cut = np.repeat(event.reshape(1), len(parts))
    cut["begin_ns"], cut["end_ns"] = np.array(parts).T
    return cut
