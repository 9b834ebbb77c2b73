"""Puts all ranks on one time axis, and says how far that can be wrong.

Ranks whose records name the same clock (same boot, same time namespace) need nothing. Across clocks a ladder is used:
ping-pong probes (a weighted linear fit of offset and drift with certified bounds), else the wall clocks of the hosts.
Messages check either: nothing is received before it was sent (:func:`checked`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.analyzers.messages import MISSING
from ppdiag.analyzers.validation import whole_or_none
from ppdiag.model import Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ppdiag.analyzers.messages import Messages
    from ppdiag.trace import RankFacts, Trace

WALL_CLOCK_ERROR_S = 5e-3
"""Error to expect between the wall clocks of two hosts kept by NTP on one network, where nothing better is known."""
UNKNOWN_ERROR_S = 3600.0
"""Where a rank did not even note the time of day: too much for any verdict."""
MOST_DRIFT = 1e-3
"""No clock of a computer drifts by more; crystals are good to 100 ppm."""
USUAL_DRIFT = 1e-4
"""What a clock may drift where its drift could not be measured."""
RTT_SPREAD_NS = 50_000
"""Round trips within this of each other are equally good, however short the shortest is."""
RTT_SLACK_NS = 2_000
"""Added to a probe's excess round-trip time before it becomes a weight, so that the best probe does not stand alone."""


@dataclass(frozen=True, slots=True)
class Line:
    """``reference = local + offset_ns + drift * (local - origin_ns)``."""

    offset_ns: float = 0.0
    drift: float = 0.0
    origin_ns: int = 0
    error_ns: float = 0.0
    by_wall_clock: bool = False


@dataclass(slots=True)
class Clocks:
    """The correction of each rank's clock to that of rank 0."""

    lines: dict[int, Line]
    error_s: float = 0.0
    warnings: list[str] = field(default_factory=list)

    def apply(self, spans: np.ndarray, rank: int) -> None:
        """Moves a rank's times onto the common axis, in place."""
        line = self.lines[rank]
        if line == Line():
            return
        for name in ("start_ns", "end_ns", "post_ns", "launch_ns"):
            local = spans[name] - line.origin_ns
            spans[name] += np.rint(line.offset_ns + line.drift * local).astype(np.int64)


def align(facts: Mapping[int, RankFacts]) -> Clocks:
    """Chooses the correction of every rank from what the record offers."""
    ranks = sorted(facts)
    probes: dict[str, list[Mapping[str, int]]] = {}
    for rank in ranks:  # one rank of each clock asks, for all that read it
        probes.setdefault(facts[rank].clock, []).extend(facts[rank].clock_probes)
    # Rank 0 is asked and asks nobody; where it left no record, those beside it stand in for it.
    reference = next((facts[rank] for rank in ranks if not probes[facts[rank].clock]), facts[ranks[0]])
    lines, warnings = {}, []
    for rank in ranks:
        lines[rank], how = _line_of(facts[rank], reference, probes[facts[rank].clock])
        if how:
            warnings.append(how)
    if warnings:
        hosts = sorted({facts[rank].host for rank in ranks if lines[rank].error_ns})
        warnings = [f"no clock probes between the hosts ({', '.join(hosts)}): aligned by their wall clocks only"]
    return Clocks(lines, _error_between_any_s(facts, lines), warnings)


def _error_between_any_s(facts: Mapping[int, RankFacts], lines: Mapping[int, Line]) -> float:
    """Bound on the error between any two ranks: each line's error is against the reference, so that two of them add.

    Of wall clocks it is between any two hosts already.
    """
    measured = {facts[rank].clock: line.error_ns for rank, line in lines.items() if not line.by_wall_clock}
    by_wall_clock = max((line.error_ns for line in lines.values() if line.by_wall_clock), default=0.0)
    return sum(sorted([by_wall_clock, *measured.values()])[-2:]) / 1e9


def _line_of(rank: RankFacts, reference: RankFacts, probes: Sequence[Mapping[str, int]]) -> tuple[Line, str]:
    if rank.clock == reference.clock:
        return Line(), ""
    line = fit_probes(probes)
    if line is not None:
        return line, ""
    return _wall_clock_line(rank.facts, reference.facts), rank.host or "unnamed host"


def _wall_clock_line(rank: Mapping[str, Any], reference: Mapping[str, Any]) -> Line:
    """From the pair (local clock, wall clock) that each rank noted at its start."""
    own, other = _wall_minus_local(rank), _wall_minus_local(reference)
    if own is None or other is None:
        return Line(error_ns=UNKNOWN_ERROR_S * 1e9, by_wall_clock=True)
    return Line(offset_ns=float(own - other), error_ns=WALL_CLOCK_ERROR_S * 1e9, by_wall_clock=True)


def _wall_minus_local(facts: Mapping[str, Any]) -> int | None:
    unix_ns, local_ns = (whole_or_none(facts, name) for name in ("started_unix_ns", "started_local_ns"))
    return None if unix_ns is None or local_ns is None else unix_ns - local_ns


def fit_probes(probes: Sequence[Mapping[str, int]]) -> Line | None:
    """Offset and drift from ping-pong probes; None where they are no use.

    A probe holds ``t0`` (sent) and ``t3`` (answer received) on the rank's clock, ``t1`` and ``t2`` on the reference's.
    The probe with the least round trip of each ``burst`` is kept, bursts slower than twice the best (and 50 us) are
    dropped, and a line is fitted with weights 1 / (excess round trip + 2 us). The true offset at a probe lies within
    half its round trip; the fit's error is at most the largest such bound that it keeps, and what the clock may have
    drifted where one burst alone is left.

    Source: Cristian, "Probabilistic clock synchronization" (1989), for the bound of half a round trip.
    """
    probes = [probe for probe in probes if probe["t3"] - probe["t0"] >= probe["t2"] - probe["t1"] >= 0]
    if not probes:
        return None
    t0, t1, t2, t3 = (np.array([probe[name] for probe in probes], np.int64) for name in ("t0", "t1", "t2", "t3"))
    burst = np.array([probe.get("burst", 0) for probe in probes])
    rtt = (t3 - t0) - (t2 - t1)
    best = [np.flatnonzero(burst == b)[np.argmin(rtt[burst == b])] for b in np.unique(burst)]
    kept = np.array([i for i in best if rtt[i] <= 2 * rtt[best].min() + RTT_SPREAD_NS])
    offset = ((t1 - t0) + (t2 - t3))[kept] / 2.0
    origin = int(t0[kept].mean())
    local = (t0[kept] - origin).astype(np.float64)
    weight = 1.0 / (rtt[kept] - rtt[kept].min() + RTT_SLACK_NS)
    drift, level = _weighted_line(local, offset, weight)
    if abs(drift) > MOST_DRIFT:
        return None
    residual = np.abs(offset - (level + drift * local)).max()
    unknown_drift = USUAL_DRIFT * float(np.ptp(t0)) if len(kept) == 1 else 0.0
    return Line(level, drift, origin, float(rtt[kept].max() / 2 + residual) + unknown_drift)


def _weighted_line(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Slope and value at x = 0 of the weighted least-squares line; slope 0 where all x are equal."""
    centre = np.average(x, weights=weight)
    spread = np.average((x - centre) ** 2, weights=weight)
    slope = float(np.average((x - centre) * y, weights=weight) / spread) if spread > 0 else 0.0
    return slope, float(np.average(y, weights=weight) - slope * centre)


def checked(trace: Trace, messages: Messages) -> Trace:
    """The trace with as much error of its clocks as its messages prove, and a word on it where that is more.

    Only messages between ranks that read different clocks prove any.
    """
    spans, clock_of = trace.spans, clock_numbers(trace)
    waited = (spans["kind"] == Kind.RECV) & ((spans["flags"] & np.uint16(Flag.NEVER_WAITED)) == 0)
    received = np.flatnonzero(waited & (messages.partner != MISSING))
    sent = messages.partner[received]
    apart = clock_of[spans["rank"][sent]] != clock_of[spans["rank"][received]]
    error_s = message_bounds(spans["post_ns"][sent[apart]], spans["end_ns"][received[apart]])
    if error_s <= trace.clock_error_s:
        return trace
    said = f"messages end up to {error_s * 1e3:.2f} ms before they were sent: the clocks are off by that at least"
    return replace(trace, clock_error_s=error_s, warnings=(*trace.warnings, said))


def clock_numbers(trace: Trace) -> np.ndarray:
    """For each rank a number; ranks that read one clock, or whose clocks are not known, have the same."""
    clocks = sorted({facts.clock for facts in trace.ranks.values()})
    numbers = np.zeros(int(trace.spans["rank"].max(initial=0)) + 1, np.int64)
    for rank, facts in trace.ranks.items():
        if rank < len(numbers):
            numbers[rank] = clocks.index(facts.clock)
    return numbers


def message_bounds(sent_ns: np.ndarray, received_ns: np.ndarray) -> float:
    """How far receives lie before their sends at worst, in seconds: 0 where causality holds.

    Args:
        sent_ns: when each message was posted by its sender, on the common axis.
        received_ns: when its receive ended.
    """
    return float(max(0, (sent_ns - received_ns).max(initial=0))) / 1e9
