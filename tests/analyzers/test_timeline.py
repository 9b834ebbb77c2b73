"""The median step as it is drawn: the measured ops, the idle times, and the step of equal work."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.diagnosis import Place
from ppdiag.model import Kind
from tests.analyzers.factory import MS, Pipeline
from tests.analyzers.strategies import pipelines
from tests.analyzers.test_hand_calculations import on_rank, pipeline, slower

if TYPE_CHECKING:
    from ppdiag.drawn_step import Timeline


def timeline_of(run: Pipeline) -> Timeline:
    timeline = diagnose(run.trace()).timeline
    assert timeline is not None
    return timeline


def drawn(rows: np.ndarray, rank: int) -> list[tuple[str, int, float, float]]:
    own = np.sort(rows[rows["rank"] == rank], order="start_s")
    labels = [(Kind(row["kind"]).name[0], int(row["microbatch"])) for row in own]
    return [(*label, *milliseconds(row)) for label, row in zip(labels, own, strict=True)]


def milliseconds(row: np.void) -> tuple[float, float]:
    return (round(float(row["start_s"]) * 1e3, 6), round(float(row["end_s"]) * 1e3, 6))


def test_the_measured_step_is_drawn_as_it_was() -> None:
    timeline = timeline_of(pipeline(duration=slower(2, stage=1)))
    assert timeline.step_s == pytest.approx(0.151)
    assert drawn(timeline.measured, 1) == [
        ("F", 0, 10, 30),
        ("F", 1, 30, 50),
        ("B", 0, 50, 90),
        ("B", 1, 90, 130),
        ("O", -1, 130, 131),
    ]


def test_the_step_of_equal_work_has_mean_times_in_the_same_order() -> None:
    timeline = timeline_of(pipeline(duration=slower(2, stage=1)))
    assert timeline.equal_work_step_s == pytest.approx(0.136)
    assert drawn(timeline.equal_work, 0) == [
        ("F", 0, 0, 15),
        ("F", 1, 15, 30),
        ("B", 0, 75, 105),
        ("B", 1, 105, 135),
        ("O", -1, 135, 136),
    ]


def test_idle_times_are_drawn_where_they_were() -> None:
    # rank 0 waits 20-50; rank 1 waits 0-10 and, after a stall of 71-81, until the end
    timeline = timeline_of(pipeline(between=on_rank(1, 10)))
    rows = np.sort(timeline.idle, order=["rank", "start_s"])
    found = [(int(row["rank"]), list(Place)[row["place"]].value, *milliseconds(row)) for row in rows]
    assert found == [
        (0, "late_sender", 20, 50),
        (1, "late_sender", 0, 10),
        (1, "host", 71, 81),
        (1, "late_sender", 81, 91),
    ]


@given(pipelines())
def test_what_is_drawn_covers_the_step(run: Pipeline) -> None:
    diagnosis = diagnose(replace(run, optimizer=1 * MS).trace())
    timeline = diagnosis.timeline
    assert timeline is not None
    for row in diagnosis.ranks:
        parts = [rows[rows["rank"] == row.rank] for rows in (timeline.measured, timeline.idle)]
        both = np.concatenate([np.stack([part["start_s"], part["end_s"]], axis=1) for part in parts])
        stretches = sorted(both[both[:, 1] > both[:, 0]].tolist())
        assert stretches[0][0] == pytest.approx(0.0, abs=1e-9)
        assert stretches[-1][1] == pytest.approx(timeline.step_s, abs=1e-9)
        for (_, end), (start, _) in pairwise(stretches):
            assert start == pytest.approx(end, abs=1e-9)
