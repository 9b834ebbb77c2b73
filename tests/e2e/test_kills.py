"""Jobs that die at a random moment: every step that all ranks had completed is in the record, which can be read."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ppdiag.model import Kind
from tests.e2e.conftest import job_environment, read_trace, torchrun_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ppdiag.trace import Trace

RANKS, MICROBATCHES, STARTED_STEPS = 2, 2, 3
TRIALS = 20
DEADLINE_S = 120.0
JOB = ("--microbatches", str(MICROBATCHES), "--forward-ms", "2", "--backward-ms", "3", "--quiet")


def completed_steps(prefix: Path) -> int:
    """Number of steps that every rank has reported as complete."""
    reports = [Path(f"{prefix}{rank}") for rank in range(RANKS)]
    return min(report.read_bytes().count(b"\n") if report.exists() else 0 for report in reports)


@contextlib.contextmanager
def job(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A running job, all of whose processes are gone afterwards."""
    command = torchrun_command(RANKS, "sleeping_pipeline.py", *JOB, "--report", str(folder / "report"), *options)
    environment = job_environment(folder / "run")
    with (
        (folder / "output").open("wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True) as process,
    ):
        try:
            yield process
        finally:
            ranks = rank_pids(folder) if (folder / "run").exists() else {}
            for pid in (process.pid, *ranks.values()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def rank_pids(folder: Path) -> dict[int, int]:
    with contextlib.suppress(Exception):
        return {rank: int(facts.facts["pid"]) for rank, facts in read_trace(folder / "run").ranks.items()}
    return {}


def wait_for(condition: object, folder: Path) -> None:
    """Poll until ``condition()`` holds."""
    assert callable(condition)
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, (folder / "output").read_text()[-4000:]
        time.sleep(0.01)


def assert_record_is_complete(trace: Trace, steps: int) -> None:
    expected = {(int(Kind.FORWARD), m): 1 for m in range(MICROBATCHES)}
    expected |= {(int(Kind.BACKWARD), m): 1 for m in range(MICROBATCHES)}
    for rank, spans in trace.by_rank().items():
        for step in range(steps):
            work = spans[(spans["step"] == step) & (spans["kind"] <= Kind.BACKWARD)]
            found = Counter((int(op["kind"]), int(op["microbatch"])) for op in work)
            assert found == expected, f"rank {rank}, step {step} of {steps}"


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(TRIALS))
def test_every_step_that_all_ranks_completed_is_in_the_record(trial: int, tmp_path: Path) -> None:
    chance = random.Random(trial)
    victim = ("rank 0", "rank 1", "launcher", "raise")[trial % 4]
    raising = chance.randrange(STARTED_STEPS, 40)
    options = ["--steps", "100000"] + (["--raise-at", f"1:{raising}"] if victim == "raise" else [])
    with job(tmp_path, *options) as process:
        wait_for(lambda: completed_steps(tmp_path / "report") >= STARTED_STEPS, tmp_path)
        if victim == "raise":
            process.wait(DEADLINE_S)
        else:
            time.sleep(chance.uniform(0, 0.5))
            pids = rank_pids(tmp_path)
            os.kill(process.pid if victim == "launcher" else pids[int(victim[-1])], signal.SIGKILL)
            if victim != "launcher":
                process.wait(DEADLINE_S)
        steps = completed_steps(tmp_path / "report")
    trace = read_trace(tmp_path / "run")
    assert sorted(trace.ranks) == list(range(RANKS))
    assert_record_is_complete(trace, steps)
    if victim == "raise":
        assert trace.ranks[1].status == "raised"
        assert trace.ranks[1].facts["raised"] == f"RuntimeError: planted: rank 1 raises in step {raising}"


@pytest.mark.slow
def test_a_job_that_torchrun_restarts_is_recorded_anew_and_what_ended_it_is_said(tmp_path: Path) -> None:
    command = torchrun_command(RANKS, "sleeping_pipeline.py", *JOB, "--steps", "8", "--raise-at", "1:5")
    command.insert(3, "--max-restarts=1")
    # Without it the ranks of a restart may take the addresses of those before them for their own (torch 2.13).
    environment = job_environment(tmp_path / "run") | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    names = {path.name for path in (tmp_path / "run").glob("*.spans")}
    assert names == {f"rank{rank:05d}-{start}.spans" for rank in range(RANKS) for start in (0, 1)}
    trace = read_trace(tmp_path / "run")
    assert_record_is_complete(trace, 8)
    assert [facts.status for facts in trace.ranks.values()] == ["finished"] * RANKS
    planted = "the start before the last ended when rank 1 raised RuntimeError: planted: rank 1 raises in step 5"
    assert planted in trace.warnings
