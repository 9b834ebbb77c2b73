"""The timeline of a step as compact bytes for the page's own drawing code (``assets/timeline.js`` reads it back).

Times become whole multiples of a quantum and are stored as gaps and lengths, each number as four separate planes of
bytes: the high planes are nearly constant, so a million intervals take a few megabytes after gzip.
"""

from __future__ import annotations

import base64
import gzip
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ppdiag.drawn_step import Timeline

RESOLUTION = 1 << 22
"""Quanta along the time axis: a thousand-fold zoom on a screen 4000 pixels wide."""
TRACKS = ("measured", "idle", "equal_work")


def pack(timeline: Timeline) -> tuple[dict[str, Any], str]:
    """What the page needs to draw a timeline.

    Returns:
        Facts to be written as JSON (ranks from top to bottom, their stages, seconds in a quantum, counts), and the
        intervals as base64 of gzip of, for each of ``TRACKS``: intervals of each row, gaps, lengths, classes (a kind or
        a place), and for ops also stages and microbatches.
    """
    tracks = {name: _drawable(getattr(timeline, name)) for name in TRACKS}
    ranks, stages = _rows(tracks)
    quantum_s = _extent_s(timeline, tracks) / RESOLUTION
    blobs = [_encode(tracks[name], ranks, quantum_s) for name in TRACKS]
    facts = {
        "ranks": ranks,
        "stages": stages,
        "quantum_s": quantum_s,
        "step_s": float(timeline.step_s),
        "equal_work_step_s": float(timeline.equal_work_step_s),
        "counts": [len(tracks[name]) for name in TRACKS],
    }
    return facts, base64.b64encode(gzip.compress(b"".join(blobs), compresslevel=6, mtime=0)).decode("ascii")


def _drawable(rows: np.ndarray) -> np.ndarray:
    finite: np.ndarray = np.isfinite(rows["start_s"]) & np.isfinite(rows["end_s"])
    return rows.compress(finite)


def _rows(tracks: dict[str, np.ndarray]) -> tuple[list[int], list[list[int]]]:
    """All ranks, ordered by their first stage so that the pipeline reads as a staircase, and the stages of each."""
    ops = np.concatenate([tracks["measured"][["rank", "stage"]], tracks["equal_work"][["rank", "stage"]]])
    stages_of: dict[int, set[int]] = {int(rank): set() for rank in np.unique(tracks["idle"]["rank"])}
    for rank, stage in np.unique(ops).tolist():
        stages_of.setdefault(rank, set()).update([stage] if stage >= 0 else [])
    ranks = sorted(stages_of, key=lambda rank: (min(stages_of[rank], default=-1), rank))
    return ranks, [sorted(stages_of[rank]) for rank in ranks]


def _extent_s(timeline: Timeline, tracks: dict[str, np.ndarray]) -> float:
    ends = [float(np.abs(rows[name]).max()) for rows in tracks.values() for name in ("start_s", "end_s") if len(rows)]
    extent_s = max(timeline.step_s, timeline.equal_work_step_s, *ends, 0.0)
    return extent_s if np.isfinite(extent_s) and extent_s > 0 else 1.0


def _encode(rows: np.ndarray, ranks: list[int], quantum_s: float) -> bytes:
    order_of = np.argsort(np.asarray(ranks, dtype=np.int64))
    row = order_of[np.searchsorted(np.asarray(ranks, dtype=np.int64)[order_of], rows["rank"])]
    order = np.lexsort((rows["start_s"], row))
    rows, row = rows[order], row[order]
    start = np.rint(rows["start_s"] / quantum_s).astype(np.int32)
    end = np.maximum(np.rint(rows["end_s"] / quantum_s).astype(np.int32), start)
    previous_end = np.concatenate([[np.int32(0)], end[:-1]])
    previous_end[np.concatenate([[True], row[1:] != row[:-1]])[: len(row)]] = 0
    columns = [np.bincount(row, minlength=len(ranks)), start - previous_end[: len(start)], end - start]
    if "place" in (rows.dtype.names or ()):
        return b"".join([*map(_planes, columns), rows["place"].tobytes()])
    columns += [rows["stage"], rows["microbatch"]]
    return b"".join([*map(_planes, columns[:3]), rows["kind"].tobytes(), *map(_planes, columns[3:])])


def _planes(values: np.ndarray) -> bytes:
    return values.astype("<i4").view(np.uint8).reshape(-1, 4).T.tobytes()
