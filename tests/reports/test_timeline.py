from __future__ import annotations

import base64
import gzip
from dataclasses import replace
from typing import Any

import numpy as np

from ppdiag.diagnosis import Place
from ppdiag.drawn_step import IDLE_DTYPE, TIMELINE_DTYPE, Timeline
from ppdiag.model import Kind
from ppdiag.reports.timeline import RESOLUTION, pack

F, B = int(Kind.FORWARD), int(Kind.BACKWARD)
LATE = list(Place).index(Place.LATE_SENDER)


def make_timeline(
    measured: list[tuple[Any, ...]], idle: list[tuple[Any, ...]], equal_work: list[tuple[Any, ...]]
) -> Timeline:
    ops = [np.array(rows, list(TIMELINE_DTYPE)) for rows in (measured, equal_work)]
    return Timeline(0, 4.0, 2.0, ops[0], ops[1], np.array(idle, list(IDLE_DTYPE)))


def unpacked(timeline: Timeline) -> tuple[dict[str, Any], list[list[tuple[float, ...]]]]:
    """The rows of each track as (rank, class, stage, microbatch, start_s, end_s), as the page reads them."""
    facts, text = pack(timeline)
    data = np.frombuffer(gzip.decompress(base64.b64decode(text)), np.uint8)
    offset = 0

    def take(count: int) -> np.ndarray:
        nonlocal offset
        offset += count
        return data[offset - count : offset]

    def numbers(count: int) -> list[int]:
        values: list[int] = np.ascontiguousarray(take(4 * count).reshape(4, -1).T).view("<i4").ravel().tolist()
        return values

    tracks: list[list[tuple[float, ...]]] = []
    for track, count in enumerate(facts["counts"]):
        counts, gaps, lengths = numbers(len(facts["ranks"])), numbers(count), numbers(count)
        kinds = take(count).tolist()
        labels = [numbers(count), numbers(count)] if track != 1 else [[-1] * count] * 2
        rows: list[tuple[float, ...]] = []
        i = 0
        for rank, in_row in zip(facts["ranks"], counts, strict=True):
            end = 0
            for _ in range(in_row):
                start, end = end + gaps[i], end + gaps[i] + lengths[i]
                quantum_s = facts["quantum_s"]
                rows.append((rank, kinds[i], labels[0][i], labels[1][i], start * quantum_s, end * quantum_s))
                i += 1
        tracks.append(rows)
    assert offset == len(data)
    return facts, tracks


def test_what_is_packed_comes_back_by_rank_and_time() -> None:
    timeline = make_timeline(
        measured=[(1, B, 1, 0, 2.0, 3.0), (0, F, 0, 0, 0.0, 1.0), (1, F, 1, 0, 1.5, 2.0), (0, B, 0, 0, 3.5, 4.0)],
        idle=[(0, LATE, 1.0, 3.5)],
        equal_work=[(0, F, 0, 0, 0.0, 1.0)],
    )
    facts, (measured, idle, equal_work) = unpacked(timeline)
    assert facts["quantum_s"] == 4.0 / RESOLUTION
    assert measured == [(0, F, 0, 0, 0.0, 1.0), (0, B, 0, 0, 3.5, 4.0), (1, F, 1, 0, 1.5, 2.0), (1, B, 1, 0, 2.0, 3.0)]
    assert idle == [(0, LATE, -1, -1, 1.0, 3.5)]
    assert equal_work == [(0, F, 0, 0, 0.0, 1.0)]


def test_ranks_are_ordered_by_their_first_stage() -> None:
    ops = [(0, F, 1, 0, 0.0, 1.0), (7, F, 0, 0, 0.0, 1.0), (7, F, 2, 0, 1.0, 2.0), (3, F, 0, 0, 0.0, 1.0)]
    facts, _ = unpacked(make_timeline(ops, [], []))
    assert (facts["ranks"], facts["stages"]) == ([3, 7, 0], [[0], [0, 2], [1]])


def test_overlap_and_times_before_the_step_are_kept() -> None:
    ops = [(0, F, 0, 0, -0.5, 1.0), (0, F, 0, 1, 0.5, 2.0)]
    _, (measured, _, _) = unpacked(make_timeline(ops, [], []))
    assert [row[4:] for row in measured] == [(-0.5, 1.0), (0.5, 2.0)]


def test_rows_without_a_time_are_left_out() -> None:
    timeline = make_timeline([(0, F, 0, 0, 0.0, 1.0), (0, B, 0, 0, float("nan"), 2.0)], [], [])
    facts, (measured, _, _) = unpacked(replace(timeline, equal_work_step_s=0.0))
    assert facts["counts"] == [1, 0, 0]
    assert measured == [(0, F, 0, 0, 0.0, 1.0)]
