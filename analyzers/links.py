"""The table of links: what messages between stages take, also where the clocks of their ends cannot be compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.clock import clock_numbers
from ppdiag.analyzers.message_clock import blocked_waits
from ppdiag.analyzers.messages import MISSING
from ppdiag.diagnosis import LinkResult
from ppdiag.model import NONE, Flag, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ppdiag.analyzers.program import Program
    from ppdiag.analyzers.steps import Steps
    from ppdiag.trace import Trace


@dataclass(frozen=True, slots=True)
class _Received:
    """The messages that were received in the analysed steps, one row each.

    Attributes:
        received, sent: their spans.
        pairs: stages of sender and receiver (n x 2).
        transfer_s: from when both ends were there until the receive ended; nan where nobody waited for it.
        shorter_s: the shorter of both ends' durations, each on its own clock: an end that comes first waits for the
            other too, and the last one for the bytes alone. nan where one end did not wait.
        apart: whether the ends read different clocks.
    """

    received: np.ndarray
    sent: np.ndarray
    pairs: np.ndarray
    transfer_s: np.ndarray
    shorter_s: np.ndarray
    apart: np.ndarray

    @classmethod
    def of(cls, program: Program, steps: Steps, times: np.ndarray) -> _Received:
        """All messages between known stages, with the times of these spans (the trace's, on the clocks to be shown)."""
        spans = program.trace.spans
        inside = np.isin(steps.number, steps.kept) & (spans["kind"] == Kind.RECV)
        received = np.flatnonzero(inside & (program.messages.partner != MISSING))
        received = received[_carries_work(spans, received, program.messages.partner[received])]
        sent = program.messages.partner[received]
        ready = np.maximum(times["post_ns"][received], times["post_ns"][sent])
        waited = (spans["flags"][received] & np.uint16(Flag.NEVER_WAITED)) == 0
        certain = waited & (times["start_ns"][received] <= ready)
        transfer_s = np.maximum(times["end_ns"][received] - ready, 0) / 1e9
        pairs = np.stack([spans["stage"][sent], spans["stage"][received]], axis=1)
        apart = clock_numbers(program.trace)
        return cls(
            received=received,
            sent=sent,
            pairs=pairs,
            transfer_s=np.where(certain, transfer_s, np.nan),
            shorter_s=_shorter(spans, received, sent),
            apart=apart[spans["rank"][sent]] != apart[spans["rank"][received]],
        )


def links(program: Program, steps: Steps, recorded: Trace) -> tuple[LinkResult, ...]:
    """One row for each pair of stages that exchange messages; transfers are those that a receive waited for.

    Where the clocks of a link's ends may be off by more than its transfers take, these are the shorter of both ends'
    durations, which needs no common clock.

    Args:
        program: of the run.
        steps: those analysed.
        recorded: the trace on the clocks of the record, where the program's was moved; else the same.
    """
    spans, messages = program.trace.spans, _Received.of(program, steps, recorded.spans)
    found = []
    for src, dst in np.unique(messages.pairs, axis=0).tolist():
        own = (messages.pairs == (src, dst)).all(axis=1)
        time, by_clocks = _time(messages, own, recorded.clock_error_s)
        size = int(np.median(spans["size_bytes"][messages.received[own]]))
        direction = "forward" if dst > src else "backward"
        bandwidth = size / time if size > 0 and time > 0 else None
        ends = int(spans["rank"][messages.sent[own]][0]), int(spans["rank"][messages.received[own]][0])
        transport = _transport(program.trace, *ends)
        found.append(LinkResult(src, dst, direction, size, time, bandwidth, transport, by_clocks))
    return tuple(found)


def clock_warnings(found: Iterable[LinkResult], clock_error_s: float) -> tuple[str, ...]:
    """Says of the links whose clocks cannot be trusted how far these disagree with the ends' own durations."""
    doubtful = [link for link in found if link.by_clocks_s is not None]
    if not doubtful:
        return ()
    worst = max(doubtful, key=lambda link: abs((link.by_clocks_s or 0.0) - link.transfer_s))
    said = (
        f"the clocks may be off by {clock_error_s * 1e3:.2f} ms, more than transfers take on {len(doubtful)} links: "
        "their transfers are the shorter of both ends' durations instead; from stage "
        f"{worst.src_stage} to {worst.dst_stage} that is {worst.transfer_s * 1e3:.2f} ms, and by the clocks "
        f"{(worst.by_clocks_s or 0.0) * 1e3:.2f} ms"
    )
    return (said,)


def _time(messages: _Received, own: np.ndarray, clock_error_s: float) -> tuple[float, float | None]:
    """Median transfer of the messages ``own``, and what the clocks say where they are not trusted."""
    by_clocks = _median(messages.transfer_s[own])
    durations_s = messages.shorter_s[own & messages.apart]
    shorter = _median(durations_s)
    doubtful = not np.isnan(durations_s).all() and clock_error_s > min(by_clocks, shorter)
    return (shorter, by_clocks) if doubtful else (by_clocks, None)


def _median(times: np.ndarray) -> float:
    known = times[~np.isnan(times)]
    return float(np.median(known)) if len(known) else 0.0


def _shorter(spans: np.ndarray, received: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """The shorter of both ends' durations; nan where an end did not wait: its message may have been buffered."""
    blocked = blocked_waits(spans)
    took = [
        np.where(blocked[end], (spans["end_ns"][end] - spans["post_ns"][end]) / 1e9, np.nan) for end in (received, sent)
    ]
    return np.minimum(*took)


def _carries_work(spans: np.ndarray, received: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """Mask of the messages between known stages; without those of shapes, where it is known what messages carry."""
    known = (spans["stage"][received] != NONE) & (spans["stage"][sent] != NONE)
    payload = spans["op"][received] != Payload.UNKNOWN
    return known & (payload if payload.any() else True)


def _transport(trace: Trace, source: int, destination: int) -> str | None:
    """What NCCL's channel lines say connects two ranks, that of the most channels first; None where none tells."""
    channels: Counter[str] = Counter()
    for row in trace.transports:
        if (row["src_rank"], row["dst_rank"]) == (source, destination):
            channels[row["transport"]] += row["channels"]
    return " + ".join(name for name, _ in channels.most_common()) or None
