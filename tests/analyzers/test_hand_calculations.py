"""Small runs whose every number is calculated by hand. All times in milliseconds.

Unless a test says otherwise: two stages, two microbatches, GPipe, F = 10, B = 20, optimizer = 1, transfers free.
Rank 0: F0 0-10, F1 10-20, B0 50-70, B1 70-90, optimizer 90-91. Rank 1: F0 10-20, F1 20-30, B0 30-50, B1 50-70,
optimizer 70-71, then it waits for the next step's F0 until 91 + 10. So a step takes 91, each rank computes for
2 x 30 + 1 = 61, and the bubble is (P - 1) (F + B) = 30.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Flag, Kind
from ppdiag.trace import sorted_spans
from tests.analyzers.factory import (
    MS,
    Compute,
    Pipeline,
    Post,
    Stall,
    Wait,
    simulate,
    spans_of,
    ten_and_twenty,
    trace_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ppdiag.analyzers.schedules import Op
    from ppdiag.diagnosis import Diagnosis, Where, Why
    from ppdiag.trace import Trace
    from tests.analyzers.factory import Action


def pipeline(name: str = "GPipe", ranks: int = 2, microbatches: int = 2, chunks: int = 1, **settings) -> Pipeline:
    orders = schedules.order(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    return Pipeline(orders, schedules.stage_ranks(name, ranks, chunks), steps=5, **settings)


def ms(part: Why | Where, step_ms: float) -> dict[str, float]:
    """The parts that are not zero, in milliseconds of a step."""
    values = {field.name: getattr(part, field.name) * step_ms for field in fields(part)}
    return {name: round(value, 6) for name, value in values.items() if abs(value) > 1e-6}


def check(
    trace: Trace, *, step: float, busy: list[float], why: list[dict[str, float]], where: list[dict[str, float]]
) -> Diagnosis:
    """All numbers of both partitions: as given for each rank, and their means for stages and job."""
    found = diagnose(trace)
    assert found.steps.median_s * 1e3 == pytest.approx(step)
    assert [row.busy_fraction * step for row in found.ranks] == pytest.approx(busy)
    assert [ms(row.why, step) for row in found.ranks] == [pytest.approx(parts) for parts in why]
    assert [ms(row.where, step) for row in found.ranks] == [pytest.approx(parts) for parts in where]
    assert ms(found.why, step) == pytest.approx(mean(why))
    assert ms(found.where, step) == pytest.approx(mean(where))
    at = {row.rank: i for i, row in enumerate(found.ranks)}
    for stage in found.stages:
        holders = [at[rank] for rank in stage.ranks]
        assert ms(stage.why, step) == pytest.approx(mean([why[i] for i in holders]))
        assert ms(stage.where, step) == pytest.approx(mean([where[i] for i in holders]))
        assert stage.busy_fraction * step == pytest.approx(np.mean([busy[i] for i in holders]))
    assert found.replay_error_fraction == pytest.approx(0.0, abs=1e-9)
    return found


def mean(parts: list[dict[str, float]]) -> dict[str, float]:
    names = {name for part in parts for name in part}
    return {name: sum(part.get(name, 0.0) for part in parts) / len(parts) for name in names}


def imbalance_ms(found: Diagnosis, step: float) -> tuple[float, float, float]:
    split = found.imbalance
    return (split.stage * step, split.microbatch * step, split.rank * step)


def phases_ms(found: Diagnosis) -> list[float]:
    return [found.phases.pipeline_s * 1e3, found.phases.tail_s * 1e3, found.phases.between_s * 1e3]


def slower(factor: int, *, stage: int | None = None, microbatch: int | None = None, rank: int | None = None):
    """Durations with some of the ops ``factor`` times as long."""

    def duration(op: Op, of_rank: int, step: int) -> int:
        hit = all(
            wanted in (None, value)
            for wanted, value in ((stage, op.stage), (microbatch, op.microbatch), (rank, of_rank))
        )
        return ten_and_twenty(op, of_rank, step) * (factor if hit else 1)

    return duration


def on_rank(wanted: int, milliseconds: int):
    return lambda rank, _step: milliseconds * MS if rank == wanted else 0


def test_gpipe_of_equal_stages_has_its_bubble_only() -> None:
    found = check(
        pipeline().trace(),
        step=91,
        busy=[61, 61],
        why=[{"bubble": 30}, {"bubble": 30}],
        where=[{"late_sender": 30}, {"late_sender": 30}],
    )
    assert phases_ms(found) == pytest.approx([90, 1, 0])
    assert (found.steps.count, found.steps.dropped) == (3, 2)  # the first warms up, the last has no end
    assert [(row.forward_s, row.backward_s) for row in found.stages] == [(0.010, 0.020)] * 2
    assert (found.job.schedule_name, found.job.schedule_match, found.job.microbatches) == ("GPipe", 1.0, 2)


def test_1f1b_of_four_ranks() -> None:
    # M = 4: pipeline (M + P - 1) (F + B) = 7 x 30 = 210, busy 4 x 30 + 1, bubble (P - 1) (F + B) = 90
    check(
        pipeline("1F1B", ranks=4, microbatches=4).trace(),
        step=211,
        busy=[121] * 4,
        why=[{"bubble": 90}] * 4,
        where=[{"late_sender": 90}] * 4,
    )


def test_interleaved_halves_the_bubble_relative_to_the_work() -> None:
    # P = 2, V = 2, M = 2: busy V M (F + B) + 1 = 121, bubble (P - 1) (F + B) = 30 of a step of 151
    found = check(
        pipeline("Interleaved1F1B", chunks=2).trace(),
        step=151,
        busy=[121, 121],
        why=[{"bubble": 30}] * 2,
        where=[{"late_sender": 30}] * 2,
    )
    assert [row.stage for row in found.ranks] == [(0, 2), (1, 3)]
    assert (found.job.pp, found.job.vpp) == (2, 2)


def test_one_slow_stage() -> None:
    # Stage 1 takes F = 20, B = 40. Rank 1: F0 10-30, F1 30-50, B0 50-90, B1 90-130. Rank 0: B0 90-110, B1 130-150:
    # step 151. Equal work is F = 15, B = 30: (2 + 1) x 45 + 1 = 136. Mean busy (61 + 121) / 2 = 91. Bubble 136 - 91 =
    # 45; imbalance 151 - 136 = 15, of rank 0 15 + (91 - 61) = 45, of rank 1 15 + (91 - 121) = -15: set to 0 and taken
    # off its bubble, 30.
    found = check(
        pipeline(duration=slower(2, stage=1)).trace(),
        step=151,
        busy=[61, 121],
        why=[{"bubble": 45, "imbalance": 45}, {"bubble": 30}],
        where=[{"late_sender": 90}, {"late_sender": 30}],
    )
    assert imbalance_ms(found, 151) == pytest.approx((22.5, 0, 0))
    assert (found.verdict.cause, found.verdict.stage, found.verdict.confidence) == ("imbalance", 1, "measured")
    assert found.verdict.share == pytest.approx(22.5 / 151)


def test_one_slow_microbatch() -> None:
    # Microbatch 1 takes F = 20, B = 40. Rank 0: F0 0-10, F1 10-30; rank 1: F0 10-20, F1 30-50, B0 50-70, B1 70-110;
    # rank 0: B0 70-90, B1 110-150: step 151, busy 91 each. Equal work is 15 and 30: 136. Bubble 45, imbalance 15.
    found = check(
        pipeline(duration=slower(2, microbatch=1)).trace(),
        step=151,
        busy=[91, 91],
        why=[{"bubble": 45, "imbalance": 15}] * 2,
        where=[{"late_sender": 60}] * 2,
    )
    assert imbalance_ms(found, 151) == pytest.approx((0, 15, 0))


def test_one_slow_twin() -> None:
    # Two replicas: ranks 0, 1 and ranks 2, 3; rank 2 takes F = 20, B = 40. Tail: twins meet. Rank 2: F 0-20-40, B0
    # 70-110, B1 110-150; rank 3: F0 20-30, F1 40-50, B0 50-70, B1 70-90. Rank 0 is done at 90 and meets rank 2 at 150;
    # rank 1 is done at 70 and meets rank 3 at 90, is done at 91, and gets its next F0 at 161. Equal work: F (6 x 10 +
    # 2 x 20) / 8 = 12.5, B 25: 3 x 37.5 + 1 = 113.5; mean busy (3 x 61 + 121) / 4 = 76: bubble 37.5; imbalance 37.5, +
    # 15 for those with 61 busy, - 45 for rank 2: -7.5, so 0 and a bubble of 30.
    found = check(
        pipeline(replicas=2, tail=0, duration=slower(2, rank=2)).trace(),
        step=151,
        busy=[61, 61, 121, 61],
        why=[{"bubble": 37.5, "imbalance": 52.5}] * 2 + [{"bubble": 30}, {"bubble": 37.5, "imbalance": 52.5}],
        where=[
            {"late_sender": 30, "collective": 60},
            {"late_sender": 70, "collective": 20},
            {"late_sender": 30},
            {"late_sender": 90},
        ],
    )
    # Twins alone equal: stage 0 takes 15 and 30. Rank 1: F0 15-25, F1 30-40, B0 40-60, B1 60-80; rank 0: B0 60-90, B1
    # 90-120: 121, a gain of 30. Stages alone equal: stage 0 times 12.5 / 15, stage 1 times 12.5 / 10. Rank 2: F to
    # 33 1/3; rank 3: F1 33 1/3-45 5/6, B0 to 70 5/6; rank 2: 2 x 33 1/3 more, + 1: 138.5, a gain of 12.5.
    job = (3 * 52.5) / 4
    assert imbalance_ms(found, 151) == pytest.approx((job * 12.5 / 42.5, 0, job * 30 / 42.5))
    assert found.job.dp == 2 or found.job.tp is None  # twins of data or of tensors: the record does not say


def test_slow_links() -> None:
    # Each transfer takes 5 from when both ends are posted. Rank 1: F0 15-25; posts its receive of F1 at 25: F1 30-40,
    # B0 40-60, B1 60-80. Rank 0: B0 65-85, posts its receive at 85: B1 90-110, 111. Without transfers 91. Rank 0 waits
    # 20-65 (sent at 60) and 85-90 (sent at 80); rank 1 is done at 81, waits until 111 + 15 (sent at + 10), and 25-30
    # (sent at 20).
    found = check(
        pipeline(transfer=lambda _src, _dst: 5 * MS).trace(),
        step=111,
        busy=[61, 61],
        why=[{"bubble": 30, "communication": 20}] * 2,
        where=[{"late_sender": 40, "transfer": 10}] * 2,
    )
    links = [(link.src_stage, link.dst_stage, link.direction, link.bytes, link.transfer_s) for link in found.links]
    assert links == [(0, 1, "forward", 1024, 0.005), (1, 0, "backward", 1024, 0.005)]
    assert found.links[0].bandwidth_bytes_per_s == pytest.approx(1024 / 0.005)


def test_a_host_stall_between_steps() -> None:
    # Rank 0 starts each step 60 late: 151. Rank 1 waits for it.
    found = check(
        pipeline(between=on_rank(0, 60)).trace(),
        step=151,
        busy=[61, 61],
        why=[{"bubble": 30, "host": 60}] * 2,
        where=[{"late_sender": 30, "host": 60}, {"late_sender": 90}],
    )
    assert phases_ms(found) == pytest.approx([90, 1, 60])
    assert (found.verdict.cause, found.verdict.rank) == ("host", 0)


def test_a_host_stall_before_the_optimizer_that_hides_in_the_bubble_costs_nothing() -> None:
    # Rank 1 stalls from 70 to 100, optimizer 100-101: just in time for its next F0 at 101.
    check(
        pipeline(before_optimizer=on_rank(1, 30)).trace(),
        step=91,
        busy=[61, 61],
        why=[{"bubble": 30}] * 2,
        where=[{"late_sender": 30}, {"host": 30}],
    )


def test_a_host_stall_before_the_optimizer_that_reaches_the_next_step() -> None:
    # Rank 1 is late for the next step's F0, so that it never waits: 60 + 100 + 1 = 161 a step. Without the stall 91:
    # host 70. Rank 0 computes for 61 and waits for gradients for the other 100.
    check(
        pipeline(before_optimizer=on_rank(1, 100)).trace(),
        step=161,
        busy=[61, 61],
        why=[{"bubble": 30, "host": 70}] * 2,
        where=[{"late_sender": 100}, {"host": 100}],
    )


def test_a_tail_collective_with_a_late_member() -> None:
    # Rank 1 is done at 70, stalls until 100 and posts the all-reduce, which takes 3: both go on at 103, step 104. Rank
    # 0 waits from 90: 13; rank 1 3. Without the stall they meet at 90: 94. Without its cost: 101, and 91 without both.
    check(
        pipeline(before_optimizer=on_rank(1, 30), tail=3 * MS, tail_of_all=True).trace(),
        step=104,
        busy=[61, 61],
        why=[{"bubble": 30, "host": 10, "communication": 3}] * 2,
        where=[{"late_sender": 30, "collective": 13}, {"late_sender": 10, "collective": 3, "host": 30}],
    )


def test_rendezvous_sends_with_a_late_receiver() -> None:
    # 1F1B, M = 3, F of stage 1 takes 30, transfers 2; a send is waited for until it is taken, before the next receive.
    # Rank 0: F0 0-10, send 10-12, F1 12-22, send and receive 22-64, B0 64-84, F2 84-94, send and receive 94-116, B1
    # 116-136, receive 136-168, B2 168-188, optimizer 189. Rank 1: F0 12-42, B0 42-62, both 62-64, F1 64-94, B1 94-114,
    # both 114-116, F2 116-146, B2 146-166, send 166-168, optimizer 169, receive until 189 + 12. Waits of rank 0: send
    # 2; late 22-62, 94-114, 136-166 = 90; transfers 3 x 2. Of rank 1: send 2; late 169-199 = 30; transfers 3 x 2. Free
    # transfers: B2 of rank 1 ends at 160, of rank 0 at 180: 181, so communication 8 (with equal work likewise: 169 and
    # 161). Equal F = 20: 4 x 40 + 1 = 161. Mean busy (91 + 151) / 2 = 121. Bubble 40, imbalance 20, + 30 and - 30.
    check(
        pipeline(
            "1F1B",
            microbatches=3,
            rendezvous=True,
            transfer=lambda _src, _dst: 2 * MS,
            duration=lambda op, rank, step: (
                30 * MS if op.stage == 1 and op.kind is Kind.FORWARD else ten_and_twenty(op, rank, step)
            ),
        ).trace(),
        step=189,
        busy=[91, 151],
        why=[{"bubble": 40, "imbalance": 50, "communication": 8}, {"bubble": 30, "communication": 8}],
        where=[{"late_sender": 90, "transfer": 6, "send_wait": 2}, {"late_sender": 30, "transfer": 6, "send_wait": 2}],
    )


def test_host_time_before_each_op() -> None:
    # 2 before each op, before its receive is posted. Rank 0: F0 2-12, F1 14-24; rank 1: F0 12-22, F1 24-34, B0 36-56,
    # B1 58-78; rank 0: B0 56-76, B1 78-98, optimizer 99. The next step's first op begins at 99 + 2: a step takes 99.
    # Bubble 30, host 8. Counted from rank 0's F0 (at 0 now): rank 0 idles 10-12 (host), 22-24 (host), 24-54 (late),
    # 74-76 (host), 97-99 (host). Rank 1: F0 10-20, 20-22 host, F1 22-32, 32-34 host, B0 34-54, 54-56 host, B1 56-76,
    # optimizer 77, 77-79 host, then late until 99 + 10.
    check(
        pipeline(host_gap=2 * MS).trace(),
        step=99,
        busy=[61, 61],
        why=[{"bubble": 30, "host": 8}] * 2,
        where=[{"late_sender": 30, "host": 8}] * 2,
    )


def test_messages_whose_sends_were_lost_are_unexplained() -> None:
    # Nothing is known of the sends of rank 1: the waits of rank 0 (20-50) are unexplained, and so is the step's time,
    # since rank 0 alone would take 61. Rank 1 is still seen to wait for rank 0.
    trace = pipeline().trace()
    kept = (trace.spans["kind"] != Kind.SEND) | (trace.spans["rank"] != 1)
    found = diagnose(replace(trace, spans=trace.spans[kept]))
    assert [ms(row.why, 91) for row in found.ranks] == [pytest.approx({"unexplained": 30})] * 2
    assert [ms(row.where, 91) for row in found.ranks] == [{"unexplained": 30.0}, {"late_sender": 30.0}]
    assert found.verdict.confidence == "undecided"
    assert found.symptoms == ()


def test_two_threads_that_overlap_are_one_busy_rank() -> None:
    # One rank: F 0-10 on one thread, B 5-25 of another microbatch beside it on a second; then idle to 40, where the
    # next step begins. Busy is the union, 25; host time 15.
    rows = []
    for step in range(4):
        at = step * 40 * MS
        rows += [
            {"kind": Kind.FORWARD, "start_ns": at, "end_ns": at + 10 * MS, "microbatch": 1, "step": step},
            {
                "kind": Kind.BACKWARD,
                "start_ns": at + 5 * MS,
                "end_ns": at + 25 * MS,
                "microbatch": 0,
                "step": step,
                "thread": 1,
            },
            {"kind": Kind.OPTIMIZER, "start_ns": at + 25 * MS, "end_ns": at + 25 * MS, "step": step},
        ]
    trace = trace_of(spans_of([{**row, "stage": 0} for row in rows]))
    found = diagnose(trace)
    assert found.ranks[0].busy_fraction * 40 == pytest.approx(25)
    assert ms(found.where, 40) == pytest.approx({"host": 15})
    assert ms(found.why, 40) == pytest.approx({"host": 15})


def call(rank: int, name: object, *, microbatches: int = 2, evaluation: bool = False) -> Iterator[Action]:
    """What a rank of two does in one call of GPipe; in an evaluation there are forwards only."""
    flags = Flag.EVALUATION if evaluation else 0
    for m in range(microbatches):
        if rank == 1:
            yield Post((name, "F", m), Kind.RECV, peer=0, stage=1, microbatch=m)
            yield Wait((name, "F", m))
        yield Compute(Kind.FORWARD, 10 * MS, rank, m, flags)
        if rank == 0:
            yield Post((name, "F", m), Kind.SEND, peer=1, stage=0, microbatch=m)
    for m in range(0 if evaluation else microbatches):
        if rank == 0:
            yield Post((name, "B", m), Kind.RECV, peer=1, stage=0, microbatch=m, tag=1)
            yield Wait((name, "B", m))
        yield Compute(Kind.BACKWARD, 20 * MS, rank, m)
        if rank == 1:
            yield Post((name, "B", m), Kind.SEND, peer=0, stage=1, microbatch=m, tag=1)


def job(*, calls: int = 1, optimizer: bool = True, evaluation_after: int | None = None, steps: int = 5) -> Trace:
    programs = {}
    for rank in (0, 1):
        actions: list[Action] = []
        for step in range(steps):
            for number in range(calls):
                actions += call(rank, (step, number))
            if optimizer:
                actions.append(Compute(Kind.OPTIMIZER, 1 * MS))
            if step == evaluation_after:
                actions += call(rank, (step, "evaluation"), microbatches=4, evaluation=True)
        programs[rank] = actions
    return simulate(programs)


def bracketed(trace: Trace, ops: int = 4) -> Trace:
    """With a SCHEDULE span around each call of ``ops`` ops."""
    spans, rows = trace.spans, []
    for rank in (0, 1):
        own = spans[(spans["rank"] == rank) & np.isin(spans["kind"], (Kind.FORWARD, Kind.BACKWARD))]
        received = spans[(spans["rank"] == rank) & (spans["kind"] == Kind.RECV)]
        for first, last in zip(own[::ops], own[ops - 1 :: ops], strict=True):
            begin = (
                first["start_ns"] if rank == 0 else received["post_ns"][received["post_ns"] <= first["start_ns"]].max()
            )
            labels = {"rank": rank, "kind": Kind.SCHEDULE, "step": int(first["step"])}
            rows.append({**labels, "start_ns": int(begin), "end_ns": int(last["end_ns"])})
    return replace(trace, spans=sorted_spans(np.concatenate([spans, spans_of(rows)])))


def test_gradient_accumulation_is_one_step_of_two_calls() -> None:
    # Two calls of 90, then the optimizer: 181. Each call has a bubble of 30.
    found = check(
        bracketed(job(calls=2)),
        step=181,
        busy=[121, 121],
        why=[{"bubble": 60}] * 2,
        where=[{"late_sender": 60}] * 2,
    )
    assert (found.job.microbatches, found.job.schedule_name, found.job.schedule_match) == (2, "GPipe", 1.0)


@pytest.mark.parametrize("named", [True, False])
def test_a_job_without_an_optimizer_steps_where_the_schedule_is_called_or_the_pipeline_drains(*, named: bool) -> None:
    # Without the optimizer the step takes 90: rank 1 is done at 70 and waits until 90 + 10.
    trace = job(optimizer=False)
    check(
        bracketed(trace) if named else trace,
        step=90,
        busy=[60, 60],
        why=[{"bubble": 30}] * 2,
        where=[{"late_sender": 30}] * 2,
    )


def test_an_evaluation_between_steps_is_left_out() -> None:
    # After step 2 an evaluation of four forwards. It falls in step 2, and rank 1 does its last forward when rank 0
    # begins step 3: neither is analysed. Step 0 warms up, step 5 has no end: 1 and 4 are left.
    found = check(
        job(evaluation_after=2, steps=6),
        step=91,
        busy=[61, 61],
        why=[{"bubble": 30}] * 2,
        where=[{"late_sender": 30}] * 2,
    )
    assert found.step_times_s == pytest.approx([0.091, 0.091])
    assert found.job.microbatches == 2


def test_a_job_cut_off_in_mid_step_is_explained_by_its_whole_steps() -> None:
    trace = pipeline().trace()
    spans = trace.spans
    stopped = (spans["rank"] == 1) & (spans["step"] == 3) & (spans["kind"] == Kind.FORWARD)
    kept = spans[spans["end_ns"] <= spans["end_ns"][stopped].min()]
    found = check(
        replace(trace, spans=kept),
        step=91,
        busy=[61, 61],
        why=[{"bubble": 30}] * 2,
        where=[{"late_sender": 30}] * 2,
    )
    assert (found.steps.count, found.steps.dropped) == (2, 2)  # 1 and 2; 0 warms up, 3 is not whole


def test_a_receive_inside_a_forward_is_no_compute() -> None:
    # Hand-written: the forward of stage 1 begins with its receive. Same times as ever.
    trace = job()
    spans = trace.spans.copy()
    forwards = np.flatnonzero((spans["rank"] == 1) & (spans["kind"] == Kind.FORWARD))
    receives = np.flatnonzero((spans["rank"] == 1) & (spans["kind"] == Kind.RECV))
    spans["start_ns"][forwards] = spans["post_ns"][forwards] = spans["start_ns"][receives]
    check(
        replace(trace, spans=sorted_spans(spans)),
        step=91,
        busy=[61, 61],
        why=[{"bubble": 30}] * 2,
        where=[{"late_sender": 30}] * 2,
    )


def test_host_work_in_the_middle_of_a_pipeline_of_three() -> None:
    # Hand-written, forwards only would not train: P = 3, M = 1. F 10 each, rank 1 stalls 5 before its backward
    # although the gradient is there. F 0-30, B of rank 2 30-50, rank 1 stalls 50-55, B 55-75, rank 0 B 75-95,
    # optimizer 96. Busy 31; bubble 2 x 30 = 60; host 5. Rank 1: late 20-50, host 50-55, optimizer 76, late until 96 +
    # 10.
    def program(rank: int) -> Iterator[Action]:
        for step in range(5):
            if rank > 0:
                yield Post((step, "F in"), Kind.RECV, peer=rank - 1, stage=rank, microbatch=0)
                yield Wait((step, "F in"))
            yield Compute(Kind.FORWARD, 10 * MS, rank, 0)
            if rank < 2:
                yield Post((step, "F out"), Kind.SEND, peer=rank + 1, stage=rank, microbatch=0)
                yield Post((step, "B in"), Kind.RECV, peer=rank + 1, stage=rank, microbatch=0, tag=1)
                yield Wait((step, "B in"))
            yield Stall(5 * MS if rank == 1 else 0)
            yield Compute(Kind.BACKWARD, 20 * MS, rank, 0)
            if rank > 0:
                yield Post((step, "B out"), Kind.SEND, peer=rank - 1, stage=rank, microbatch=0, tag=1)
            yield Compute(Kind.OPTIMIZER, 1 * MS)

    check(
        simulate({rank: list(program(rank)) for rank in range(3)}),
        step=96,
        busy=[31] * 3,
        why=[{"bubble": 60, "host": 5}] * 3,
        where=[{"late_sender": 65}, {"late_sender": 60, "host": 5}, {"late_sender": 65}],
    )
