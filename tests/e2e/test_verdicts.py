"""Real pipelines whose durations are known, since their stages sleep: the split of their idle time, and the verdict."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from tests.e2e.conftest import read_trace, torch_version, torchrun

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ppdiag.diagnosis import Diagnosis, RankResult, StageResult

RANKS = 4
STEPS = 8
EQUAL = {
    (name, microbatches): f"--schedule {name} --microbatches {microbatches}"
    for name in ("1F1B", "GPipe")
    for microbatches in (4, 16)
}
SLOW = {stage: f"--microbatches 16 --stage-factor {stage}:2" for stage in range(RANKS)}
SLOW_CHUNK = "--schedule Interleaved1F1B --microbatches 8 --virtual-stages 2 --stage-factor 5:3"
# F 2 ms and B 4 ms: the bubble is 3 * 6 = 18 ms a step, and the last rank's 100 ms hide behind it for so long
HOST = {
    (rank, place): f"--forward-ms 2 --backward-ms 4 --host-sleep {rank}:100:{place}"
    for rank, place in ((0, "between"), (3, "between"), (1, "optimizer"), (2, "optimizer"))
}
FEW = "--schedule GPipe --microbatches 2"
if torch_version() < (2, 11):  # takes no GPipe of so few
    FEW = "--schedule LoopedBFS --virtual-stages 2 --microbatches 2"
SCENARIOS = [*EQUAL.values(), *SLOW.values(), SLOW_CHUNK, *HOST.values(), FEW]


@pytest.fixture(scope="module")
def diagnosis_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Diagnosis]:
    """The diagnosis of one scenario; all ran in one job."""
    folder: Path = tmp_path_factory.mktemp("scenarios")
    report = folder / "steps"
    lines = [f"{line} --steps {STEPS}" for line in SCENARIOS]
    torchrun(RANKS, "scenarios.py", str(report), *lines, run_dir=folder / "run")
    trace = read_trace(folder / "run")
    bounds = [tuple(map(int, line.split())) for line in report.read_text().splitlines()]

    @cache
    def diagnosis(scenario: str) -> Diagnosis:
        first, end = bounds[SCENARIOS.index(scenario)]
        return diagnose(trace.where((trace.spans["step"] >= first) & (trace.spans["step"] < end)))

    return diagnosis


@pytest.mark.parametrize(("schedule", "microbatches"), EQUAL)
def test_equal_stages_lose_what_the_formula_says(
    diagnosis_of: Callable[[str], Diagnosis], schedule: str, microbatches: int
) -> None:
    found = diagnosis_of(EQUAL[schedule, microbatches])
    assert found.job.schedule_name == schedule
    assert found.job.schedule_match == 1.0
    assert (found.job.pp, found.job.vpp, found.job.microbatches) == (RANKS, 1, microbatches)
    step_s = found.phases.pipeline_s + found.phases.tail_s + found.phases.between_s
    formula = (RANKS - 1) / (microbatches + RANKS - 1)
    assert found.why.bubble * step_s / found.phases.pipeline_s == pytest.approx(formula, abs=0.03)
    assert found.why.total - found.why.bubble < 0.15
    assert found.replay_error_fraction < 0.05
    assert found.verdict.cause == "bubble"


@pytest.mark.parametrize("stage", SLOW)
def test_a_stage_of_twice_the_work_is_named(diagnosis_of: Callable[[str], Diagnosis], stage: int) -> None:
    found = diagnosis_of(SLOW[stage]).verdict
    assert (found.cause, found.stage, found.confidence) == ("imbalance", stage, "measured")


def test_a_heavy_chunk_of_an_interleaved_schedule_is_named(diagnosis_of: Callable[[str], Diagnosis]) -> None:
    found = diagnosis_of(SLOW_CHUNK)
    assert (found.job.schedule_name, found.job.vpp) == ("Interleaved1F1B", 2)
    assert (found.verdict.cause, found.verdict.stage) == ("imbalance", 5)


@pytest.mark.parametrize(("rank", "place"), HOST)
def test_a_rank_that_sleeps_is_host_time_at_that_rank(
    diagnosis_of: Callable[[str], Diagnosis], rank: int, place: str
) -> None:
    found = diagnosis_of(HOST[rank, place]).verdict
    assert (found.cause, found.rank) == ("host", rank)


def test_few_microbatches_are_a_bubble(diagnosis_of: Callable[[str], Diagnosis]) -> None:
    found = diagnosis_of(FEW)
    assert found.verdict.cause == "bubble"
    assert [symptom.id for symptom in found.symptoms] == ["bubble", "few-microbatches"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_both_partitions_sum_on_every_rank(diagnosis_of: Callable[[str], Diagnosis], scenario: str) -> None:
    found = diagnosis_of(scenario)
    parts: list[Diagnosis | StageResult | RankResult] = [found, *found.stages, *found.ranks]
    for part in parts:
        assert part.why.total == pytest.approx(part.idle_fraction, abs=1e-9)
        assert part.where.total == pytest.approx(part.idle_fraction, abs=1e-9)
        values = np.array([getattr(part.why, name) for name in ("bubble", "imbalance", "communication", "host")])
        assert (values >= 0).all()
