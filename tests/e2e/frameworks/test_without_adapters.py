"""The same jobs with the adapters off: the universal layer finds what can be found, and says where it cannot."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Flag, Kind
from tests.e2e.conftest import work_only
from tests.e2e.frameworks.conftest import Run, run_twice, training

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]  # the first test waits for all jobs

RANKS, MICROBATCHES = 4, 8
OFF = {"PPDIAG_ADAPTERS": "none"}
MEGATRON = ("megatron_core.py", "megatron-core-0.16.1")
DEEPSPEED = ("deepspeed_engine.py", "deepspeed-0.19.8")
CHUNKS = {
    MEGATRON: {"--pp 4": 1, "--pp 4 --vp 2 --overlap": 2, "--pp 2 --tied": 1, "--pp 4 --varlen --dealloc": 1},
    DEEPSPEED: {"--pp 4": 1, "--pp 2 --tied": 1, "--pp 2 --zero 1": 1, "--pp 4 --varying": 1},
}
SLOW = {
    MEGATRON: {"--pp 4 --steps 6 --slow 2:60": 2, "--pp 4 --vp 2 --overlap --steps 6 --slow 5:60": 5},
    DEEPSPEED: {"--pp 4 --steps 6 --slow 3:60": 2},
}
DUAL = "--pp 4 --dualpipev --steps 4"
Framework = tuple[str, str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Framework, Run]:
    found = {}
    for framework, extra in ((MEGATRON, []), (DEEPSPEED, [DUAL])):
        folder: Path = tmp_path_factory.mktemp("universal")
        jobs = [*CHUNKS[framework], *SLOW[framework], *extra]
        script, version = framework
        found[framework] = run_twice(folder, RANKS, script, jobs, version=version, variables=OFF)
    return found


@pytest.mark.parametrize(("framework", "job"), [(f, job) for f, jobs in CHUNKS.items() for job in jobs])
def test_each_microbatch_goes_forward_and_backward_once_through_each_chunk(
    runs: dict[Framework, Run], framework: Framework, job: str
) -> None:
    chunks = CHUNKS[framework][job]
    expected = {
        (int(kind), chunk, microbatch): 1
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for chunk in range(chunks)
        for microbatch in range(MICROBATCHES)
    }
    for rank, spans in runs[framework].part(job).by_rank().items():
        second = runs[framework].result(job, rank)["first_step"] + 1
        work = training(work_only(spans[spans["step"] == second]))
        work = work[np.isin(work["kind"], (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT))]
        assert (work["flags"] & int(Flag.INFERRED) != 0).all()
        columns = (work[name].tolist() for name in ("kind", "chunk", "microbatch"))
        assert Counter(zip(*columns, strict=True)) == expected


@pytest.mark.parametrize(("framework", "job"), [(f, job) for f, jobs in SLOW.items() for job in jobs])
def test_a_stage_that_sleeps_is_named(runs: dict[Framework, Run], framework: Framework, job: str) -> None:
    found = diagnose(runs[framework].part(job))
    assert found.job.schedule_name == ("Interleaved1F1B" if "--vp" in job else "1F1B")
    place = (found.verdict.cause, found.verdict.stage, found.verdict.confidence)
    assert place == ("imbalance", SLOW[framework][job], "inferred")


def test_a_v_through_one_module_is_not_taken_for_something_else(runs: dict[Framework, Run]) -> None:
    found = diagnose(runs[DEEPSPEED].part(DUAL))
    assert (found.verdict.stage, found.verdict.link, found.verdict.confidence) == (None, None, "undecided")
    assert any("several stages of a rank may run through one module" in warning for warning in found.warnings)


@pytest.mark.parametrize("framework", [MEGATRON, DEEPSPEED])
def test_losses_and_gradients_are_bit_identical_with_and_without_the_recorder(
    runs: dict[Framework, Run], framework: Framework
) -> None:
    assert runs[framework].recorded == runs[framework].plain
