from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ppdiag.silence import why_silent

if TYPE_CHECKING:
    from pathlib import Path


def _run(folder: Path, command: str, *processes: tuple[int, str, str]) -> str:
    """A run directory of a command and of processes (pid, argv, event); what is said of it."""
    (folder / "run.json").write_text(json.dumps({"argv": command.split()}))
    lines = [
        json.dumps({"pid": pid, "argv": argv.split(), "executable": "/opt/python", "event": event})
        for pid, argv, event in processes
    ]
    (folder / "processes.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return why_silent(folder)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("python -S train.py", "-S keeps Python"),
        ("python3.11 -u -I train.py", "-I makes Python ignore PYTHONPATH"),
        ("/opt/bin/python -sE train.py", "-E makes Python ignore PYTHONPATH"),
        ("torchrun --no-python python -S train.py", "-S keeps Python"),
        ("env -i python train.py", "env -i throws"),
        ("env - PATH=/bin python train.py", "env -i throws"),
        ("docker run image python train.py", "docker may not hand"),
        ("sudo torchrun train.py", "sudo may not hand"),
    ],
)
def test_what_keeps_us_out_is_found_in_the_command(tmp_path, command, named):
    assert named in _run(tmp_path, command)


@pytest.mark.parametrize(
    "command",
    [
        "python train.py -S",
        "python -m train -I",
        "python -c pass -E",
        "python -X dev train.py",
        "python -W ignore train.py",
    ],
)
def test_arguments_of_the_script_are_no_options_of_python(tmp_path, command):
    assert "In the command" not in _run(tmp_path, command)


def test_no_python_at_all_is_said(tmp_path):
    assert "No Python process" in _run(tmp_path, "true")


def test_python_without_torch_is_said_with_its_interpreter(tmp_path):
    text = _run(tmp_path, "python train.py", (7, "python train.py", "armed"))
    assert "1 process of /opt/python" in text
    assert "none imported torch.distributed" in text


def test_a_launcher_whose_workers_stayed_away_is_told_from_workers(tmp_path):
    events = [(7, "/bin/python /bin/torchrun train.py", "armed"), (7, "/bin/python /bin/torchrun train.py", "torch")]
    assert "none of the processes that it started" in _run(tmp_path, "torchrun train.py", *events)


def test_torch_without_a_process_group_is_said(tmp_path):
    events = [(7, "python train.py", "armed"), (7, "python train.py", "torch")]
    assert "no process group was used" in _run(tmp_path, "python train.py", *events)


def test_a_directory_of_which_nothing_is_known_is_no_error(tmp_path):
    assert "No Python process" in why_silent(tmp_path)


def test_a_torn_line_is_passed_over(tmp_path):
    (tmp_path / "processes.jsonl").write_text(
        '{"pid": 1, "event": "armed", "executable": "/opt/python"}\n{"pid": 2, "ev'
    )
    assert "1 process of /opt/python" in why_silent(tmp_path)
