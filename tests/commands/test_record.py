from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from ppdiag.cli import main
from ppdiag.launch import note_end, prepare_run_directory
from ppdiag.live import first_step, steps_ahead
from ppdiag.rundir import CONTROL_FILE, encode_header, rank_file_name

if TYPE_CHECKING:
    from pathlib import Path

STEP_NS = 1_000_000


def record(path: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["record", str(path), "--patience", "3", *options])


class Ranks:
    """Ranks that answer as the hooks do, from a thread."""

    def __init__(self, path: Path, steps: list[int], *, mode: str = "dormant", late: int = 0) -> None:
        self.path, self.steps, self.late = path, steps, late
        for rank in range(len(steps)):
            header = encode_header({"rank": rank, "world_size": len(steps)})
            (path / rank_file_name(rank, 0, "spans")).write_bytes(header)
            self.say(rank, type="fact", name="mode", value=mode)

    def say(self, rank: int, **word: object) -> None:
        with (self.path / rank_file_name(rank, 0, "jsonl")).open("a") as file:
            file.write(json.dumps(word) + "\n")

    def command(self) -> dict[str, int]:
        while not (self.path / CONTROL_FILE).exists():
            time.sleep(0.01)
        return dict(json.loads((self.path / CONTROL_FILE).read_text()))

    def answer(self) -> None:
        asked = self.command()
        facts = {"type": "control", "id": asked["id"], "unix_ns": time.time_ns()}
        for rank, step in enumerate(self.steps):
            self.say(rank, **facts, step=step, start=-1, step_ns=STEP_NS)
        while self.command()["start"] < 0:
            time.sleep(0.01)
        start = self.command()["start"]
        for rank in range(len(self.steps)):
            self.say(rank, **facts, step=start + self.late * rank, awake=True)
            self.say(rank, **facts, step=start + asked["steps"] + 1, awake=False)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return prepare_run_directory(tmp_path / "run", ["train"])


def answered(job: Path, ranks: Ranks) -> Result:
    thread = threading.Thread(target=ranks.answer, daemon=True)
    thread.start()
    done = record(job, "--steps", "3")
    thread.join(5)
    return done


def test_a_window_is_agreed_on_that_no_rank_has_reached(job: Path) -> None:
    done = answered(job, Ranks(job, [7, 8]))
    assert done.exit_code == 0, done.output
    assert f"done: ppdiag analyze {job}" in done.output
    assert not (job / CONTROL_FILE).exists()


def test_ranks_that_were_late_are_said(job: Path) -> None:
    assert "1 ranks saw the command late" in answered(job, Ranks(job, [7, 8], late=1)).output


def test_the_first_step_is_ahead_of_the_fastest_rank_by_two_seconds_of_steps() -> None:
    # step 7 ended 1 s ago and steps take half a second: 2 have passed, 4 are ahead, then 2 and the one that runs
    slow = {"step": 3, "step_ns": 10_000_000_000, "unix_ns": 0}
    assert first_step([slow, {"step": 7, "step_ns": 500_000_000, "unix_ns": 0}], 1_000_000_000) == 7 + 1 + 2 + 6


def test_ranks_that_were_attached_to_in_different_steps_are_told_how_far_they_are_ahead(job: Path) -> None:
    ranks = Ranks(job, [7, 3], mode="attached")
    told: list[dict[str, object]] = []
    command = ranks.command

    def listening() -> dict[str, int]:
        told.append(dict(command()))
        return command()

    ranks.command = listening  # type: ignore[method-assign]
    assert answered(job, ranks).exit_code == 0
    assert told[0]["ahead"] == {}
    assert told[-1]["ahead"] == {"0": 4, "1": 0}


@pytest.mark.parametrize(
    ("ends_ms", "steps", "ahead"),
    [
        ([0, 0, 0], [5, 5, 5], {0: 0, 1: 0, 2: 0}),
        # the last stage ends first, up to 30 of 100 ms before; one answered a step later
        ([30, 15, 100], [12, 9, 5], {0: 8, 1: 5, 2: 0}),
        ([980, 990, 10], [9, 9, 0], {0: 0, 1: 0, 2: 1}),
        ([0, 50], [5, 5], None),
    ],
)
def test_counts_of_ranks_differ_by_whole_steps(ends_ms: list[int], steps: list[int], ahead: dict[int, int]) -> None:
    now_ns = 1_800_000_000_000_000_000
    asked = {
        rank: {"step": step, "step_ns": 100_000_000, "unix_ns": now_ns + end_ms * 1_000_000}
        for rank, (end_ms, step) in enumerate(zip(ends_ms, steps, strict=True))
    }
    assert steps_ahead(asked) == ahead


def test_silent_ranks_are_named(job: Path) -> None:
    Ranks(job, [1, 1])
    done = record(job)
    assert done.exit_code == 6
    assert "2 ranks (0, 1) did not say in which step they are" in done.output
    assert not (job / CONTROL_FILE).exists()


def test_a_job_that_has_not_begun_is_said_not_to_have_reported(job: Path) -> None:
    done = record(job)
    assert done.exit_code == 6
    assert f"no rank has reported in {job}: does the job run" in done.output
    assert "()" not in done.output


def test_a_job_that_records_by_itself_is_left_alone(job: Path) -> None:
    Ranks(job, [1], mode="every:10:5")
    done = record(job)
    assert done.exit_code == 6
    assert "was not started with --dormant" in done.output


def test_a_job_that_has_ended_is_said(job: Path) -> None:
    note_end(job, 0)
    done = record(job)
    assert done.exit_code == 6
    assert "has ended" in done.output


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    assert record(tmp_path / "nothing").exit_code == 4
    assert record(tmp_path).exit_code == 4


def test_a_patience_that_is_no_number_is_refused(tmp_path: Path) -> None:
    done = record(tmp_path, "--patience", "nan")
    assert done.exit_code == 2
    assert "'nan' is not a number" in done.output
