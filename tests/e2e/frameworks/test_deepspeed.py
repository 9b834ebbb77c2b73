"""DeepSpeed's PipelineEngine, oldest to newest: every op and message has its stage, chunk and microbatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Flag, Kind, Payload
from tests.e2e.frameworks.conftest import (
    SLEEP_MS,
    Run,
    assert_both_ends_agree,
    expected_ops,
    ops_of,
    run_twice,
    training,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]  # the first test waits for all jobs

RANKS, MICROBATCHES, STEPS = 4, 8, 2
PLAIN = "--pp 4"
TIED = "--pp 2 --tied"
ZERO = "--pp 2 --zero 1"
EVALUATING = "--pp 4 --evaluate"
DUAL = "--pp 4 --dualpipev"
VARYING = "--pp 4 --varying"
SLOW = f"--pp 4 --steps 5 --slow 3:{SLEEP_MS}"  # of 8 layers, two a stage: block 3 is layer 4, that of stage 2
STAGES = {PLAIN: 4, TIED: 2, ZERO: 2, EVALUATING: 4, DUAL: 8, VARYING: 4}
VERSIONS = {"0.14.5": [PLAIN, TIED, ZERO, EVALUATING, SLOW], "0.19.8": [*STAGES, SLOW]}


@pytest.fixture(scope="module", params=VERSIONS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder: Path = tmp_path_factory.mktemp("deepspeed")
    jobs = VERSIONS[request.param]
    return run_twice(folder, RANKS, "deepspeed_engine.py", jobs, version=f"deepspeed-{request.param}")


@pytest.mark.parametrize("job", STAGES)
def test_each_step_holds_exactly_the_ops_of_the_schedule(run: Run, job: str) -> None:
    run.skip_unless_it_ran(job)
    for rank, spans in run.part(job).by_rank().items():
        result = run.result(job, rank)
        expected = expected_ops(result["stages"], STAGES[job], MICROBATCHES)
        for step in range(result["first_step"], result["first_step"] + STEPS):
            found = ops_of(training(spans[spans["step"] == step]))
            assert {op: count for op, count in found.items() if is_payload(op)} == expected


def is_payload(op: tuple[str, int, int, int, int]) -> bool:
    """Not the exchange of shapes, nor the message by which an engine tries its connections when it is made."""
    kind, payload, *_ = op
    return kind not in {"SEND", "RECV"} or payload != Payload.UNKNOWN


@pytest.mark.parametrize("job", [PLAIN, VARYING])
def test_shapes_are_messages_without_a_payload(run: Run, job: str) -> None:
    run.skip_unless_it_ran(job)
    first = run.result(job, 0)["first_step"]
    for rank, spans in run.part(job).by_rank().items():
        for step in (first, first + 1):
            shapes = spans[(spans["step"] == step) & (spans["op"] == Payload.UNKNOWN) & (spans["microbatch"] >= 0)]
            exchanges = MICROBATCHES if job == VARYING else int(step == first)
            for kind, none in ((Kind.SEND, RANKS - 1), (Kind.RECV, 0)):
                found = shapes[shapes["kind"] == kind]
                # one or three messages each, by version
                assert set(found["microbatch"].tolist()) == (set() if rank == none else set(range(exchanges)))


def test_an_evaluation_has_forwards_only_and_says_that_it_is_one(run: Run) -> None:
    for rank, spans in run.trace.by_rank().items():
        result = run.result(EVALUATING, rank)
        after_training = spans["step"] == result["first_step"] + STEPS
        evaluation = spans[after_training & (spans["flags"] & int(Flag.EVALUATION) != 0)]
        expected = expected_ops(result["stages"], STAGES[EVALUATING], MICROBATCHES, evaluate=True)
        assert {op: count for op, count in ops_of(evaluation).items() if is_payload(op)} == expected


def test_both_ends_of_each_message_carry_the_same_microbatch(run: Run) -> None:
    assert_both_ends_agree(run.trace.spans)


def test_the_backward_of_a_microbatch_follows_its_forward(run: Run) -> None:
    for spans in run.trace.by_rank().values():
        ended = {}
        for span in spans[np.isin(spans["kind"], (Kind.FORWARD, Kind.BACKWARD))]:
            key = (int(span["step"]), int(span["stage"]), int(span["microbatch"]))
            if span["kind"] == Kind.FORWARD:
                ended[key] = span["end_ns"]
            else:
                assert span["start_ns"] >= ended[key]


def test_losses_and_weights_are_bit_identical_with_and_without_the_recorder(run: Run) -> None:
    assert run.recorded == run.plain
    assert all(line["losses"] for line in run.plain[RANKS - 1])


def test_the_facts_say_framework_and_grid(run: Run) -> None:
    facts = run.trace.ranks[1].facts
    assert facts["framework"] == "deepspeed"
    assert facts["framework_version"] in VERSIONS
    assert (facts["schedule"], facts["pp"], facts["vpp"], facts["tp"], facts["dp"]) == ("1F1B", 4, 1, 1, 1)
    assert facts["coordinates"] == {"pp": 1, "tp": 0, "dp": 0}
    assert (facts["stages"], facts["stage_ranks"]) == ([1], [0, 1, 2, 3])
    assert all(not rank.faults for rank in run.trace.ranks.values())


def test_a_stage_that_sleeps_is_named(run: Run) -> None:
    found = diagnose(run.part(SLOW))
    assert (found.job.schedule_name, found.job.schedule_match) == ("1F1B", 1.0)
    assert (found.verdict.cause, found.verdict.stage, found.verdict.confidence) == ("imbalance", 2, "measured")
