"""Waits followed back to where they began. All times in milliseconds.

Two ranks, one microbatch, F = 10, B = 20, optimizer = 1. Free transfers: rank 0 F 0-10, rank 1 F 10-20 B 20-40
optimizer 40-41, rank 0 B 40-60 optimizer 60-61. A step takes 61, each rank works 31; the schedule makes each wait 30.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Kind
from tests.analyzers.factory import MS, Pipeline, ten_and_twenty
from tests.analyzers.strategies import equal_stages, pipelines

if TYPE_CHECKING:
    from ppdiag.diagnosis import Diagnosis
    from ppdiag.origins import Origin


def diagnosed(name: str = "1F1B", ranks: int = 2, microbatches: int = 1, chunks: int = 1, **settings) -> Diagnosis:
    orders = schedules.order(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    return diagnose(Pipeline(orders, schedules.stage_ranks(name, ranks, chunks), steps=5, **settings).trace())


def ms(found: Diagnosis) -> dict[tuple[object, ...], float]:
    """Milliseconds a step, over all ranks, by place."""
    scale = found.steps.median_s * 1e3 * len(found.ranks)
    return {key(origin): round(origin.fraction * scale, 6) for origin in origins(found)}


def origins(found: Diagnosis) -> tuple[Origin, ...]:
    assert found.root_cause is not None
    return found.root_cause.origins


def key(origin: Origin) -> tuple[object, ...]:
    return tuple(part for part in (origin.what, origin.op, origin.stage, origin.rank, origin.link) if part is not None)


def heavy(stage: int, times: int = 2):
    return lambda op, rank, step: ten_and_twenty(op, rank, step) * (times if op.stage == stage else 1)


def test_equal_stages_wait_for_the_schedule_alone():
    assert ms(diagnosed()) == {("schedule",): 60}


def test_a_send_that_waits_for_its_receiver_is_compared_with_the_receive_after_it():
    # 4 ranks, 8 microbatches: each works 241 and the step takes 11 x 30 + 1
    found = diagnosed(ranks=4, microbatches=8, rendezvous=True)
    assert ms(found) == {("schedule",): 4 * 90}


def test_a_slow_message_costs_both_ranks():
    # 4 from rank 0 to rank 1: the step takes 65, each rank works 31, waits 30 for the schedule and 4 for the message
    found = diagnosed(transfer=lambda src, dst: 4 * MS if src < dst else 0)
    assert ms(found) == {("schedule",): 60, ("message", 0, (0, 1)): 8}


def test_host_time_costs_its_own_rank_and_those_that_wait_for_it():
    # rank 1 stalls 5 before its backward: the step takes 66, rank 1 stands 5 by itself, and rank 0 waits 5 for it
    found = diagnosed(host_gap=lambda op, rank, _step: 5 * MS if rank == 1 and op.kind is Kind.BACKWARD else 0)
    assert ms(found) == {("schedule",): 60, ("host", 1): 10}
    (host,) = [origin for origin in origins(found) if origin.what == "host"]
    assert host.own_fraction == pytest.approx(5 / 132)


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("stage", range(4))
def test_a_rank_that_passes_a_delay_on_is_charged_nothing(schedule: str, stage: int, *, rendezvous: bool):
    found = diagnosed(schedule, ranks=4, microbatches=8, duration=heavy(stage), rendezvous=rendezvous)
    assert {origin.what for origin in origins(found)} == {"schedule", "work"}
    assert {(o.stage, o.rank) for o in origins(found) if o.what == "work"} == {(stage, stage)}


def test_a_heavy_chunk_is_told_from_the_other_chunks_of_its_rank():
    found = diagnosed("Interleaved1F1B", ranks=4, microbatches=8, chunks=2, duration=heavy(5))
    assert {(o.stage, o.rank) for o in origins(found) if o.what == "work"} == {(5, 1)}


def test_a_slow_replica_is_named_by_its_ranks():
    # ranks 4 to 7 are the second replica; its last rank works without a pause
    slow = lambda op, rank, step: ten_and_twenty(op, rank, step) * (2 if rank >= 4 else 1)  # noqa: E731
    found = diagnosed(ranks=4, microbatches=8, replicas=2, tail=1 * MS, duration=slow)
    work = [origin for origin in origins(found) if origin.what == "work"]
    assert {origin.rank for origin in work} <= {4, 5, 6, 7}
    assert (work[0].stage, work[0].op, work[0].rank) == (3, "backward", 7)


def test_a_stall_between_two_steps_is_found_in_the_waits_of_the_next():
    # rank 0 stalls 40 before each step: the step takes 101. Rank 1 waits 40 longer than the schedule's 30, in its first
    # receive, whose sender stood in the step before; rank 0 stands 40 by itself.
    found = diagnosed(between=lambda rank, _step: 40 * MS if rank == 0 else 0)
    assert ms(found) == {("schedule",): 60, ("host", 0): 80}


def test_the_critical_path_is_the_chain_of_spans_that_fills_the_step():
    found = diagnosed(transfer=lambda src, dst: 4 * MS if src < dst else 0).root_cause
    assert found is not None
    path = found.critical_path
    rows = [(s.rank, s.what, s.stage, s.microbatch, s.link, s.start_s * 1e3, s.end_s * 1e3) for s in path.spans]
    assert [row[:5] for row in rows] == [
        (0, "forward", 0, 0, None),
        (0, "message", None, None, (0, 1)),
        (1, "forward", 1, 0, None),
        (1, "backward", 1, 0, None),
        (0, "backward", 0, 0, None),
        (0, "optimizer", None, None, None),
    ]
    assert [row[5:] for row in rows] == [
        pytest.approx(times) for times in ((0, 10), (10, 14), (14, 24), (24, 44), (44, 64), (64, 65))
    ]
    assert path.length_s == pytest.approx(0.065)
    assert path.by_what_s == pytest.approx({"forward": 0.02, "message": 0.004, "backward": 0.04, "optimizer": 0.001})
    assert path.by_rank_s == pytest.approx({0: 0.035, 1: 0.03})
    assert path.by_stage_s == pytest.approx({0: 0.03, 1: 0.03})


@settings(max_examples=25)
@given(pipelines())
def test_origins_sum_to_the_idle_time_and_spans_to_the_step(pipeline: Pipeline):
    found = diagnose(pipeline.trace())
    assert found.root_cause is not None
    assert all(0 <= origin.own_fraction <= origin.fraction for origin in origins(found))
    total = sum(origin.fraction for origin in origins(found))
    assert total == pytest.approx(found.idle_fraction, abs=1e-9)
    path = found.root_cause.critical_path
    edges = [0.0, *(span.end_s for span in path.spans)]
    assert [span.start_s for span in path.spans] == pytest.approx(edges[:-1], abs=1e-8)
    assert edges[-1] == pytest.approx(path.length_s, abs=1e-8)


@settings(max_examples=15)
@given(pipelines(names=("GPipe", "1F1B", "Interleaved1F1B"), most_replicas=1))
def test_work_is_no_origin_where_all_is_equal(pipeline: Pipeline):
    pipeline.duration = equal_stages(pipeline, 2 * MS)
    found = diagnose(pipeline.trace())
    work = sum(origin.fraction for origin in origins(found) if origin.what == "work")
    assert work == pytest.approx(0, abs=1e-9)
