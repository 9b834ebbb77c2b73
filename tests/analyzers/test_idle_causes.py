"""Why a rank stood idle at each moment, from steps simulated to the nanosecond."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import analyse
from ppdiag.analyzers.exporting import export
from ppdiag.analyzers.idle_causes import idle_spans
from ppdiag.diagnosis import Cause, Place
from ppdiag.exported import CAUSES, PLACES
from ppdiag.model import Kind
from tests.analyzers.factory import MS, Pipeline, spans_of, trace_of

ORDERS = schedules.order("GPipe", ranks=2, chunks=1, microbatches=2)


def pipeline(**changes) -> Pipeline:
    return replace(Pipeline(ORDERS, [0, 1], steps=6, tail=0, tail_of_all=True), **changes)


def idle_ms(trace, rank):
    """Milliseconds a step of each (place, cause) of a rank."""
    run = analyse(trace)
    rows = idle_spans(run)
    rows = rows[rows["rank"] == rank]
    found: dict[tuple[Place, Cause], float] = {}
    for row in rows:
        key = (PLACES[row["place"]], CAUSES[row["cause"]])
        found[key] = found.get(key, 0) + int(row["end_ns"] - row["start_ns"]) / MS / len(run.steps.kept)
    return {key: round(value, 3) for key, value in found.items()}


def test_in_an_even_pipeline_all_waits_are_the_bubble():
    # GPipe, P = 2, M = 2: rank 0 waits from the end of F1 (20) to the first gradient (50); rank 1 for F0 (10), and for
    # rank 0's last backward (20), and the collective of the tail.
    trace = pipeline().trace()
    assert idle_ms(trace, 0) == {(Place.LATE_SENDER, Cause.BUBBLE): 30}
    assert sum(idle_ms(trace, 1).values()) == 30
    assert {cause for _, cause in idle_ms(trace, 1)} == {Cause.BUBBLE}


def test_a_transfer_is_communication_and_the_wait_before_it_is_not():
    # A transfer begins when both ends are there. Rank 1: F0 12-22, F1 24-34, B0 34-54, B1 54-74. Rank 0 waits for B0's
    # gradient from 20, which is sent at 54; its backward ends at 76, and the next gradient comes at 78.
    found = idle_ms(pipeline(transfer=lambda *_: 2 * MS).trace(), 0)
    assert found[Place.TRANSFER, Cause.COMMUNICATION] == 4
    assert found[Place.LATE_SENDER, Cause.BUBBLE] == 34


def test_a_wait_for_a_heavy_stage_is_imbalance():
    def heavy(op, rank, step):  # noqa: ARG001
        return {Kind.FORWARD: 10, Kind.BACKWARD: 20}[op.kind] * MS * (8 if op.stage else 1)

    found = idle_ms(pipeline(duration=heavy).trace(), 0)
    assert max(found, key=lambda key: found[key]) == (Place.LATE_SENDER, Cause.IMBALANCE)


def test_a_wait_for_a_late_host_is_host():
    def gap(op, rank, step):  # noqa: ARG001
        return 100 * MS * ((op.kind, op.microbatch, rank) == (Kind.BACKWARD, 0, 1))

    late = pipeline(host_gap=gap)
    found = idle_ms(late.trace(), 0)
    assert max(found, key=lambda key: found[key]) == (Place.LATE_SENDER, Cause.HOST)
    assert idle_ms(late.trace(), 1)[Place.HOST, Cause.HOST] == 100


@pytest.mark.parametrize("steps_at_once", [1, 1 << 22])
def test_idle_and_busy_fill_each_step_and_idle_times_do_not_overlap(monkeypatch, steps_at_once):
    monkeypatch.setattr("ppdiag.analyzers.idle_causes.MOST_TIMES", steps_at_once)
    run = analyse(pipeline(transfer=lambda *_: 3 * MS, between=lambda rank, _: rank * 5 * MS).trace())
    rows = idle_spans(run)
    for r, rank in enumerate(run.steps.ranks.tolist()):
        own = rows[rows["rank"] == rank]
        assert (own["start_ns"][1:] >= own["end_ns"][:-1]).all()
        idle_s = float((own["end_ns"] - own["start_ns"]).sum()) / 1e9
        assert idle_s + run.measured.busy_RK[r].sum() == pytest.approx(run.steps.duration_s.sum())


def test_a_record_without_a_pipeline_is_exported_without_causes():
    rows = [{"rank": 0, "kind": Kind.OPTIMIZER, "start_ns": 0, "end_ns": 5}]
    found = export(trace_of(spans_of(rows)))
    assert (len(found.spans), len(found.idle), len(found.steps)) == (1, 0, 0)
    assert "no pipeline stage was recorded" in found.note


def test_an_export_knows_the_other_end_of_each_message():
    found = export(pipeline().trace())
    sends = np.flatnonzero(found.spans["kind"] == Kind.SEND)
    assert (found.partner[found.partner[sends]] == sends).all()
    assert found.steps["step"].tolist() == list(range(1, 5))
