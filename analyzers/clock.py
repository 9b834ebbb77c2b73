"""Puts all ranks on one time axis, and says how far that can be wrong.

Ranks whose records name the same clock (same boot, same time namespace) need nothing. Across clocks a ladder is used:
ping-pong probes (a weighted linear fit of offset and drift with certified bounds), else the wall clocks of the hosts.
Messages check either: nothing is received before it was sent (:func:`message_bounds`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.analyzers.validation import whole_or_none

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ppdiag.trace import RankFacts

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
    error_s = max(line.error_ns for line in lines.values()) / 1e9
    if warnings:
        hosts = sorted({facts[rank].host for rank in ranks if lines[rank].error_ns})
        warnings = [f"no clock probes between the hosts ({', '.join(hosts)}): aligned by their wall clocks only"]
    return Clocks(lines, error_s, warnings)


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
        return Line(error_ns=UNKNOWN_ERROR_S * 1e9)
    return Line(offset_ns=float(own - other), error_ns=WALL_CLOCK_ERROR_S * 1e9)


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


def message_bounds(sent_ns: np.ndarray, received_ns: np.ndarray) -> float:
    """How far receives lie before their sends at worst, in seconds: 0 where causality holds.

    Args:
        sent_ns: when each message was posted by its sender, on the common axis.
        received_ns: when its receive ended.
    """
    return float(max(0, (sent_ns - received_ns).max(initial=0))) / 1e9
