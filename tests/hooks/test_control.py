"""Which steps are recorded, and whose command is obeyed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ppdiag.hooks import control, guard
from ppdiag.hooks.control import BLOCK_STEPS, Command, Control, read_command
from ppdiag.rundir import MODE_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, mode: int = 0o600, **command: object) -> str:
    path.write_text(json.dumps(command))
    path.chmod(mode)
    return str(path)


def test_a_command_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "control.json", id="a", steps=5, start=-1)
    assert read_command(path) == Command("a", 5, -1)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_command_that_others_could_have_written_is_not_obeyed(
    tmp_path: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_command(write(tmp_path / "control.json", mode, id="a", steps=5, start=3)) is None
    assert "it is not obeyed" in capsys.readouterr().err
    guard.reset()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
def test_a_command_of_another_user_is_not_obeyed(tmp_path: Path) -> None:
    path = write(tmp_path / "control.json", id="a", steps=5, start=3)
    os.chown(path, 12345, 12345)
    assert read_command(path) is None
    guard.reset()


def test_a_command_may_say_how_far_ranks_are_ahead(tmp_path: Path) -> None:
    path = write(tmp_path / "control.json", id="a", steps=5, start=9, ahead={"1": 4})
    assert read_command(path) == Command("a", 5, 9, {"1": 4})
    assert read_command(write(tmp_path / "torn.json", id="a", steps=5, start=9, ahead=[])) is None


def test_links_torn_files_and_nothing_are_no_command(tmp_path: Path) -> None:
    write(tmp_path / "real", id="a", steps=5, start=3)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "torn").write_text('{"id": "a", "st')
    (tmp_path / "other").write_text("[]")
    os.mkfifo(tmp_path / "pipe")  # nobody writes into it: opening it must not wait
    names = ("link", "torn", "other", "missing", "pipe")
    assert [read_command(str(tmp_path / name)) for name in names] == [None] * 5


def test_one_step_more_than_asked_for_is_recorded() -> None:
    command = Command("a", 3, 10)
    assert [step for step in range(20) if command.wants(step)] == [10, 11, 12, 13]
    assert not any(Command("a", 3, -1).wants(step) for step in range(20))


def test_windows_come_every_k_steps_and_not_at_the_start() -> None:
    every = Control("every:10:2")
    assert [step for step in range(35) if every.wants(step)] == [10, 11, 12, 20, 21, 22, 30, 31, 32]


def test_blocks_alternate_so_that_a_drift_evens_out() -> None:
    overhead = Control("overhead")
    blocks = [{overhead.wants(block * BLOCK_STEPS + i) for i in range(BLOCK_STEPS)} for block in range(8)]
    assert blocks == [{False}, {True}, {True}, {False}] * 2


def test_dormant_wants_nothing_before_a_command() -> None:
    assert not any(Control("dormant").wants(step) for step in range(100))


COUNTING = """
import sys, types
from ppdiag.hooks import optimizer
from ppdiag.hooks.recorder import RECORDER
RECORDER.asleep = True
ended = []
optimizer.at_step_end.append(lambda: ended.append(RECORDER.step))
first, second = object(), object()
for stepping in eval(sys.argv[1]):
    optimizer._begin(stepping, (), {}); optimizer._end(stepping, (), {})
print(ended)
"""


@pytest.mark.parametrize(
    ("stepping", "expected"),
    [("[first] * 3", "[0, 1, 2]"), ("[first, second] * 3", "[0, 1, 2]"), ("[first, first, second]", "[0, 1]")],
)
def test_steps_are_counted_asleep_as_awake(stepping: str, expected: str, checkout_environment: dict[str, str]) -> None:
    command = [sys.executable, "-S", "-c", COUNTING, stepping]
    done = subprocess.run(command, env=checkout_environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_no_mode_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODE_VARIABLE, raising=False)
    control.install()
    assert control._state["control"] is None
