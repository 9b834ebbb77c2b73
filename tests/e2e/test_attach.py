"""Ranks of a real job that was started without us are armed, woken, and let be.

No Python here needs to be 3.14: a signal stands in for its ``sys.remote_exec``, see ``tests/tools/remote``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.cli import main
from ppdiag.model import Kind
from tests.e2e.conftest import job_environment, read_trace, torchrun_command
from tests.e2e.test_kills import completed_steps, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

REMOTE = Path(__file__).parents[1] / "tools" / "remote"
RANKS, MICROBATCHES, STEPS = 2, 4, 6
JOB = ("--microbatches", str(MICROBATCHES), "--forward-ms", "10", "--backward-ms", "20", "--quiet")


def remote_exec(folder: Path) -> Callable[[int, str], None]:
    def execute(pid: int, script: str) -> None:
        (folder / f"script{pid}").write_text(script)
        os.kill(pid, signal.SIGUSR1)

    return execute


def wait_for_more(report: Path, folder: Path) -> None:
    """Wait for two more steps of the job."""
    steps = completed_steps(report)
    wait_for(lambda: completed_steps(report) >= steps + 2, folder)


@pytest.mark.slow
def test_a_job_that_was_started_without_us_is_armed_and_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "remote_exec", remote_exec(tmp_path), raising=False)
    report = tmp_path / "report"
    command = torchrun_command(RANKS, "sleeping_pipeline.py", *JOB, "--steps", "100000", "--report", str(report))
    environment = job_environment(None) | {"PYTHONPATH": str(REMOTE), "REMOTE_FOLDER": str(tmp_path)}
    with (
        (tmp_path / "output").open("wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as job,
    ):
        try:
            wait_for(lambda: completed_steps(report) >= 3, tmp_path)
            pids = [(tmp_path / f"pid{rank}").read_text() for rank in range(RANKS)]
            armed = []
            for pid in pids:  # as on several hosts: in different steps
                armed.append(CliRunner().invoke(main, ["attach", pid, "-o", str(tmp_path / "run")]))
                wait_for_more(report, tmp_path)
            woken = CliRunner().invoke(
                main, ["record", str(tmp_path / "run"), "--steps", str(STEPS), "--patience", "60"]
            )
            wait_for_more(report, tmp_path)  # the job goes on
        finally:
            job.terminate()
    assert [done.exit_code for done in armed] == [0] * RANKS, armed[0].output
    assert woken.exit_code == 0, woken.output
    trace = read_trace(tmp_path / "run")
    work = {
        rank: np.unique(spans["step"][np.isin(spans["kind"], (Kind.FORWARD, Kind.BACKWARD))]).tolist()
        for rank, spans in trace.by_rank().items()
    }
    assert work[0] == work[1]
    assert len(work[0]) == STEPS + 1
    found = diagnose(trace)
    assert found.steps.count >= STEPS - 1
    assert found.job.schedule_match == 1.0
    assert found.replay_error_fraction < 0.05
