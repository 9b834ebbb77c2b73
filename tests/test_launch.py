"""The run directory, the variables of the job, and how it is started."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
import time
from pathlib import Path

import pytest

from ppdiag import launch
from ppdiag.errors import LaunchFailed
from ppdiag.rundir import read_run_file


def test_two_names_in_one_second_differ(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "ppdiag-run-20250131-235959")
    first = launch.default_run_directory()
    first.mkdir()
    assert (first.name, launch.default_run_directory().name) == (
        "ppdiag-run-20250131-235959",
        "ppdiag-run-20250131-235959-2",
    )


def test_the_directory_is_the_owners_alone_and_holds_the_launchers_facts(tmp_path):
    path = launch.prepare_run_directory(tmp_path / "a" / "run", ["python", "train.py"])
    assert path == tmp_path / "a" / "run"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert json.loads((path / "run.json").read_text())["argv"] == ["python", "train.py"]
    assert [entry.name for entry in path.iterdir()] == ["run.json"]


def test_an_argument_that_is_no_utf8_is_kept(tmp_path):
    path = launch.prepare_run_directory(tmp_path / "run", [os.fsdecode(b"\xff")])
    assert read_run_file(path)["argv"] == [os.fsdecode(b"\xff")]


def test_a_link_under_the_scratch_name_is_not_followed(tmp_path):
    victim = tmp_path / "thesis"
    victim.write_text("years of work")
    path = launch.prepare_run_directory(tmp_path / "run")
    (path / f".run.json.{socket.gethostname()}.{os.getpid()}").symlink_to(victim)
    launch.note_end(path, 0)
    assert victim.read_text() == "years of work"
    assert read_run_file(path)["exit_code"] == 0


def test_a_link_under_the_name_of_the_run_file_is_replaced(tmp_path):
    victim = tmp_path / "thesis"
    victim.write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").symlink_to(victim)
    launch.prepare_run_directory(tmp_path / "run")
    assert victim.read_text() == "{}"
    assert not (tmp_path / "run" / "run.json").is_symlink()


def test_a_directory_of_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(LaunchFailed, match="holds no run"):
        launch.prepare_run_directory(tmp_path)


def test_our_folder_comes_first_and_once_and_the_users_stay():
    ours = launch.bootstrap_directory()
    variables = launch.job_variables(Path("/run"), {"PYTHONPATH": f"/theirs:{ours}::/more"})
    assert variables == {"PPDIAG_RUN_DIR": "/run", "PYTHONPATH": f"{ours}:/theirs:/more"}


def test_each_option_has_its_variable():
    variables = launch.job_variables(
        Path("/run"), {}, max_bytes=5, mode="dormant", adapters=False, layer_times=True, nccl=True
    )
    assert variables.pop("PYTHONPATH")
    assert variables == {
        "PPDIAG_RUN_DIR": "/run",
        "PPDIAG_MAX_BYTES": "5",
        "PPDIAG_MODE": "dormant",
        "PPDIAG_ADAPTERS": "none",
        "PPDIAG_LAYER_TIMES": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET",
        "NCCL_DEBUG_FILE": "/run/nccl-%h-%p.log",
    }


@pytest.mark.parametrize("own", ["NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"])
def test_the_users_own_log_of_nccl_is_left_alone(own):
    assert not {name for name in launch.job_variables(Path("/run"), {own: "x"}, nccl=True) if name.startswith("NCCL")}


def test_a_directory_whose_name_nccl_would_change_gets_no_log():
    assert "NCCL_DEBUG_FILE" not in launch.job_variables(Path("/100%h"), {}, nccl=True)


def test_a_path_that_pythonpath_cannot_hold_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "bootstrap_directory", lambda: "/a:b")
    with pytest.raises(LaunchFailed, match="PYTHONPATH cannot hold"):
        launch.job_variables(Path("/run"), {})


def test_a_script_that_cannot_be_executed_is_told_from_one_that_is_not_there(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(LaunchFailed, match="python before its name"):
        launch.check_command([str(script)])
    with pytest.raises(LaunchFailed, match="no such program"):
        launch.check_command([str(tmp_path / "gone")])


@pytest.mark.parametrize(("code", "expected"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_the_jobs_end_is_returned_and_signals_are_as_before(code, expected):
    calls = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    command = [sys.executable, "-c", f"import os, sys; {code}"]
    assert launch.run_job(command, {}, meanwhile=lambda: calls.append(1)) == expected
    assert calls == [1]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
