from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from ppdiag.cli import main
from ppdiag.errors import BadRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PPDIAG = [sys.executable, "-m", "ppdiag"]

SIGNAL_COUNTER = """
import signal, sys, time
seen = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: seen.append(signal.Signals(number).name))
print("ready", flush=True)
while not seen:
    time.sleep(0.01)
time.sleep(0.3)
print("seen", *seen, flush=True)
"""


@pytest.fixture
def ppdiag_run(checkout_environment: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def call(*arguments: str, typed: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PPDIAG, "run", *arguments],
            cwd=tmp_path,
            env=checkout_environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            input=typed,
        )

    return call


def test_standard_output_of_the_job_passes_through_alone(ppdiag_run):
    done = ppdiag_run("-o", "run", "--", "sh", "-c", "printf 'job line\\n'")
    assert done.stdout == "job line\n"
    assert done.stderr.startswith("ppdiag: nothing was recorded")


HEADS_THAT_TP_DOES_NOT_DIVIDE = ["--tensor-model-parallel-size", "3", "--num-attention-heads", "64"]


def test_what_is_wrong_with_the_layout_is_said_and_does_not_stop_the_job(ppdiag_run):
    done = ppdiag_run(
        "-o", "run", "--", sys.executable, "-c", "print('ran')", "pretrain_gpt.py", *HEADS_THAT_TP_DOES_NOT_DIVIDE
    )
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "ppdiag: error: heads: 64 attention heads cannot be divided over TP = 3" in done.stderr


def test_a_configuration_that_cannot_be_read_is_said_and_does_not_stop_the_job(ppdiag_run, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    done = ppdiag_run(
        "-o", "run", "--", sys.executable, "-c", "print('ran')", "train.py", "--deepspeed_config", "bad.json"
    )
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "Traceback" not in done.stderr


def test_standard_input_reaches_the_job(ppdiag_run):
    assert ppdiag_run("-o", "run", "--", "cat", typed="hello\n").stdout == "hello\n"


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137), ("kill $$", 143)])
def test_the_exit_code_is_that_of_the_job(ppdiag_run, script, code):
    assert ppdiag_run("-o", "run", "--", "sh", "-c", script).returncode == code


def test_spaces_in_paths_and_arguments_arrive_whole(ppdiag_run, tmp_path):
    script = tmp_path / "a job.sh"
    script.write_text('#!/bin/sh\necho "$1|$PPDIAG_RUN_DIR"\n')
    script.chmod(0o755)
    done = ppdiag_run("-o", "my run", "--", str(script), "two words")
    assert done.stdout == f"two words|{tmp_path / 'my run'}\n"


def test_options_after_the_command_belong_to_the_command(ppdiag_run):
    assert ppdiag_run("-o", "run", "echo", "--html", "-o", "x").stdout == "--html -o x\n"


def test_the_run_directory_is_the_owners_alone_and_says_what_ran(ppdiag_run, tmp_path):
    ppdiag_run("-o", "run", "--", "true")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["argv"] == ["true"]
    assert facts["cwd"] == str(tmp_path)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_without_a_directory_a_new_one_is_made_each_time(ppdiag_run, tmp_path):
    ppdiag_run("--", "true")
    ppdiag_run("--", "true")
    assert len(list(tmp_path.glob("ppdiag-run-*/run.json"))) == 2


def test_no_command_is_a_usage_error(ppdiag_run):
    done = ppdiag_run()
    assert done.returncode == 2
    assert "COMMAND" in done.stderr


def test_a_mistyped_command_is_one_line_and_leaves_no_directory(ppdiag_run, tmp_path):
    done = ppdiag_run("--", "torchrum")
    assert done.returncode == 6
    assert done.stderr.count("\n") == 1
    assert "torchrum" in done.stderr
    assert "launch-failed" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_other_things_in_it_is_refused(ppdiag_run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    done = ppdiag_run("-o", "mine", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (6, "")
    assert [entry.name for entry in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_directory_with_a_run_in_it_is_joined(ppdiag_run):
    ppdiag_run("-o", "run", "--", "true")
    assert ppdiag_run("-o", "run", "--", "echo", "ran").stdout == "ran\n"


@pytest.mark.parametrize("place", ["/proc/run", "/dev/null", "/dev/null/run"])
def test_a_directory_that_cannot_be_made_stops_before_the_job(ppdiag_run, place):
    done = ppdiag_run("-o", place, "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (6, "")
    assert "Traceback" not in done.stderr


def test_where_nothing_was_recorded_a_failed_job_is_the_first_reason(ppdiag_run):
    failed, well = ppdiag_run("--", sys.executable, "-c", "import nothing_of_this_name"), ppdiag_run("--", "true")
    assert (failed.returncode, well.returncode) == (1, 0)
    assert "nothing was recorded. The job failed (1); what it said itself is above. " in failed.stderr
    assert "failed" not in well.stderr


def test_a_report_that_cannot_be_written_stops_before_the_job(ppdiag_run, tmp_path):
    done = ppdiag_run("--html", "none/report.html", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr.startswith("ppdiag: cannot write none/report.html: there is no directory none; the job was not ")
    assert list(tmp_path.iterdir()) == []


def test_a_bad_condition_stops_before_the_job(ppdiag_run):
    done = ppdiag_run("--fail-on", "idel>0.3", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (2, "")
    assert "bad-condition" in done.stderr


@pytest.mark.parametrize("options", [["-S"], ["-I"], ["-E"]])
def test_an_option_of_python_that_keeps_us_out_is_named(ppdiag_run, options):
    done = ppdiag_run("-o", "run", "--", "sh", "-c", "true", "python3", *options, "train.py")
    assert f"{options[0]} " in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_sent_to_us_reaches_the_job_once(checkout_environment, tmp_path, number):
    command = [*PPDIAG, "run", "-o", "run", "--", sys.executable, "-c", SIGNAL_COUNTER]
    with subprocess.Popen(
        command, cwd=tmp_path, env=checkout_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"seen {number.name}\n"
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_control_c_at_a_terminal_reaches_the_job_once(checkout_environment, tmp_path):
    output = _at_a_terminal(
        [*PPDIAG, "run", "-o", "run", "--", sys.executable, "-c", SIGNAL_COUNTER], checkout_environment, tmp_path
    )
    assert "seen SIGINT\r\n" in output
    assert "Traceback" not in output


def _at_a_terminal(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """Run a command with a terminal of its own; press Ctrl-C when it says that it is ready; all that it prints."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        cwd=folder,
    )
    os.close(follower)
    output = b""
    pressed = False
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            output += os.read(leader, 4096)
        except OSError:  # the last process at the terminal has ended
            break
        if b"ready" in output and not pressed:
            os.write(leader, b"\x03")
            pressed = True
    os.close(leader)
    process.wait(timeout=30)
    return output.decode()


def _with_analysis(monkeypatch: pytest.MonkeyPatch, outcome: object) -> None:
    def report(*_: object, **__: object) -> object:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    ranks: list[set[str]] = [set(), {"rank00000-0.spans"}]
    monkeypatch.setattr("ppdiag.commands.run.report", report)
    monkeypatch.setattr("ppdiag.commands.run.rank_files", lambda _: ranks.pop(0))


@pytest.mark.parametrize(
    ("holding", "job", "code"), [(["idle>0.3"], "true", 3), ([], "true", 0), (["idle>0.3"], "false", 1)]
)
def test_a_condition_that_holds_gives_3_only_after_a_good_job(monkeypatch, tmp_path, holding, job, code):
    _with_analysis(monkeypatch, holding)
    done = CliRunner().invoke(main, ["run", "-o", str(tmp_path / "run"), "--fail-on", "idle>0.3", "--", job])
    assert done.exit_code == code


@pytest.mark.parametrize("error", [BadRecord("torn"), RuntimeError("a bug"), KeyboardInterrupt()])
def test_a_failing_analysis_leaves_the_exit_code_alone(monkeypatch, tmp_path, error):
    _with_analysis(monkeypatch, error)
    done = CliRunner().invoke(main, ["run", "-o", str(tmp_path / "run"), "--", "true"])
    assert done.exit_code == 0
    assert "record is kept in" in done.stderr


@pytest.mark.slow
def test_a_real_job_in_which_one_stage_is_slow_is_recorded_and_explained(ppdiag_run, repository, tmp_path):
    pytest.importorskip("torch")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-endpoint", "localhost:0"]
    job = [str(repository / "tests" / "jobs" / "sleeping_pipeline.py"), "--steps", "8", "--stage-factor", "2:2"]
    reports = ["--json", "found.json", "--html", "found.html", "--fail-on", "imbalance>10%"]
    done = ppdiag_run("-o", "run", *reports, "--", sys.executable, *launcher, "--rdzv-backend", "c10d", *job)
    assert done.returncode == 3, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [f"step {step}" for step in range(8)]
    verdict = json.loads((tmp_path / "found.json").read_text())["verdict"]
    assert (verdict["cause"], verdict["stage"]) == ("imbalance", 2)
    assert "Imbalance at stage 2\n" in done.stderr
    assert (tmp_path / "found.html").read_text().startswith("<!DOCTYPE html>")
