"""Clocks of several hosts that nothing compared: what the messages between them allow.

Recorders that note the time of day leave each host with its wall clock, good to some milliseconds. A message says more:
it cannot end before it was sent, so that the least time from a send to the end of its receive bounds how far one clock
may be ahead of the other; messages both ways bound it from both sides. These are bounds and no measurement: times in
queues make them wide. Where they are broken, the later host is moved as far as it must be, with all that is on it.

Source: the controlled logical clock of Rabenseifner, "The controlled logical clock - a global time for trace based
software monitoring of parallel applications in workstation clusters" (1997), with one shift a host and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.clock import WALL_CLOCK_ERROR_S, message_bounds
from ppdiag.analyzers.messages import MISSING, match
from ppdiag.model import Flag, Kind
from ppdiag.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMES = ("start_ns", "end_ns", "post_ns", "launch_ns")
NAMED = 4
_NO_TIMES = np.uint16(Flag.INFERRED | Flag.NEVER_WAITED)

Pair = tuple[str, str]
"""Host of the sender, host of the receiver."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the hosts' clocks may be apart.

    Attributes:
        shift_ns: by how much each host is moved.
        error_s: what may remain between two hosts that exchange messages.
    """

    shift_ns: dict[str, int]
    error_s: float

    def __str__(self) -> str:
        """A warning."""
        names = ", ".join(sorted(self.shift_ns)[:NAMED]) + (", …" if len(self.shift_ns) > NAMED else "")
        moved = max(self.shift_ns.values(), default=0)
        how = f", moved by up to {moved / 1e6:.2f} ms so that nothing is received before it was sent" if moved else ""
        return (
            f"the {len(self.shift_ns)} hosts ({names}) have clocks of their own, taken as they are{how}; by the "
            f"messages between them they may be off by up to {self.error_s * 1e3:.2f} ms"
        )


def agree(spans: np.ndarray, host_of: Mapping[int, str]) -> Agreement:
    """Moves the times of hosts (in place) as far as their messages demand.

    Args:
        spans: of all ranks, messages numbered.
        host_of: each rank's host; those of one host share a clock.
    """
    hosts = sorted(set(host_of.values()))
    shift_ns = dict.fromkeys(hosts, 0)
    if len(hosts) < 2:
        return Agreement(shift_ns, _broken(spans))
    least_ns = _least_delays(spans, host_of)
    shift_ns = _shifts(least_ns, hosts)
    by_span = np.array([shift_ns[host_of[rank]] for rank in spans["rank"].tolist()], np.int64)
    for name in TIMES:
        spans[name] += by_span
    pairs = [pair for pair in permutations(hosts, 2) if pair in least_ns or pair[::-1] in least_ns]
    bounds = [_bound_s(pair, least_ns, shift_ns) for pair in pairs] or [WALL_CLOCK_ERROR_S]
    return Agreement(shift_ns, max(*bounds, _broken(spans)) if pairs else WALL_CLOCK_ERROR_S)


def _received(spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Receives whose end was seen, and their sends, as indices."""
    partner = match(Trace(spans)).partner
    seen = (spans["kind"] == Kind.RECV) & ((spans["flags"] & _NO_TIMES) == 0)
    received = np.flatnonzero(seen & (partner != MISSING))
    return received, partner[received]


def _broken(spans: np.ndarray) -> float:
    """How far a receive ends before its send began, at worst, in seconds."""
    received, sent = _received(spans)
    return message_bounds(spans["post_ns"][sent], spans["end_ns"][received])


def _least_delays(spans: np.ndarray, host_of: Mapping[int, str]) -> dict[Pair, int]:
    """The least ns from a send to the end of its receive of each pair of hosts: the median over steps.

    The median, since one message that was matched wrongly would move a host by a step.
    """
    received, sent = _received(spans)
    found: dict[Pair, dict[int, int]] = {}
    delays = (spans["end_ns"][received] - spans["post_ns"][sent]).tolist()
    ends = zip(spans["rank"][sent].tolist(), spans["rank"][received].tolist(), strict=True)
    for (sender, receiver), step, delay in zip(ends, spans["step"][received].tolist(), delays, strict=True):
        pair = host_of[sender], host_of[receiver]
        if pair[0] != pair[1]:
            steps = found.setdefault(pair, {})
            steps[step] = min(delay, steps.get(step, delay))
    return {pair: int(np.median(list(steps.values()))) for pair, steps in found.items()}


def _shifts(least_ns: Mapping[Pair, int], hosts: list[str]) -> dict[str, int]:
    """The least shifts forward under which no message of a typical step ends before it was sent.

    >>> _shifts({("a", "b"): -500, ("b", "a"): 700}, ["a", "b"])
    {'a': 0, 'b': 500}
    """
    shift_ns = dict.fromkeys(hosts, 0)
    for _ in hosts:  # as many rounds as the longest chain of hosts; more would go on only where no shift fits
        for (sender, receiver), delay in least_ns.items():
            shift_ns[receiver] = max(shift_ns[receiver], shift_ns[sender] - delay)
    return shift_ns


def _bound_s(pair: Pair, least_ns: Mapping[Pair, int], shift_ns: Mapping[str, int]) -> float:
    """How far the receiver's clock may be ahead of the sender's.

    Where no message says, what wall clocks are good for, or what they were off by if that is more.
    """
    moved_ns = abs(shift_ns[pair[1]] - shift_ns[pair[0]])
    usual_s = max(WALL_CLOCK_ERROR_S, moved_ns / 1e9)
    if pair not in least_ns:
        return usual_s
    return min(usual_s, max(0, least_ns[pair] + shift_ns[pair[1]] - shift_ns[pair[0]]) / 1e9)
