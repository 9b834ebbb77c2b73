"""Predictions, against the factory as the world that makes the change, and against what no change can do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import analyse
from ppdiag.analyzers.planning import orders, simulate
from ppdiag.analyzers.program import COMPUTE, POST
from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.what_if import Change, LinkFactor, Place, Run, layout, plans, predict, run_of
from ppdiag.errors import BadShape
from ppdiag.model import Kind
from tests.analyzers.factory import MS, Pipeline
from tests.analyzers.strategies import pipelines

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppdiag.analyzers.schedules import Op

DATA = Path(__file__).parents[2] / "data"
RANKS = 4


def run_of_pipeline(pipeline: Pipeline) -> Run:
    return run_of(analyse(pipeline.trace()))


def pipeline_of(
    name: str = "1F1B", *, microbatches: int = 8, chunks: int = 1, duration: Callable[[Op, int, int], int] | None = None
) -> Pipeline:
    """Four ranks, F 12 ms and B 24 ms a rank, evenly over its chunks, and no transfers."""
    known = orders.SCHEDULES[name].known_as if name in orders.SCHEDULES else name
    assert known is not None
    order = schedules.order(known, ranks=RANKS, chunks=chunks, microbatches=microbatches)
    split = {op[1:] for ops in order for op in ops if op.kind is Kind.WEIGHT}

    def evenly(op: Op, _rank: int, _step: int) -> int:
        whole = {Kind.FORWARD: 12, Kind.BACKWARD: 24, Kind.WEIGHT: 12}[op.kind] * MS // chunks
        return whole // 2 if op.kind is Kind.BACKWARD and op[1:] in split else whole

    return Pipeline(order, schedules.stage_ranks(known, RANKS, chunks), duration=duration or evenly, steps=5)


def step_ms(pipeline: Pipeline) -> float:
    """What the changed job then really takes."""
    return float(np.median(run_of_pipeline(pipeline).graph.duration_K)) * 1e3


def test_more_microbatches_add_the_time_of_their_ops() -> None:
    # 1F1B takes (M + P - 1) (F + B): 11 x 36 ms with 8 microbatches, 19 x 36 ms with 16; the optimizer 1 ms
    found = predict(run_of_pipeline(pipeline_of()), Change(microbatches=16))
    assert found.step_s == pytest.approx(0.685)
    assert found.work_ratio == 2.0
    assert found.gain == pytest.approx(1 - 685 / 2 / 397)


def test_smaller_microbatches_of_the_same_batch_shrink_the_bubble() -> None:
    # F + B of 18 ms, 16 microbatches: 19 x 18 ms
    found = predict(run_of_pipeline(pipeline_of()), Change(microbatches=16, keep_batch=True))
    assert found.step_s == pytest.approx(0.343)
    assert found.gain == pytest.approx(1 - 343 / 397)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2)],
)
def test_another_schedule_takes_what_the_job_with_that_schedule_takes(name: str, chunks: int) -> None:
    found = predict(run_of_pipeline(pipeline_of()), Change(schedule=name, chunks=chunks))
    assert found.step_s * 1e3 == pytest.approx(step_ms(pipeline_of(name, chunks=chunks)), rel=0.005)


@pytest.mark.parametrize(("chunks", "microbatches"), [(1, 4), (1, 32), (2, 8), (3, 12), (4, 32)])
def test_the_predicted_bubble_is_that_of_the_published_formula(chunks: int, microbatches: int) -> None:
    name = "1f1b" if chunks == 1 else "interleaved"
    run = run_of_pipeline(pipeline_of())
    found = predict(run, Change(schedule=name, chunks=chunks, microbatches=microbatches))
    busy_s, pipeline_s = microbatches * 0.036, found.step_s - 0.001
    assert 1 - busy_s / pipeline_s == pytest.approx((RANKS - 1) / (chunks * microbatches + RANKS - 1))


def test_head_and_loss_stay_on_the_last_stage() -> None:
    # the last stage's second half is head and loss: interleaved, stage 6 has half a stage of layers, and stage 7 half a
    # stage and the head, 18 + 36 ms a microbatch
    found = predict(run_of_pipeline(pipeline_of(duration=slow(3, 4))), Change(schedule="interleaved", chunks=2))

    def heavy(op: Op, _rank: int, _step: int) -> int:
        return (6 if op.kind is Kind.FORWARD else 12) * MS * (3 if op.stage == 7 else 1)

    assert found.step_s * 1e3 == pytest.approx(step_ms(pipeline_of("interleaved", chunks=2, duration=heavy)), rel=0.005)


def test_of_a_forward_and_a_backward_that_overlap_nothing_is_sent_before_both_are_done() -> None:
    run = run_of_pipeline(pipeline_of())
    graph = layout.lay_out(run, run.graph, plans.plan_of(run, Change(schedule="dualpipe-v")))
    here = np.flatnonzero((graph.rank_N == 0) & np.isin(graph.what_N, (COMPUTE, POST)) & (graph.kind_N != Kind.RECV))
    ops = [(Kind(graph.kind_N[e]), int(graph.stage_N[e]), int(graph.microbatch_N[e])) for e in here.tolist()]
    at = ops.index((Kind.FORWARD, 0, 7))
    # rank 0's main phase begins with F7 of stage 0 and B0 of stage 7, whose outputs both go to rank 1
    assert ops[at : at + 4] == [(Kind.FORWARD, 0, 7), (Kind.BACKWARD, 7, 3), (Kind.SEND, 0, 7), (Kind.SEND, 7, 3)]


def test_a_split_backward_is_put_together_again() -> None:
    found = predict(run_of_pipeline(pipeline_of("zb-v", chunks=2)), Change(schedule="1f1b"))
    assert found.step_s == pytest.approx(0.397)


def slow(stage: int, factor: int) -> Callable[[Op, int, int], int]:
    """F 12 ms, B 24 ms; one stage takes ``factor`` halves of it."""
    return lambda op, _rank, _step: (
        (12 if op.kind is Kind.FORWARD else 24) * MS * (factor if op.stage == stage else 2) // 2
    )


def test_a_repaired_stage_takes_as_long_as_the_others() -> None:
    found = predict(run_of_pipeline(pipeline_of(duration=slow(2, 3))), Change(repair=(Place("stage", 2),)))
    assert found.step_s == pytest.approx(0.397)


def test_layers_moved_off_a_heavy_stage_take_their_time_along() -> None:
    # stage 1 has 12 layers of 3 ms, the others 8 and 12 of 3 ms: now 9 each
    def of_layers(op: Op, _rank: int, _step: int) -> int:
        return {0: 8, 1: 12, 2: 8, 3: 8}[op.stage] * (1 if op.kind is Kind.FORWARD else 2) * MS

    change = Change(layers=(9, 9, 9, 9), layers_now=(8, 12, 8, 8))
    found = predict(run_of_pipeline(pipeline_of(duration=of_layers)), change)
    assert found.step_s == pytest.approx(11 * 0.027 + 0.001)


def test_recomputing_adds_a_forward_to_each_backward() -> None:
    found = predict(run_of_pipeline(pipeline_of()), Change(checkpoint=True))
    assert found.step_s == pytest.approx(11 * 0.048 + 0.001)


def test_a_faster_link_takes_its_share_off_what_was_waited_for_it() -> None:
    slow_link = replace(pipeline_of("GPipe"), transfer=lambda src, dst: 40 * MS if {src, dst} == {1, 2} else 0)
    found = predict(run_of_pipeline(slow_link), Change(links=(LinkFactor((1, 2), 4.0),)))
    faster = replace(slow_link, transfer=lambda src, dst: 10 * MS if {src, dst} == {1, 2} else 0)
    assert found.step_s * 1e3 == pytest.approx(step_ms(faster), rel=1e-6)


def test_changes_made_together_are_predicted_together() -> None:
    found = predict(
        run_of_pipeline(pipeline_of(duration=slow(2, 3))),
        Change(schedule="interleaved", chunks=2, microbatches=16, repair=(Place("stage", 2),)),
    )
    assert found.step_s * 1e3 == pytest.approx(
        step_ms(pipeline_of("interleaved", chunks=2, microbatches=16)), rel=0.005
    )


def test_overlapped_transfers_are_waited_for_by_receivers_alone() -> None:
    blocking = replace(pipeline_of(), transfer=lambda _src, _dst: 6 * MS, rendezvous=True)
    found = predict(run_of_pipeline(blocking), Change(overlap=True))
    # the planner's replay knows no other messages: they travel from the end of one op, and hold up the next
    work = simulate.program("1f1b", ranks=RANKS, chunks=1, microbatches=8)
    times = simulate.uniform(work, forward=12, backward=24, transfer=6)
    assert found.step_s * 1e3 == pytest.approx(times.makespan_W[0] + 1)
    assert found.step_s * 1e3 < step_ms(blocking)


def test_activations_in_flight_are_those_of_the_schedule() -> None:
    run = run_of_pipeline(pipeline_of())
    assert predict(run, Change()).memory.activations_R == (4.0, 3.0, 2.0, 1.0)
    assert predict(run, Change(schedule="gpipe")).memory.activations_R == (8.0, 8.0, 8.0, 8.0)
    halved = predict(run, Change(schedule="gpipe", microbatches=16, keep_batch=True))
    assert halved.memory.activations_R == (8.0, 8.0, 8.0, 8.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change(schedule="dualpipe-v", microbatches=4), "needs a microbatch for each of its 8 stages, not 4"),
        (Change(layers=(1, 2, 3)), "the run has 4 stages"),
        (Change(repair=(Place("stage", 9),)), "stages 0 to 3, not 9"),
        (Change(repair=(Place("rank", 9),)), "ranks 0 to 3, not 9"),
        (Change(links=(LinkFactor((0, 2), 2.0),)), "no message goes between stages 0 and 2"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(change: Change, words: str) -> None:
    with pytest.raises(BadShape, match=words):
        predict(run_of_pipeline(pipeline_of()), change)


def test_a_pipeline_without_the_record_of_a_stage_is_not_laid_out_anew() -> None:
    trace = pipeline_of().trace()
    run = run_of(analyse(trace.where(trace.spans["rank"] != 1)))
    assert predict(run, Change(checkpoint=True)).gain < 0
    with pytest.raises(BadShape, match="has no record of stage 1"):
        predict(run, Change(microbatches=16))


@given(pipelines())
def test_no_change_predicts_the_measured_step(pipeline: Pipeline) -> None:
    run = run_of_pipeline(pipeline)
    assert predict(run, Change()).step_K == pytest.approx(run.graph.duration_K, rel=1e-9)


@given(pipelines())
def test_ops_laid_out_in_their_own_order_take_what_they_took(pipeline: Pipeline) -> None:
    run = run_of_pipeline(pipeline)
    found = predict(run, Change(microbatches=run.shape.microbatches))
    assert found.error_fraction < 1e-9
    assert found.step_K == pytest.approx(run.graph.duration_K, rel=1e-9)


@given(pipelines(), st.integers(0, 3))
def test_a_repair_never_slows(pipeline: Pipeline, number: int) -> None:
    run = run_of_pipeline(pipeline)
    rank = number % len(run.graph.ranks_R)
    stage = number % run.stages
    for place in (Place("rank", rank), Place("stage", stage)):
        assert predict(run, Change(repair=(place,))).gain >= -1e-9


@given(pipelines(), st.sampled_from((1.0, 1.5, 10.0)))
def test_a_faster_network_never_slows(pipeline: Pipeline, faster: float) -> None:
    assert predict(run_of_pipeline(pipeline), Change(links=(LinkFactor(None, faster),))).gain >= -1e-9


def test_of_many_replicas_the_slowest_is_laid_out() -> None:
    def slower(op: Op, rank: int, _step: int) -> int:
        return (12 if op.kind is Kind.FORWARD else 24) * MS * (3 if rank >= 2 * RANKS else 2) // 2

    pipeline = replace(pipeline_of(duration=slower), replicas=3, tail=0)
    run = run_of_pipeline(pipeline)
    plan = plans.measured_plan(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "MOST_OPS", 100)  # one replica has 64
        assert layout.slowest_replicas(run, (plan,)) == [2]
        assert predict(run, Change(microbatches=16)).step_s == pytest.approx(19 * 0.054 + 0.001)


@pytest.mark.parametrize("even", ["microbatch", "stage"])
def test_what_is_made_equal_takes_its_mean(even: str) -> None:
    # every second microbatch, or every second stage, takes 1.5 times as long: 45 ms in the mean
    def uneven(op: Op, _rank: int, _step: int) -> int:
        odd = (op.microbatch if even == "microbatch" else op.stage) % 2
        return (6 if op.kind is Kind.FORWARD else 12) * MS * (2 + odd)

    found = predict(run_of_pipeline(pipeline_of(duration=uneven)), Change(even=even))
    assert found.step_s == pytest.approx(11 * 0.045 + 0.001)


@pytest.mark.parametrize("name", ["megatronapp/interleaved_p4_v4_m8.json", "straggler_analysis/trace-ST.parquet"])
def test_the_ops_of_a_real_megatron_run_laid_out_in_its_own_order_take_what_they_took(name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    run = run_of(analyse(read_trace([DATA / name])))
    found = predict(run, Change(microbatches=run.shape.microbatches))
    assert found.error_fraction < 0.005
