"""The command group: what becomes of errors, of streams that cannot be written, and of the list of commands."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from ppdiag.cli import main
from ppdiag.commands import COMMANDS
from ppdiag.errors import NoPipelineFound

PPDIAG = f"{sys.executable} -m ppdiag"


@pytest.fixture
def shell(checkout_environment, tmp_path):
    def run(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", line], env=checkout_environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize("words", ["--help", "--version", "calc bubble -P 4 -M 8", "run --help"])
def test_a_full_disk_behind_stdout_is_one_line_and_6(shell, words):
    done = shell(f"{PPDIAG} {words} >/dev/full")
    assert done.returncode == 6
    assert done.stderr.startswith("ppdiag: cannot write to standard output: No space left on device")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", ["--help", "calc bubble -P 4 -M 8"])
def test_a_stdout_that_is_closed_is_one_line_and_6(shell, words):
    done = shell(f"{PPDIAG} {words} >&-")
    assert (done.returncode, done.stderr.count("\n")) == (6, 1)


@pytest.mark.parametrize("words", ["--help", "calc bubble -P 4 -M 8"])
def test_the_output_is_the_same_where_stderr_is_closed(shell, words):
    whole, closed = shell(f"{PPDIAG} {words}"), shell(f"{PPDIAG} {words} 2>&-")
    assert (closed.returncode, closed.stdout) == (0, whole.stdout)
    assert whole.stdout


def test_the_job_keeps_its_exit_code_where_nothing_can_be_said(shell):
    assert shell(f"{PPDIAG} run -o run -- sh -c 'exit 7' 2>/dev/full").returncode == 7
    assert shell(f"{PPDIAG} run -o run --json - -- sh -c 'exit 7' >/dev/full").returncode == 7


def test_a_file_made_while_a_stream_is_closed_does_not_take_its_place(shell, tmp_path):
    shell(f"{PPDIAG} env run >&- 2>&-")
    assert (tmp_path / "run" / "run.json").read_text().startswith("{")


def test_an_error_of_the_users_shows_no_traceback_even_on_request(monkeypatch):
    def fail(*_: object) -> None:
        raise NoPipelineFound("run: no pipeline stage was recorded")

    monkeypatch.setattr("ppdiag.outputs._diagnose", fail)
    done = CliRunner().invoke(main, ["-v", "analyze", "run"])
    assert done.exit_code == 4
    assert done.stderr.startswith("ppdiag: run: no pipeline stage was recorded (see ")
    assert done.stderr.count("\n") == 1


def test_a_file_that_the_system_refuses_is_one_line_and_4(monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "run/rank00000-0.spans")

    monkeypatch.setattr("ppdiag.outputs._diagnose", refuse)
    done = CliRunner().invoke(main, ["analyze", "run"])
    assert done.exit_code == 4
    assert done.stderr.startswith("ppdiag: run/rank00000-0.spans: Permission denied (see ")
    assert done.stderr.count("\n") == 1


def test_the_list_of_commands_cuts_no_sentence():
    text = " ".join(CliRunner().invoke(main, ["--help"], env={"COLUMNS": "80"}).stdout.split())
    for name in COMMANDS.names():
        first = " ".join((COMMANDS.load(name).help or "").split()).split(". ")[0]
        assert first.rstrip(".") in text


@pytest.mark.parametrize(("typed", "meant"), [("analyse", "analyze"), ("what-if", "whatif"), ("compair", "compare")])
def test_a_mistyped_command_gets_the_name_that_is_meant(typed, meant):
    done = CliRunner().invoke(main, [typed, "run"])
    assert done.exit_code == 2
    assert f"there is no command {typed!r}; did you mean {meant}?" in " ".join(done.stderr.split())


def test_a_command_like_no_other_is_guessed_at_by_nobody():
    done = CliRunner().invoke(main, ["xyz\x1b[2J"])
    assert (done.exit_code, "did you mean" in done.stderr) == (2, False)
    assert "\x1b" not in done.stderr


def test_a_home_that_cannot_be_written_is_nothing_to_talk_about(shell):
    done = shell(f"HOME=/proc XDG_CONFIG_HOME= XDG_CACHE_HOME= {PPDIAG} schedule 1f1b --svg out.svg >out.txt")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("command", "end"), [("check", "pretrain_gpt.py …"), ("plan", "--global-batch 1024")])
def test_an_example_in_a_help_is_one_line_to_copy(command, end):
    shown = CliRunner().invoke(main, [command, "--help"], terminal_width=50).output
    (example,) = [line for line in shown.splitlines() if line.startswith(f"      ppdiag {command} ")]
    assert example.endswith(end)
