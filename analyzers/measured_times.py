"""When each event of a step began and ended, and what lay between it and the one before on its rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ppdiag.analyzers.program import COMPUTE, END, POST, START
from ppdiag.analyzers.where import covered_until, union
from ppdiag.model import Flag, HostCause, Kind
from ppdiag.trace import rank_slices

if TYPE_CHECKING:
    from ppdiag.analyzers.program import Program

RETURNED_AT_ONCE = 0.01
"""A wait shorter than this share of the median op did not block: it is the cost of the call (tens of us on a busy
machine, where ops take milliseconds)."""
CAUSES = {"gc": HostCause.GC, "data": HostCause.DATA, "synchronising": HostCause.SYNCHRONISING}
"""Host time whose cause the record names."""
LAUNCH = "launch"
"""The rest of the time before an op of a device: its host launched it late."""


class Layout(Protocol):
    """Which steps these are, and where their events lie among all N (see ``graph.Graph``)."""

    steps_K: np.ndarray
    zero_K: np.ndarray
    ranks_R: np.ndarray
    rank_N: np.ndarray
    what_N: np.ndarray
    at_M: np.ndarray
    """Position of each event of a block."""
    index_MK: np.ndarray
    """Index of each event in the program."""


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Times of the events, in seconds from each step's start (N x K).

    Attributes:
        begin_NK, end_NK: of the event.
        before_NK: when its rank was done with all events before it.
        done_NK: the same, it included.
        host_NK: from ``before_NK`` until the host had entered it.
        work_NK: compute time that lies beside no earlier event.
        host_parts: of ``host_NK`` what has a known cause, by its name.
        at_once_s: a shorter wait did not block.
    """

    begin_NK: np.ndarray
    end_NK: np.ndarray
    before_NK: np.ndarray
    done_NK: np.ndarray
    host_NK: np.ndarray
    work_NK: np.ndarray
    host_parts: dict[str, np.ndarray]
    at_once_s: float


def measure(program: Program, layout: Layout) -> MeasuredTimes:
    """The times of all events of these steps."""
    begin_NK, end_NK = _placed(program, layout)
    starts, ends = np.flatnonzero(layout.what_N == START), np.flatnonzero(layout.what_N == END)
    begin_NK[starts] = end_NK[starts] = begin_NK[starts + 1]
    done_NK = np.empty_like(begin_NK)
    for start, end in zip(starts, ends, strict=True):
        np.maximum.accumulate(end_NK[start:end], axis=0, out=done_NK[start:end])
    done_NK[ends] = np.maximum(done_NK[ends - 1], _next_begin_RK(program, layout))
    begin_NK[ends] = end_NK[ends] = done_NK[ends]
    before_NK = np.empty_like(done_NK)
    before_NK[1:] = done_NK[:-1]
    before_NK[starts] = done_NK[starts]
    entered_NK, launched_NK = _entered(program, layout, begin_NK)
    host_NK = np.maximum(entered_NK - before_NK, 0.0)
    compute = (layout.what_N == COMPUTE)[:, None]
    work_NK = np.where(compute, np.maximum(end_NK - np.maximum(begin_NK, before_NK), 0.0), 0.0)
    works = work_NK[work_NK > 0]
    parts = _named_parts(program, layout, before_NK, host_NK)
    if launched_NK is not None:
        parts[LAUNCH] = np.where(launched_NK, host_NK - sum(parts.values()), 0.0)
    at_once_s = RETURNED_AT_ONCE * float(np.median(works)) if len(works) else 0.0
    return MeasuredTimes(begin_NK, end_NK, before_NK, done_NK, host_NK, work_NK, parts, at_once_s)


def _placed(program: Program, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    events = program.events
    begin_NK = np.empty((len(layout.what_N), len(layout.steps_K)))
    end_NK = np.empty_like(begin_NK)
    begin_NK[layout.at_M] = (events["begin_ns"][layout.index_MK] - layout.zero_K) / 1e9
    end_NK[layout.at_M] = (events["end_ns"][layout.index_MK] - layout.zero_K) / 1e9
    return begin_NK, end_NK


def _entered(program: Program, layout: Layout, begin_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """When the host had entered each event's op: its begin, and on a device its launch where that was before.

    What lies between a launch in time and the begin on the device is no host time. Second, which events were launched
    on a device; None where none was.
    """
    spans, events = program.trace.spans, program.events
    on_device = (spans["flags"] & np.uint16(Flag.DEVICE)) != 0
    if not on_device.any():
        return begin_NK, None
    span_MK = events["span"][layout.index_MK]
    launched_NK = np.zeros(begin_NK.shape, bool)
    launched_NK[layout.at_M] = on_device[span_MK] & (events["what"][layout.index_MK] != POST)
    launch_NK = np.full(begin_NK.shape, np.inf)
    launch_NK[layout.at_M] = (spans["launch_ns"][span_MK] - layout.zero_K) / 1e9
    return np.where(launched_NK, np.minimum(begin_NK, launch_NK), begin_NK), launched_NK


def _next_begin_RK(program: Program, layout: Layout) -> np.ndarray:
    """When each rank's next step begins; the end of this one where the record stops (-inf here)."""
    events = program.events
    following = np.full((len(layout.ranks_R), len(layout.steps_K)), -np.inf)
    for k, step in enumerate(layout.steps_K):
        block = slice(*np.searchsorted(events["step"], [step + 1, step + 2]))
        ranks, first = np.unique(events["rank"][block], return_index=True)
        known = np.isin(ranks, layout.ranks_R)
        begin = (events["begin_ns"][block][first[known]] - layout.zero_K[k]) / 1e9
        following[np.searchsorted(layout.ranks_R, ranks[known]), k] = begin
    return following


def _named_spans(spans: np.ndarray) -> np.ndarray:
    """The host spans that name a cause of ``CAUSES``.

    A synchronising call costs what comes after it: it returns when the device has nothing left to do, and without it
    the next launch would have come earlier by its length. So it reaches that much further here.
    """
    named = spans[(spans["kind"] == Kind.HOST) & np.isin(spans["op"], list(CAUSES.values()))].copy()
    synchronising = named["op"] == HostCause.SYNCHRONISING
    named["end_ns"][synchronising] += (named["end_ns"] - named["start_ns"])[synchronising]
    return named


def _named_parts(program: Program, layout: Layout, before_NK: np.ndarray, host_NK: np.ndarray) -> dict[str, np.ndarray]:
    """What of the host time lies in spans that name a cause; where two are nested, the first of ``CAUSES`` has it."""
    named = _named_spans(program.trace.spans)
    slices = rank_slices(named["rank"]) if len(named) else {}
    found: dict[str, np.ndarray] = {}
    for r, rank in enumerate(layout.ranks_R.tolist()):
        if rank not in slices:
            continue
        rows = np.flatnonzero(layout.rank_N == r)
        begin = np.rint(before_NK[rows] * 1e9).astype(np.int64) + layout.zero_K
        end = begin + np.rint(host_NK[rows] * 1e9).astype(np.int64)
        taken = np.zeros(begin.shape)
        own = named[slices[rank]]
        so_far = np.zeros(len(own), bool)
        for name, cause in CAUSES.items():
            so_far |= own["op"] == cause
            stretch = union(np.stack([own["start_ns"][so_far], own["end_ns"][so_far]], axis=1))
            covered = (covered_until(stretch, end) - covered_until(stretch, begin)) / 1e9
            part = np.minimum(covered - taken, host_NK[rows] - taken)
            if part.any():
                found.setdefault(name, np.zeros_like(host_NK))[rows] = part
            taken += part
    return found
