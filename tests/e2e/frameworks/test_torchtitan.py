"""The unmodified trainer of torchtitan rides on torch's pipelining: its adapter names everything."""

from __future__ import annotations

import socket
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Kind, Payload
from tests.e2e.conftest import read_results, read_trace
from tests.e2e.frameworks.conftest import (
    ENVIRONMENT,
    JOBS,
    SLEEP_MS,
    Run,
    assert_both_ends_agree,
    assert_inferred,
    expected_ops,
    ops_of,
    start,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]  # the first test waits for all jobs

MICROBATCHES, STEPS = 8, 2
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
SINGLE = [f"{SCHEDULE} {name}" for name in ("GPipe", "1F1B")]
MULTI_NAMES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
MULTI = [f"{SCHEDULE} {name}" for name in MULTI_NAMES]
CHECKPOINTING = f"{SCHEDULE} 1F1B --activation_checkpoint.mode full"
SLOW = f"slow=1:{SLEEP_MS} {SCHEDULE} 1F1B --training.steps 5"
"""Layer 1 of 6 sleeps in each forward: it is in the first of two stages."""
SHARDED = f"{SCHEDULE} 1F1B --parallelism.data_parallel_shard_degree 2"
TENSOR = f"{SCHEDULE} Interleaved1F1B --parallelism.tensor_parallel_degree 2"
TWO_RANKS = [*SINGLE, *MULTI, CHECKPOINTING, SLOW]
FOUR_RANKS = [SHARDED, TENSOR]
SPLIT = f"{SCHEDULE} ZBVZeroBubble --training.steps 4"
INFERRED = {SINGLE[1]: 1, MULTI[0]: 2, CHECKPOINTING: 1, SHARDED: 1, TENSOR: 2}
"""Chunks a rank of jobs that are run once more, with the adapters switched off."""
STAGES = {**dict.fromkeys([*SINGLE, CHECKPOINTING, SHARDED], 2), **dict.fromkeys([*MULTI, TENSOR], 4)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The run that each job was part of."""
    folder: Path = tmp_path_factory.mktemp("torchtitan")
    python, script = str(ENVIRONMENT / "bin" / "python"), str(JOBS / "torchtitan_trainer.py")
    subprocess.run([python, script, "--make-assets", str(folder / "assets")], check=True, timeout=60)
    found: dict[str, Run] = {}
    for ranks, jobs in ((2, TWO_RANKS), (4, FOUR_RANKS)):
        place = folder / str(ranks)
        place.mkdir()
        for name, run_dir in (("on-", place / "run"), ("off-", None)):
            arguments = (str(place / name), free_ports(len(jobs)), *jobs)
            start(ranks, "torchtitan_trainer.py", *arguments, run_dir=run_dir, cwd=folder / "assets")
        results = (read_results(place / name, ranks) for name in ("on-", "off-"))
        found |= dict.fromkeys(jobs, Run(read_trace(place / "run"), *results))
    return found


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory: pytest.TempPathFactory, runs: dict[str, Run]) -> dict[str, Run]:  # noqa: ARG001  (it made the assets)
    """The run without the adapter that each job was part of."""
    folder: Path = tmp_path_factory.mktemp("unnamed")
    assets = next(folder.parent.glob("torchtitan*/assets"))
    found: dict[str, Run] = {}
    two = [job for job in INFERRED if job not in FOUR_RANKS]
    for ranks, jobs in ((2, [SPLIT, SLOW, *two]), (4, FOUR_RANKS)):
        place = folder / str(ranks)
        place.mkdir()
        options: dict[str, Any] = {"run_dir": place / "run", "cwd": assets, "variables": {"PPDIAG_ADAPTERS": "none"}}
        start(ranks, "torchtitan_trainer.py", str(place / "on-"), free_ports(len(jobs)), *jobs, **options)
        results = read_results(place / "on-", ranks)
        found |= dict.fromkeys(jobs, Run(read_trace(place / "run"), results, results))
    return found


def free_ports(count: int) -> str:
    """Ports that nobody uses now, as a list with commas."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return ",".join(str(each.getsockname()[1]) for each in sockets)


@pytest.mark.parametrize("job", STAGES)
def test_each_step_holds_exactly_the_ops_of_the_schedule(runs: dict[str, Run], job: str) -> None:
    run = runs[job]
    for rank, spans in run.part(job).by_rank().items():
        result = run.result(job, rank)
        expected = expected_ops(result["stages"], STAGES[job], MICROBATCHES)
        for step in range(result["first_step"], result["first_step"] + STEPS):
            found = ops_of(spans[spans["step"] == step])
            weights = [op for op in found if op[0] == "WEIGHT"]
            assert len(weights) == result["plan"].get("BACKWARD_WEIGHT", 0)
            assert {op: count for op, count in found.items() if op not in weights} == expected


@pytest.mark.parametrize("job", [*TWO_RANKS, *FOUR_RANKS])
def test_losses_are_bit_identical_with_and_without_the_recorder(runs: dict[str, Run], job: str) -> None:
    run = runs[job]
    assert run.recorded == run.plain
    assert any(float.fromhex(loss) > 0 for ranks in run.plain for loss in ranks[0]["losses"])


@pytest.mark.parametrize("job", [TWO_RANKS[0], FOUR_RANKS[0]])
def test_both_ends_of_each_message_carry_the_same_microbatch(runs: dict[str, Run], job: str) -> None:
    spans = runs[job].trace.spans
    messages = spans[(spans["kind"] == Kind.SEND) | (spans["kind"] == Kind.RECV)]
    assert_both_ends_agree(messages[messages["op"] != Payload.UNKNOWN])
    assert all(not facts.faults for facts in runs[job].trace.ranks.values())


def test_the_grid_is_read_from_the_device_mesh(runs: dict[str, Run]) -> None:
    facts = [facts.facts for facts in runs[TENSOR].trace.ranks.values()]  # of the job that ran last
    assert [(said["pp"], said["vpp"], said["tp"], said["dp"]) for said in facts] == [(2, 2, 2, 1)] * 4
    assert all(said["device_mesh"] == {"tp": 2} for said in facts)


def test_a_stage_that_sleeps_is_named(runs: dict[str, Run]) -> None:
    found = diagnose(runs[SLOW].part(SLOW))
    assert (found.job.schedule_name, found.job.schedule_match) == ("1F1B", 1.0)
    assert (found.verdict.cause, found.verdict.stage, found.verdict.confidence) == ("imbalance", 0, "measured")


@pytest.mark.parametrize("job", INFERRED)
def test_without_the_adapter_each_microbatch_goes_forward_and_backward_once_through_each_chunk(
    unnamed: dict[str, Run], job: str
) -> None:
    assert_inferred(unnamed[job], job, INFERRED[job], MICROBATCHES)


def test_without_the_adapter_the_stage_that_sleeps_is_found_all_the_same(
    unnamed: dict[str, Run], runs: dict[str, Run]
) -> None:
    found = diagnose(unnamed[SLOW].part(SLOW)).verdict
    assert (found.cause, found.stage, found.confidence) == ("imbalance", 0, "inferred")
    losses = [[line["losses"] for line in ranks if line["job"] == SLOW] for ranks in unnamed[SLOW].recorded]
    assert losses == [[line["losses"] for line in ranks if line["job"] == SLOW] for ranks in runs[SLOW].plain]


def test_without_the_adapter_weight_gradients_of_their_own_are_not_taken_for_backwards(unnamed: dict[str, Run]) -> None:
    found = diagnose(unnamed[SPLIT].part(SPLIT))
    assert (found.verdict.stage, found.verdict.confidence) == (None, "undecided")
    assert any("weight gradients may be computed apart" in warning for warning in found.warnings)
