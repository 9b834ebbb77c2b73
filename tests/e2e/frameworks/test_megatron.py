"""Megatron-Core, oldest to newest: every op and message of its schedules has its stage, chunk and microbatch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Collective, Flag, Kind, Payload
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
INTERLEAVED = "--pp 4 --vp 2 --overlap"
BATCHED = "--pp 4 --vp 2"
"""Interleaved, each message waited for at once."""
TWO_GROUPS = "--pp 2 --vp 2 --overlap"
"""With two ranks along the pipeline, messages one way go through the group of all ranks."""
TIED = "--pp 2 --tied"
VARYING = "--pp 4 --varlen --dealloc --evaluate"
COMBINED = "--pp 2 --vp 2 --overlap --combined"
"""The layers of a forward and of a backward in turns, to hide the all-to-all of experts."""
SLOW_STAGE, SLOW_CHUNK = 2, 5
SLOW = f"--pp 4 --steps 5 --slow {SLOW_STAGE}:{SLEEP_MS}"
SLOW_INTERLEAVED = f"--pp 4 --vp 2 --overlap --steps 5 --slow {SLOW_CHUNK}:{SLEEP_MS}"
STAGES = {PLAIN: 4, INTERLEAVED: 8, BATCHED: 8, TWO_GROUPS: 4, TIED: 2, VARYING: 4, COMBINED: 4}
OLDER = [job for job in (*STAGES, SLOW, SLOW_INTERLEAVED) if job != COMBINED]
NEWER = [*STAGES, SLOW, SLOW_INTERLEAVED]
VERSIONS = {"0.8.0": OLDER, "0.12.3": OLDER, "0.16.1": NEWER, "0.19.2": NEWER}


@pytest.fixture(scope="module", params=VERSIONS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder: Path = tmp_path_factory.mktemp("megatron")
    jobs = VERSIONS[request.param]
    return run_twice(folder, RANKS, "megatron_core.py", jobs, version=f"megatron-core-{request.param}")


@pytest.mark.parametrize("job", STAGES)
def test_each_step_holds_exactly_the_ops_of_the_schedule(run: Run, job: str) -> None:
    run.skip_unless_it_ran(job)
    for rank, spans in run.part(job).by_rank().items():
        result = run.result(job, rank)
        expected = expected_ops(result["stages"], STAGES[job], MICROBATCHES)
        for step in range(result["first_step"], result["first_step"] + STEPS):
            found = ops_of(training(spans[spans["step"] == step]))
            labelled = {op: count for op, count in found.items() if op[2] >= 0}
            assert labelled == expected


def test_a_forward_and_a_backward_that_are_combined_have_one_time(run: Run) -> None:
    run.skip_unless_it_ran(COMBINED)
    for rank, spans in run.part(COMBINED).by_rank().items():
        forwards, backwards = (times_of(spans[spans["kind"] == kind]) for kind in (Kind.FORWARD, Kind.BACKWARD))
        # Alone are two forwards for each rank that follows, one group of two, and the one before the first combined.
        warm_up = 2 * (2 - 1 - run.result(COMBINED, rank)["stages"][0]) + 2 + 1
        assert len(forwards & backwards) == STEPS * (2 * MICROBATCHES - warm_up)


def times_of(spans: np.ndarray) -> set[tuple[int, int]]:
    return set(zip(spans["start_ns"].tolist(), spans["end_ns"].tolist(), strict=True))


def test_shapes_that_vary_are_messages_of_their_own_without_a_payload(run: Run) -> None:
    for rank, spans in run.part(VARYING).by_rank().items():
        first = run.result(VARYING, rank)["first_step"]
        shapes = spans[(spans["step"] == first) & (spans["op"] == Payload.UNKNOWN)]
        neighbours = 1 if rank in {0, RANKS - 1} else 2
        for kind in (Kind.SEND, Kind.RECV):
            assert np.count_nonzero(shapes["kind"] == kind) == neighbours * MICROBATCHES


def test_an_evaluation_has_forwards_only_and_says_that_it_is_one(run: Run) -> None:
    for rank, spans in run.trace.by_rank().items():
        after_training = spans["step"] == run.result(VARYING, rank)["first_step"] + STEPS
        evaluation = spans[after_training & (spans["flags"] & int(Flag.EVALUATION) != 0)]
        expected = expected_ops(run.result(VARYING, rank)["stages"], STAGES[VARYING], MICROBATCHES, evaluate=True)
        assert ops_of(evaluation) == expected


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


def test_gradients_of_replicas_and_tied_embeddings_are_reduced_after_the_last_backward(run: Run) -> None:
    for rank, spans in run.part(TIED).by_rank().items():
        first = run.result(TIED, rank)["first_step"]
        step = spans[spans["step"] == first]
        last_backward = step["end_ns"][step["kind"] == Kind.BACKWARD].max()
        reduced = step[(step["kind"] == Kind.COLLECTIVE) & (step["op"] == Collective.ALL_REDUCE)]
        sizes = Counter(len(run.trace.groups[group].ranks) for group in reduced["group"])
        assert sizes == {2: 2}  # one among the replicas, one between the first and the last stage
        assert (reduced["post_ns"] >= last_backward).all()


def test_losses_and_gradients_are_bit_identical_with_and_without_the_recorder(run: Run) -> None:
    assert run.recorded == run.plain
    assert all(line["losses"] for line in run.plain[RANKS - 1])


def test_the_facts_say_framework_and_grid(run: Run) -> None:
    facts = run.trace.ranks[1].facts
    assert facts["framework"] == "megatron-core"
    assert facts["framework_version"].partition("+")[0] in VERSIONS
    assert (facts["schedule"], facts["pp"], facts["vpp"]) == ("Interleaved1F1B", 4, 2)  # the last that ran
    assert (facts["tp"], facts["dp"], facts["microbatches"]) == (1, 1, MICROBATCHES)
    assert facts["coordinates"] == {"pp": 1, "tp": 0, "dp": 0}
    assert (facts["stages"], facts["stage_ranks"]) == ([1, 5], [0, 1, 2, 3, 0, 1, 2, 3])
    assert all(not rank.faults for rank in run.trace.ranks.values())


@pytest.mark.parametrize(
    ("job", "stage", "schedule"),
    [
        (SLOW, SLOW_STAGE, "1F1B"),
        (SLOW_INTERLEAVED, SLOW_CHUNK, "Interleaved1F1B"),
    ],
)
def test_a_stage_that_sleeps_is_named(run: Run, job: str, stage: int, schedule: str) -> None:
    found = diagnose(run.part(job))
    assert (found.job.schedule_name, found.job.schedule_match) == (schedule, 1.0)
    assert (found.verdict.cause, found.verdict.stage, found.verdict.confidence) == ("imbalance", stage, "measured")


def test_links_are_measured_by_activations_and_gradients_not_by_the_shapes_before_them(run: Run) -> None:
    found = diagnose(run.part(VARYING)).links
    pairs = {(stage, stage + 1) for stage in range(RANKS - 1)}
    assert {(link.src_stage, link.dst_stage) for link in found} == pairs | {(b, a) for a, b in pairs}
    assert {link.bytes for link in found} == {16 * 2 * 32 * 4}  # sequence, rows, hidden size, float32
