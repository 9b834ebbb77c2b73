"""Every schedule that torch ships: the record holds exactly the ops of its own plan, and changes no number."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ppdiag.model import Flag, Kind, Payload
from tests.e2e.conftest import read_results, read_trace, torch_runs, torchrun, work_only

if TYPE_CHECKING:
    from pathlib import Path

    from ppdiag.trace import Trace

RANKS, MICROBATCHES, STEPS = 4, 8, 2
SINGLE = ("GPipe", "1F1B", "GPipe:tracer", "1F1B:tracer")
MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
EVALUATION = ("1F1B:eval", "Interleaved1F1B:eval")
JOBS = SINGLE + MULTI + EVALUATION

Counts = dict[tuple[str, int], int]


def runs(job: str) -> bool:
    """Whether the torch at hand can."""
    name, _, option = job.partition(":")
    return torch_runs(name, evaluate=option == "eval")


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Trace, list[list[dict[str, Any]]], list[list[dict[str, Any]]]]:
    """(trace, results with the recorder, results without it) of all jobs, each set in one torchrun."""
    folder: Path = tmp_path_factory.mktemp("schedules")
    jobs = [job for job in JOBS if runs(job)]
    arguments = ["--steps", str(STEPS), "--microbatches", str(MICROBATCHES), "--jobs", *jobs, "--results"]
    torchrun(RANKS, "torch_schedule.py", *arguments, str(folder / "on"), run_dir=folder / "run")
    torchrun(RANKS, "torch_schedule.py", *arguments, str(folder / "off"))
    return read_trace(folder / "run"), read_results(folder / "on", RANKS), read_results(folder / "off", RANKS)


def steps_of(run: Any, job: str, rank: int) -> list[np.ndarray]:
    """The spans of each step of one job on one rank, without initialisation."""
    trace, results, _ = run
    first = next(result["optimizer_steps"] for result in results[rank] if result["job"] == job)
    spans = work_only(trace.by_rank()[rank])
    if job.endswith(":eval"):  # no optimizer: its steps are told apart by their SCHEDULE spans
        # Those of all evaluations follow the last training step, in the order of JOBS.
        brackets = spans[(spans["kind"] == Kind.SCHEDULE) & (spans["flags"] & int(Flag.EVALUATION) != 0)]
        begin = EVALUATION.index(job) * STEPS
        brackets = brackets[begin : begin + STEPS]
        return [spans[(spans["post_ns"] >= b["start_ns"]) & (spans["end_ns"] <= b["end_ns"])] for b in brackets]
    return [spans[spans["step"] == step] for step in range(first, first + STEPS)]


def counts_of(spans: np.ndarray) -> Counts:
    wanted = spans[np.isin(spans["kind"], [int(kind) for kind in Kind if kind <= Kind.RECV])]
    return dict(Counter((Kind(span["kind"]).name, int(span["op"])) for span in wanted))


def expected_of_stages(stages: list[int], *, evaluate: bool, splits: bool) -> Counts:
    """Each microbatch goes forward and backward through each stage once, with a message over each border of ranks."""
    every = MICROBATCHES * len(stages)
    before = MICROBATCHES * sum(stage > 0 for stage in stages)
    after = MICROBATCHES * sum(stage < RANKS * len(stages) - 1 for stage in stages)
    expected = {
        ("FORWARD", 0): every,
        ("RECV", int(Payload.ACTIVATION)): before,
        ("SEND", int(Payload.ACTIVATION)): after,
    }
    if not evaluate:
        expected |= {
            ("BACKWARD", 0): every,
            ("WEIGHT", 0): every if splits else 0,
            ("RECV", int(Payload.GRADIENT)): after,
            ("SEND", int(Payload.GRADIENT)): before,
        }
    return {key: count for key, count in expected.items() if count}


def expected_from_plan(plan: dict[str, int], *, evaluate: bool) -> Counts:
    """The counts in torch's own plan of the schedule (``pipeline_order_with_comms``)."""
    backward = 0 if evaluate else plan.get("FULL_BACKWARD", 0) + plan.get("BACKWARD_INPUT", 0)
    expected = {
        ("FORWARD", 0): plan["FORWARD"],
        ("BACKWARD", 0): backward,
        ("WEIGHT", 0): 0 if evaluate else plan.get("BACKWARD_WEIGHT", 0),
        ("SEND", int(Payload.ACTIVATION)): plan.get("SEND_F", 0),
        ("RECV", int(Payload.ACTIVATION)): plan.get("RECV_F", 0),
        ("SEND", int(Payload.GRADIENT)): 0 if evaluate else plan.get("SEND_B", 0),
        ("RECV", int(Payload.GRADIENT)): 0 if evaluate else plan.get("RECV_B", 0),
    }
    return {key: count for key, count in expected.items() if count}


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("job", JOBS)
def test_each_step_holds_exactly_the_ops_of_the_schedule(run: Any, job: str, rank: int) -> None:
    if not runs(job):
        pytest.skip("this torch cannot, on gloo")
    evaluate = job.endswith(":eval")
    result = next(result for result in run[1][rank] if result["job"] == job)
    if result["plan"]:
        expected = expected_from_plan(result["plan"], evaluate=evaluate)
    else:  # one stage a rank, or torch 2.8
        expected = expected_of_stages(result["stages"], evaluate=evaluate, splits="ZeroBubble" in job)
    assert [counts_of(spans) for spans in steps_of(run, job, rank)] == [expected] * STEPS


@pytest.mark.slow
def test_every_computation_and_message_has_its_stage_chunk_and_microbatch(run: Any) -> None:
    trace, results, _ = run
    for rank, spans in trace.by_rank().items():
        named = work_only(spans)
        named = named[np.isin(named["kind"], [int(kind) for kind in Kind if kind <= Kind.RECV])]
        assert (named["microbatch"] >= 0).all()
        assert (named["microbatch"] < MICROBATCHES).all()
        assert (named["flags"] & int(Flag.INFERRED | Flag.FAILED | Flag.NEVER_WAITED) == 0).all()
        for result in results[rank]:
            for step in steps_of(run, result["job"], rank):
                ops = step[np.isin(step["kind"], [int(kind) for kind in Kind if kind <= Kind.RECV])]
                pairs = {(int(op["stage"]), int(op["chunk"])) for op in ops}
                assert pairs == {(stage, chunk) for chunk, stage in enumerate(result["stages"])}


@pytest.mark.slow
def test_each_message_is_recorded_at_both_ends_with_equal_size_and_label(run: Any) -> None:
    trace, _, _ = run
    spans = trace.spans
    sends = spans[spans["kind"] == Kind.SEND]
    receives = spans[spans["kind"] == Kind.RECV]
    keys = ("group", "tag", "seq", "size_bytes", "microbatch", "op", "step")

    def ends(side: np.ndarray, src: str, dst: str) -> set[tuple[int, ...]]:
        return {tuple(int(span[name]) for name in (src, dst, *keys)) for span in side}

    assert len(sends) == len(receives) == len(ends(sends, "rank", "peer"))
    assert ends(sends, "rank", "peer") == ends(receives, "peer", "rank")
    assert (spans["end_ns"] >= spans["start_ns"]).all()
    assert (spans["start_ns"] >= spans["post_ns"]).all()


@pytest.mark.slow
def test_no_message_is_waited_for_inside_a_computation(run: Any) -> None:
    for spans in run[0].by_rank().values():
        compute = spans[np.isin(spans["kind"], [Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT])]
        waits = spans[np.isin(spans["kind"], [Kind.SEND, Kind.RECV])]
        for wait in waits:
            inside = (compute["start_ns"] < wait["end_ns"]) & (wait["start_ns"] < compute["end_ns"])
            assert not inside.any()


@pytest.mark.slow
def test_initialisation_traffic_is_marked_and_bracketed(run: Any) -> None:
    trace, results, _ = run
    for spans in trace.by_rank().values():
        marked = spans[spans["flags"] & int(Flag.INIT) != 0]
        brackets = marked[marked["kind"] == Kind.INIT]
        assert len(brackets) >= len(results[0])
        for span in marked[marked["kind"] != Kind.INIT]:
            assert ((brackets["start_ns"] <= span["post_ns"]) & (span["end_ns"] <= brackets["end_ns"])).any()


@pytest.mark.slow
def test_losses_and_gradients_are_bit_identical_with_and_without_the_recorder(run: Any) -> None:
    _, recorded, plain = run
    assert recorded == plain
    assert all(result["losses"] or result["gradients"] for result in plain[RANKS - 1])


@pytest.mark.slow
def test_the_facts_say_framework_and_shape(run: Any) -> None:
    trace, _, _ = run
    facts = trace.ranks[1].facts
    assert facts["framework"] == "torch.distributed.pipelining"
    # the last one that ran: without evaluation (torch 2.8) and a V, that is the last of MULTI
    assert facts["schedule"] == ("Interleaved1F1B" if runs(JOBS[-1]) else "InterleavedZeroBubble")
    assert (facts["pp"], facts["vpp"], facts["microbatches"]) == (RANKS, 2, MICROBATCHES)
    assert facts["stages"] == [1, 5]
    assert facts["stage_ranks"] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert {trace.ranks[rank].status for rank in range(RANKS)} == {"finished"}
