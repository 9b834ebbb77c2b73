"""Where each rank stood, measured: every step of every rank split into busy and the places of idle time.

Works on unions of intervals, so that the parts of a rank's step sum to the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.messages import MISSING
from ppdiag.analyzers.program import COMPUTE, POST, WAIT, Program
from ppdiag.diagnosis import Place
from ppdiag.model import Flag, Kind
from ppdiag.trace import rank_slices

if TYPE_CHECKING:
    from ppdiag.analyzers.steps import Steps

WAITING_PLACES = (Place.LATE_SENDER, Place.TRANSFER, Place.SEND_WAIT, Place.COLLECTIVE, Place.UNEXPLAINED)


@dataclass(frozen=True, slots=True)
class Stays:
    """Where one rank stood: intervals in ns that do not overlap, each list sorted.

    Attributes:
        busy: compute (n x 2).
        waiting: for each of ``WAITING_PLACES`` its intervals (n x 2).
    """

    busy: np.ndarray
    waiting: dict[Place, np.ndarray]


@dataclass(frozen=True, slots=True)
class Measured:
    """The partition of every rank's steps, in seconds. R ranks, K steps.

    Attributes:
        busy_RK: compute time.
        idle_RK: for each place the time idle there; with ``busy_RK`` they sum to the step.
        stays: the intervals, by rank.
    """

    busy_RK: np.ndarray
    idle_RK: dict[Place, np.ndarray]
    stays: dict[int, Stays]


def measure(program: Program, steps: Steps) -> Measured:
    """Splits every analysed step of every rank."""
    shape = (len(steps.ranks), len(steps.kept))
    busy_RK = np.zeros(shape)
    idle_RK = {place: np.zeros(shape) for place in Place}
    stays = {}
    bounds = np.stack([steps.start_ns, steps.end_ns])
    order = np.lexsort((program.events["begin_ns"], program.events["rank"]))
    slices = rank_slices(program.events["rank"][order])
    for r, rank in enumerate(steps.ranks):
        found = stays[int(rank)] = _stays(program, order[slices[int(rank)]])
        busy_RK[r] = _covered(found.busy, bounds)
        for place in WAITING_PLACES:
            idle_RK[place][r] = _covered(found.waiting[place], bounds)
        waited = sum((idle_RK[place][r] for place in WAITING_PLACES), np.zeros(shape[1]))
        idle_RK[Place.HOST][r] = steps.duration_s - busy_RK[r] - waited
    return Measured(busy_RK, idle_RK, stays)


def _stays(program: Program, own: np.ndarray) -> Stays:
    """Where the rank stood whose events these are (indices, in order of their begin)."""
    mine = program.events[own]
    compute = mine[mine["what"] == COMPUTE]
    busy = union(np.stack([compute["begin_ns"], compute["end_ns"]], axis=1))
    waits = own[mine["what"] == WAIT]
    groups = _Groups(program, waits, _group_of_each_wait(mine))
    waiting, taken = {}, busy
    places = groups.places()
    launched = np.concatenate([places[Place.UNEXPLAINED], _launched_gaps(mine, program.trace.spans)])
    places[Place.UNEXPLAINED] = by_begin(launched)
    for place, stay in places.items():
        waiting[place] = _without(stay, taken)
        taken = union(by_begin(np.concatenate([taken, waiting[place]])))
    return Stays(busy, waiting)


def _launched_gaps(mine: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Intervals in which a device stood before an op that the host had launched already (n x 2; ``mine`` by begin)."""
    reached = np.maximum.accumulate(mine["end_ns"])
    before = np.append(mine["begin_ns"][:1], reached[:-1])
    launch = spans["launch_ns"][mine["span"]]
    launched = ((spans["flags"][mine["span"]] & np.uint16(Flag.DEVICE)) != 0) & (mine["what"] != POST)
    gaps = np.stack([np.maximum(before, launch), mine["begin_ns"]], axis=1)
    return gaps[launched & (gaps[:, 1] > gaps[:, 0])]


def _group_of_each_wait(mine: np.ndarray) -> np.ndarray:
    """Numbers the waits so that those with no compute and no post in between share a number.

    They are one wait for a peer: 1F1B waits its send first, so that the send's wait hides the peer's lateness.
    """
    interrupted = np.cumsum(np.isin(mine["what"], (COMPUTE, POST)))
    return interrupted[mine["what"] == WAIT]


class _Groups:
    """The merged waits of one rank, each with what is known of its messages."""

    def __init__(self, program: Program, waits: np.ndarray, number: np.ndarray) -> None:
        events, spans = program.events[waits], program.trace.spans
        first = np.flatnonzero(np.diff(number, prepend=-1))
        self.empty = not len(waits)
        if self.empty:
            return
        kind = spans["kind"][events["span"]]
        partner = program.messages.partner[events["span"]]
        received = (kind == Kind.RECV) & (partner != MISSING)
        sent_ns = np.where(received, spans["post_ns"][partner], np.iinfo(np.int64).min)
        self.begin = np.minimum.reduceat(events["begin_ns"], first)
        self.end = np.maximum.reduceat(events["end_ns"], first)
        self.sent = np.maximum.reduceat(sent_ns, first)
        self.has_received = np.logical_or.reduceat(received, first)
        self.has_unmatched = np.logical_or.reduceat((kind == Kind.RECV) & (partner == MISSING), first)
        self.has_send = np.logical_or.reduceat(kind == Kind.SEND, first)

    def places(self) -> dict[Place, np.ndarray]:
        """Intervals of each place (n x 2): a receive waits for its sender first, then for the bytes."""
        if self.empty:
            return {place: np.empty((0, 2), np.int64) for place in WAITING_PLACES}
        arrived = np.clip(self.sent, self.begin, self.end)
        whole = np.stack([self.begin, self.end], axis=1)
        unmatched = ~self.has_received & self.has_unmatched
        send = ~self.has_received & ~unmatched & self.has_send
        return {
            Place.LATE_SENDER: np.stack([self.begin, arrived], axis=1)[self.has_received],
            Place.TRANSFER: np.stack([arrived, self.end], axis=1)[self.has_received],
            Place.SEND_WAIT: whole[send],
            Place.COLLECTIVE: whole[~self.has_received & ~unmatched & ~send],
            Place.UNEXPLAINED: whole[unmatched],
        }


def union(intervals: np.ndarray) -> np.ndarray:
    """The union of intervals (n x 2, sorted by begin) as intervals that do not touch."""
    if not len(intervals):
        return intervals
    reach = np.maximum.accumulate(intervals[:, 1])
    new = np.append(True, intervals[1:, 0] > reach[:-1])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(intervals)) - 1
    return np.stack([intervals[first, 0], reach[last]], axis=1)


def by_begin(intervals: np.ndarray) -> np.ndarray:
    """Intervals (n x 2) in order of their begin."""
    return intervals[np.argsort(intervals[:, 0], kind="stable")]


def _without(intervals: np.ndarray, busy: np.ndarray) -> np.ndarray:
    """The parts of the intervals (sorted by begin) that lie outside ``busy``: another thread may be further."""
    intervals = union(intervals)
    if not len(intervals) or not len(busy):
        return intervals
    edges = np.unique(np.concatenate([intervals.ravel(), busy.ravel()]))
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    inside = contains(intervals, pieces[:, 0]) & ~contains(busy, pieces[:, 0])
    return union(pieces[inside])


def contains(intervals: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Mask of the points that the intervals (n x 2, disjoint, sorted, at least one) hold; an end is outside."""
    at = np.searchsorted(intervals[:, 0], points, "right") - 1
    inside: np.ndarray = (at >= 0) & (points < intervals[np.maximum(at, 0), 1])
    return inside


def covered_until(intervals: np.ndarray, points: np.ndarray) -> np.ndarray:
    """What of the time before each point the intervals (n x 2, disjoint, sorted) cover."""
    if not len(intervals):
        return np.zeros(points.shape, np.int64)
    before = np.append(0, np.cumsum(intervals[:, 1] - intervals[:, 0]))
    at = np.searchsorted(intervals[:, 0], points, "right") - 1
    inside = np.where(at >= 0, np.minimum(points, intervals[at, 1]) - intervals[at, 0], 0)
    covered: np.ndarray = before[np.maximum(at, 0)] + inside
    return covered


def _covered(intervals: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Seconds of each window ``bounds[0]..bounds[1]`` that the intervals (disjoint, sorted) cover."""
    return (covered_until(intervals, bounds[1]) - covered_until(intervals, bounds[0])) / 1e9
