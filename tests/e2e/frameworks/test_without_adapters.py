"""The same jobs with the adapters off: the universal layer finds what can be found, and says where it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.analyzers.diagnose import diagnose
from tests.e2e.frameworks.conftest import SLEEP_MS, Run, assert_inferred, run_once, run_twice

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]  # the first test waits for all jobs

RANKS, MICROBATCHES = 4, 8
OFF = {"PPDIAG_ADAPTERS": "none"}
Framework = tuple[str, str]
"""(job, version)."""
MEGATRON = [("megatron_core.py", f"megatron-core-{version}") for version in ("0.16.1", "0.8.0", "0.12.3", "0.19.2")]
DEEPSPEED = [("deepspeed_engine.py", f"deepspeed-{version}") for version in ("0.19.8", "0.14.5")]
FIRST = [MEGATRON[0], DEEPSPEED[0]]
"""Of these versions there is more, and a run without the recorder."""
PLAIN, INTERLEAVED, TIED, ZERO = "--pp 4", "--pp 4 --vp 2 --overlap", "--pp 2 --tied", "--pp 2 --zero 1"
CHUNKS: dict[Framework, dict[str, int]] = {
    **{framework: {PLAIN: 1, INTERLEAVED: 2, TIED: 1} for framework in MEGATRON},
    **{framework: {PLAIN: 1, TIED: 1, ZERO: 1} for framework in DEEPSPEED},
}
CHUNKS[MEGATRON[0]] |= {"--pp 4 --vp 2": 2, "--pp 2 --vp 2 --overlap": 2, "--pp 4 --varlen --dealloc": 1}
CHUNKS[DEEPSPEED[0]] |= {"--pp 4 --varying": 1}
SLOW: dict[Framework, dict[str, int]] = {
    **{
        framework: {f"{PLAIN} --steps 5 --slow 2:{SLEEP_MS}": 2, f"{INTERLEAVED} --steps 5 --slow 5:{SLEEP_MS}": 5}
        for framework in MEGATRON
    },
    **{framework: {f"{PLAIN} --steps 5 --slow 3:{SLEEP_MS}": 2} for framework in DEEPSPEED},
}
DUAL = "--pp 4 --dualpipev --steps 4"


def each_job(jobs: dict[Framework, dict[str, int]]) -> Any:
    pairs = [(framework, job) for framework in jobs for job in jobs[framework]]
    ids = [f"{version} {job}" for (_, version), job in pairs]
    return pytest.mark.parametrize(("run", "job"), pairs, indirect=["run"], ids=ids)


@pytest.fixture(scope="module")
def runs() -> dict[Framework, Run]:
    return {}


@pytest.fixture
def run(
    request: pytest.FixtureRequest, runs: dict[Framework, Run], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Framework, Run]:
    framework: Framework = request.param
    if framework not in runs:
        folder: Path = tmp_path_factory.mktemp("universal")
        jobs = [*CHUNKS[framework], *SLOW[framework], *([DUAL] if framework == DEEPSPEED[0] else [])]
        (script, version), options = framework, {"variables": OFF}
        if framework in FIRST:
            runs[framework] = run_twice(folder, RANKS, script, jobs, version=version, **options)
        else:
            runs[framework] = run_once(folder, RANKS, script, jobs, version=version, **options)
    return framework, runs[framework]


@each_job(CHUNKS)
def test_each_microbatch_goes_forward_and_backward_once_through_each_chunk(
    run: tuple[Framework, Run], job: str
) -> None:
    framework, found = run
    assert_inferred(found, job, CHUNKS[framework][job])


@each_job(SLOW)
def test_a_stage_that_sleeps_is_named(run: tuple[Framework, Run], job: str) -> None:
    framework, recorded = run
    found = diagnose(recorded.part(job))
    assert found.job.schedule_name == ("Interleaved1F1B" if "--vp" in job else "1F1B")
    place = (found.verdict.cause, found.verdict.stage, found.verdict.confidence)
    assert place == ("imbalance", SLOW[framework][job], "inferred")


@pytest.mark.parametrize("run", [DEEPSPEED[0]], indirect=True)
def test_a_v_through_one_module_is_not_taken_for_something_else(run: tuple[Framework, Run]) -> None:
    found = diagnose(run[1].part(DUAL))
    assert (found.verdict.stage, found.verdict.link, found.verdict.confidence) == (None, None, "undecided")
    assert any("several stages of a rank may run through one module" in warning for warning in found.warnings)


@pytest.mark.parametrize("run", FIRST, indirect=True)
def test_losses_and_gradients_are_bit_identical_with_and_without_the_recorder(run: tuple[Framework, Run]) -> None:
    assert run[1].recorded == run[1].plain
