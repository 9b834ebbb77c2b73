"""Inference by accelerate's ``prepare_pippy``: the pipeline's step runs inside the forward of the user's model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Flag, Kind
from tests.e2e.conftest import read_trace
from tests.e2e.frameworks.conftest import SLEEP_MS, Run, expected_ops, ops_of, run_twice, start

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]  # the first test waits for all jobs

RANKS, CHUNKS, CALLS = 2, 4, 6
SLOW_STAGE = 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder: Path = tmp_path_factory.mktemp("accelerate")
    return run_twice(folder, RANKS, "accelerate_pippy.py", [str(CALLS), f"{SLOW_STAGE}:{SLEEP_MS}"])


def test_each_call_holds_exactly_the_forwards_and_messages_of_its_chunks(run: Run) -> None:
    for rank, spans in run.trace.by_rank().items():
        calls = spans[spans["kind"] == Kind.SCHEDULE]
        assert len(calls) == CALLS
        for call in calls:
            inside = spans[(spans["post_ns"] >= call["start_ns"]) & (spans["end_ns"] <= call["end_ns"])]
            assert ops_of(inside) == expected_ops([rank], RANKS, CHUNKS, evaluate=True)


def test_nothing_was_inferred_from_the_root_module_around_the_step(run: Run) -> None:
    assert not np.any(run.trace.spans["flags"] & int(Flag.INFERRED))


def test_outputs_are_bit_identical_with_and_without_the_recorder(run: Run) -> None:
    assert run.recorded == run.plain
    assert len(run.plain[RANKS - 1][0]["losses"]) == CALLS


def test_a_stage_that_sleeps_is_named(run: Run) -> None:
    found = diagnose(run.trace)
    assert (found.job.framework, found.job.schedule_name) == ("torch.distributed.pipelining", "forward-only")
    assert (found.verdict.cause, found.verdict.stage, found.verdict.confidence) == ("imbalance", SLOW_STAGE, "measured")


def test_without_the_adapter_the_modules_around_the_pipeline_are_not_taken_for_stages(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "on-"), str(CALLS), f"{SLOW_STAGE}:{SLEEP_MS}")
    start(RANKS, "accelerate_pippy.py", *arguments, run_dir=tmp_path / "run", variables={"PPDIAG_ADAPTERS": "none"})
    found = diagnose(read_trace(tmp_path / "run")).verdict
    assert (found.stage, found.confidence) == (None, "undecided")
