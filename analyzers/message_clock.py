"""Clocks that nothing compared well enough, compared by the messages for which both ends waited.

Such a message ends at both ends at one time, as near as its last acknowledgement, and what each end took is on its own
clock. So the shorter of both ends' durations is the transfer, whatever the clocks say. Ranks are moved until their ends
agree: then end - max(start) is that shorter duration, and the late sender is told from the transfer as on one clock.
Sends that were buffered end early and are no measure; where there are no others the clocks stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.clock import MOST_DRIFT, Clocks, Line, clock_numbers
from ppdiag.analyzers.measured_times import RETURNED_AT_ONCE
from ppdiag.analyzers.messages import MISSING, match
from ppdiag.analyzers.steps import pipeline_work
from ppdiag.model import Flag, Kind
from ppdiag.trace import Trace, rank_slices

if TYPE_CHECKING:
    from collections.abc import Mapping

LEAST_MESSAGES = 4
"""Fewer messages between two clocks are too few to compare them by."""
MOST_OFF = 5.0
"""Messages whose ends are so many times as far apart as the median's have no part in the line."""
ERROR_IN_MEDIANS = 2.0
"""The error of a clock, in medians of what messages' ends are apart: the line errs by less than most messages do. On
real jobs over gloo whose clocks were known it was off by 0.04 to 0.52 ms, and each time by less than is said."""


@dataclass(frozen=True, slots=True)
class _Ends:
    """Messages between two clocks for which both ends waited, one row each.

    Attributes:
        pair: numbers of the clocks, the smaller first (n x 2).
        forward: whether the sender reads the first of them.
        at_ns: end at the second, on its clock.
        ahead_ns: by how much the end at the first is later, each on its own clock.
        shorter_ns: the shorter of both ends' durations.
    """

    pair: np.ndarray
    forward: np.ndarray
    at_ns: np.ndarray
    ahead_ns: np.ndarray
    shorter_ns: np.ndarray

    def only(self, rows: np.ndarray) -> _Ends:
        """Those under a mask."""
        return _Ends(*(getattr(self, name)[rows] for name in self.__slots__))


def moved(trace: Trace) -> Trace:
    """The trace with its ranks on one axis, where its clocks may be off by more than messages take; else the same.

    Spans keep their places: all ranks that read one clock are moved alike.
    """
    if trace.clock_error_s <= 0 or len({facts.clock for facts in trace.ranks.values()}) < 2:
        return trace
    ends = _ends(trace)
    if not len(ends.at_ns) or trace.clock_error_s * 1e9 <= np.median(ends.shorter_ns):
        return trace
    lines = _lines(ends, reference=int(clock_numbers(trace)[min(trace.ranks)]))
    numbers = clock_numbers(trace)
    if any(int(numbers[rank]) not in lines for rank in np.unique(trace.spans["rank"])):
        return trace
    error_s = sum(sorted(line.error_ns for line in lines.values())[-2:]) / 1e9
    return _moved(trace, numbers, lines, error_s) if error_s < trace.clock_error_s else trace


def _moved(trace: Trace, numbers: np.ndarray, lines: Mapping[int, Line], error_s: float) -> Trace:
    spans = trace.spans.copy()
    slices = rank_slices(spans["rank"])
    clocks = Clocks({rank: lines[int(numbers[rank])] for rank in slices})
    for rank, own in slices.items():
        part = spans[own]
        clocks.apply(part, rank)
        spans[own] = part
    most_ms = max(abs(line.offset_ns) for line in lines.values()) / 1e6
    said = (
        f"ranks were moved by up to {most_ms:.2f} ms, since nothing had compared their clocks well enough: both ends "
        f"of the messages for which both waited now end at one time, but for {error_s * 1e3:.2f} ms"
    )
    return replace(trace, spans=spans, clock_error_s=error_s, warnings=(*trace.warnings, said))


def blocked_waits(spans: np.ndarray) -> np.ndarray:
    """Mask of the messages whose wait did not return at once: else the message may have been buffered."""
    work = spans[pipeline_work(spans)]
    usual_ns = float(np.median(work["end_ns"] - work["start_ns"])) if len(work) else 0.0
    waited = (spans["flags"] & np.uint16(Flag.NEVER_WAITED)) == 0
    return waited & (spans["end_ns"] - spans["start_ns"] > RETURNED_AT_ONCE * usual_ns)


def _ends(trace: Trace) -> _Ends:
    """The messages between different clocks for which both ends waited."""
    spans, clock = trace.spans, clock_numbers(trace)
    partner = match(trace).partner
    no_measure = np.uint16(Flag.NEVER_WAITED | Flag.INFERRED | Flag.INIT)
    received = np.flatnonzero((spans["kind"] == Kind.RECV) & (partner != MISSING))
    sent = partner[received]
    shorter = np.minimum(*(spans["end_ns"][end] - spans["post_ns"][end] for end in (received, sent)))
    blocked = blocked_waits(spans)
    usable = ((spans["flags"][received] | spans["flags"][sent]) & no_measure) == 0
    usable &= blocked[received] & blocked[sent]
    first, second = clock[spans["rank"][sent]], clock[spans["rank"][received]]
    forward = first < second
    ahead = np.where(forward, 1, -1) * (spans["end_ns"][sent] - spans["end_ns"][received])
    at = np.where(forward, spans["end_ns"][received], spans["end_ns"][sent])
    pair = np.stack([np.minimum(first, second), np.maximum(first, second)], axis=1)
    return _Ends(pair, forward, at, ahead, shorter).only(usable & (first != second))


def _lines(ends: _Ends, reference: int) -> dict[int, Line]:
    """The correction of each clock that is joined to the reference by messages, directly or over others."""
    lines = {reference: Line()}
    pairs = {}
    for a, b in np.unique(ends.pair, axis=0).tolist():
        own = ends.only((ends.pair == (a, b)).all(axis=1))
        if len(own.at_ns) >= LEAST_MESSAGES:
            pairs[a, b] = _line(own)
    while True:
        known = next(((a, b) for a, b in pairs if (a in lines) != (b in lines)), None)
        if known is None:
            return lines
        a, b = known
        new, old, sign = (b, a, 1) if a in lines else (a, b, -1)
        step, before = pairs[known], lines[old]
        # where clocks are a chain, each is moved by what those before it are moved, too
        lines[new] = Line(
            sign * step.offset_ns + before.offset_ns + before.drift * (step.origin_ns - before.origin_ns),
            sign * step.drift + before.drift,
            step.origin_ns,
            step.error_ns + before.error_ns,
        )


def _line(ends: _Ends) -> Line:
    """What is to be added to times of the second clock of a pair: a least-squares line through its messages.

    Each direction has a level of its own, and the line is the mean of both: what ends lag behind each other cancels.
    """
    origin = int(np.median(ends.at_ns))
    since = (ends.at_ns - origin).astype(np.float64)
    ways = [way for way in (ends.forward, ~ends.forward) if way.any()]
    columns = np.stack([*(way.astype(np.float64) for way in ways), since], axis=1)
    fit = np.linalg.lstsq(columns, ends.ahead_ns, rcond=None)[0]
    off = np.abs(ends.ahead_ns - columns @ fit)
    near = off <= MOST_OFF * np.median(off)
    if all(near[way].any() for way in ways):  # again, without messages that stand out
        fit = np.linalg.lstsq(columns[near], ends.ahead_ns[near], rcond=None)[0]
    *levels, drift = fit.tolist()
    if abs(drift) > MOST_DRIFT:
        levels, drift = [float(np.median(ends.ahead_ns[way])) for way in ways], 0.0
    level = float(np.mean(levels))
    apart = np.abs(ends.ahead_ns - level - drift * since)
    # of one direction alone, what the ends lag behind each other shows nowhere; a quick transfer takes longer
    one_way_ns = float(np.quantile(ends.shorter_ns, 0.25)) if len(ways) == 1 else 0.0
    return Line(level, drift, origin, ERROR_IN_MEDIANS * float(np.median(apart)) + one_way_ns)
