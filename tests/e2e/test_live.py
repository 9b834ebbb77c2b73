"""Jobs whose probes sleep and wake while they run, and that run on as if nobody was there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Kind
from tests.e2e.conftest import ROOT, job_environment, read_trace, torchrun_command
from tests.e2e.test_faults import SABOTEUR
from tests.e2e.test_kills import completed_steps, wait_for

if TYPE_CHECKING:
    from pathlib import Path

RANKS, MICROBATCHES = 2, 4
JOB = ("--microbatches", str(MICROBATCHES), "--forward-ms", "3", "--backward-ms", "6", "--quiet")
STEPS_OF_160_MS = ("--microbatches", str(MICROBATCHES), "--forward-ms", "11", "--backward-ms", "22", "--quiet")
"""Five forwards and five backwards follow each other."""
TIMEOUT_S = 120.0


def run(
    folder: Path, *options: str, job: tuple[str, ...] = JOB, steps: int, sabotage: str = ""
) -> subprocess.CompletedProcess[str]:
    """A whole job under ``ppdiag run`` with these options."""
    command = torchrun_command(RANKS, "sleeping_pipeline.py", *job, "--steps", str(steps))
    line = [sys.executable, "-m", "ppdiag", "run", "-o", str(folder / "run"), *options, "--", *command]
    path = os.pathsep.join([str(ROOT), *([str(SABOTEUR)] if sabotage else [])])
    environment = job_environment(None) | {"PYTHONPATH": path, "SABOTAGE": sabotage}
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def recorded_steps(folder: Path) -> list[list[int]]:
    """The steps of which each rank has recorded all F and B."""
    found = []
    for spans in read_trace(folder / "run").by_rank().values():
        work = spans[np.isin(spans["kind"], (Kind.FORWARD, Kind.BACKWARD))]
        steps, counts = np.unique(work["step"], return_counts=True)
        found.append(steps[counts == 2 * MICROBATCHES].tolist())
    return found


def test_a_dormant_job_records_the_steps_that_are_asked_for_on_all_ranks(tmp_path: Path) -> None:
    command = torchrun_command(
        RANKS, "sleeping_pipeline.py", *JOB, "--steps", "400", "--report", str(tmp_path / "report")
    )
    environment = job_environment(tmp_path / "run") | {"PPDIAG_MODE": "dormant"}
    record = [sys.executable, "-m", "ppdiag", "record", str(tmp_path / "run"), "--steps", "6", "--patience", "60"]
    with (
        (tmp_path / "output").open("wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as job,
    ):
        try:
            wait_for(lambda: completed_steps(tmp_path / "report") >= 3, tmp_path)
            size = sum(path.stat().st_size for path in (tmp_path / "run").glob("*.spans"))
            checkout = {**os.environ, "PYTHONPATH": str(ROOT)}
            lines = [
                subprocess.run(record, env=checkout, capture_output=True, text=True, check=False) for _ in range(2)
            ]
            assert size < 4096 * RANKS  # the headers
        finally:
            job.terminate()
    assert [line.returncode for line in lines] == [0, 0], lines[0].stderr + lines[1].stderr
    first, second = recorded_steps(tmp_path)
    assert first == second
    assert len(first) == 2 * 7
    assert np.diff(first).tolist().count(1) == 2 * 6
    trace = read_trace(tmp_path / "run")
    assert trace.warnings == ()
    found = diagnose(trace)
    assert found.steps.count >= 10
    assert found.replay_error_fraction < 0.05


@pytest.mark.slow
def test_windows_of_steps_are_recorded_on_all_ranks(tmp_path: Path) -> None:
    done = run(tmp_path, "--every", "20", "--window", "4", steps=70)
    assert done.returncode == 0, done.stderr
    assert recorded_steps(tmp_path) == [[start + i for start in (20, 40, 60) for i in range(5)]] * RANKS


@pytest.mark.slow
def test_a_dormant_job_that_nobody_wakes_records_nothing_and_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "--dormant", steps=5)
    assert done.returncode == 0, done.stderr
    assert "the job was dormant: did ppdiag record wake it?" in done.stderr
    assert len(read_trace(tmp_path / "run")) == 0


def measured_overhead(folder: Path, *, steps: int, job: tuple[str, ...], sabotage: str = "") -> dict[str, float]:
    options = ("--measure-overhead", "--json", str(folder / "found.json"))
    done = run(folder, *options, steps=steps, job=job, sabotage=sabotage)
    assert done.returncode == 0, done.stderr
    assert "cost of recording" in done.stderr
    found = dict(json.loads((folder / "found.json").read_text())["overhead"])
    assert found["low"] <= found["fraction"] <= found["high"]
    return found


@pytest.mark.slow
def test_recording_is_not_found_to_cost_half_a_percent_of_a_step_of_160_ms(tmp_path: Path) -> None:
    # The noise of a busy machine widens the interval; benchmarks/overhead.py, on an idle one, has a narrow one.
    found = measured_overhead(tmp_path, steps=180, job=STEPS_OF_160_MS)
    assert found["low"] < 0.005
    recorded = recorded_steps(tmp_path)
    assert recorded[0] == recorded[1]
    assert set(range(6, 18)) <= set(recorded[0])
    assert not set(range(18, 30)) & set(recorded[0])


@pytest.mark.slow
def test_what_recording_is_made_to_cost_is_what_is_measured(tmp_path: Path) -> None:
    # A function that runs twice in each recorded step, before the pipeline and the optimizer, takes 40 ms longer.
    found = measured_overhead(tmp_path, steps=120, job=STEPS_OF_160_MS, sabotage="slow:recorder:compute_tail:40")
    blocks = read_trace(tmp_path / "run").ranks[0].facts["blocks"]
    plain_s = np.median([block["wall_ns"] / block["steps"] / 1e9 for block in blocks if not block["probed"]])
    assert found["fraction"] == pytest.approx(2 * 0.040 / plain_s, rel=0.25)
    assert found["low"] > 0.1
