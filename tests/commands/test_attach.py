from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from click.testing import CliRunner

from ppdiag.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_an_older_python_says_how_to_arm_the_job_instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(sys, "remote_exec", raising=False)
    done = CliRunner().invoke(main, ["attach", "1", "-o", str(tmp_path / "run")])
    assert done.exit_code == 6
    assert "start the job with ppdiag run --dormant" in done.output
    assert not (tmp_path / "run").exists()


def test_each_process_is_given_a_script_that_arms_it_asleep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkout_environment: dict[str, str]
) -> None:
    given: list[tuple[int, str]] = []
    monkeypatch.setattr(sys, "remote_exec", lambda pid, script: given.append((pid, script)), raising=False)
    run = tmp_path / "run"
    done = CliRunner().invoke(main, ["attach", "11", "12", "-o", str(run)])
    assert done.exit_code == 0, done.output
    assert [pid for pid, _ in given] == [11, 12]
    code = f"exec(open({given[0][1]!r}).read()); import os; print(os.environ['PPDIAG_MODE'], sys.meta_path[0])"
    command = [sys.executable, "-S", "-c", code]
    ran = subprocess.run(command, env=checkout_environment, capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("attached <ppdiag.hooks.install._Finder"), ran.stderr
    assert (run / "processes.jsonl").exists()


def test_a_process_that_is_armed_already_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkout_environment: dict[str, str]
) -> None:
    given: list[str] = []
    monkeypatch.setattr(sys, "remote_exec", lambda _pid, script: given.append(script), raising=False)
    done = CliRunner().invoke(main, ["attach", "11", "-o", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    code = f"import ppdiag.hooks.install, os; exec(open({given[0]!r}).read()); print(os.environ.get('PPDIAG_RUN_DIR'))"
    command = [sys.executable, "-S", "-c", code]
    ran = subprocess.run(command, env=checkout_environment, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "None", ran.stderr


def test_a_process_that_cannot_be_reached_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_pid: int, _script: str) -> None:
        raise PermissionError(1, "not yours")

    monkeypatch.setattr(sys, "remote_exec", refuse, raising=False)
    done = CliRunner().invoke(main, ["attach", "11", "-o", str(tmp_path / "run")])
    assert done.exit_code == 6
    assert "process 11" in done.output
