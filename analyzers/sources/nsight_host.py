"""Calls of an Nsight Systems export in which the host waited for its device, as host time of known cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.model import NONE, HostCause, Kind
from ppdiag.trace import SPAN_DTYPE, rank_slices, sorted_spans

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ppdiag.analyzers.sources.nsight_database import Database

RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
COLUMNS = ("start", "end", "globalTid", "nameId")
PID_SHIFT = 24
"""A global thread's process is in the bits above these."""
MOST_NS = 1 << 61
SHORTEST_NS = 100_000
"""A shorter call is none to speak of; the recorder of ppdiag draws the same line."""


def synchronising_calls(database: Database) -> dict[int, np.ndarray]:
    """Begin and end of the calls of each process (n x 2, as they are in the file), by the process's number."""
    if not all(database.has_column(RUNTIME, column) for column in COLUMNS):
        return {}
    calls = database.numbers(RUNTIME, COLUMNS, f'"end" - "start" >= {SHORTEST_NS}')
    names = database.texts(np.unique(calls["nameId"]).tolist())
    wanted = [number for number, name in names.items() if "Synchronize" in name]
    calls = calls[np.isin(calls["nameId"], wanted) & (calls["start"] >= 0) & (calls["end"] < MOST_NS)]
    process = calls["globalTid"] >> PID_SHIFT
    times = np.stack([calls["start"], calls["end"]], axis=1)
    return {number: times[process == number] for number in np.unique(process).tolist()}


def with_calls(spans: np.ndarray, calls: Mapping[int, np.ndarray]) -> np.ndarray:
    """The spans with those of the calls (begin and end, n x 2) of each rank, in the step of the op before them."""
    slices = rank_slices(spans["rank"])
    rows = []
    for rank, times in calls.items():
        if not len(times) or rank not in slices:
            continue
        own = np.zeros(len(times), SPAN_DTYPE)
        own["rank"], own["kind"], own["op"] = rank, Kind.HOST, HostCause.SYNCHRONISING
        for name in ("stage", "chunk", "microbatch", "peer", "group"):
            own[name] = NONE
        for name in ("start_ns", "post_ns", "launch_ns"):
            own[name] = times[:, 0]
        own["end_ns"] = times[:, 1]
        of_rank = spans[slices[rank]]
        before = np.searchsorted(of_rank["start_ns"], times[:, 0], "right") - 1
        own["step"] = of_rank["step"][np.maximum(before, 0)]
        rows.append(own)
    return sorted_spans(np.concatenate([spans, *rows])) if rows else spans
