"""``ppdiag whatif`` prints a ranked table or JSON, and refuses in one line what cannot be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from ppdiag.analyzers import schedules
from ppdiag.cli import main
from ppdiag.model import Kind
from tests.analyzers.factory import MS, Pipeline
from tests.analyzers.runs import write_run

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

    from ppdiag.analyzers.schedules import Op


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four stages of 10 ms F and 20 ms B, of which the third takes twice as long; 1F1B of 8 microbatches."""

    def duration(op: Op, _rank: int, _step: int) -> int:
        return (10 if op.kind is Kind.FORWARD else 20) * MS * (2 if op.stage == 2 else 1)

    folder = tmp_path_factory.mktemp("run")
    orders = schedules.order("1F1B", ranks=4, chunks=1, microbatches=8)
    write_run(folder, Pipeline(orders, [0, 1, 2, 3], duration=duration, steps=5).trace())
    return folder


def whatif(run_dir: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["whatif", str(run_dir), *options])


def test_without_options_the_single_changes_are_ranked(run_dir: Path) -> None:
    done = whatif(run_dir)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    # stage 2 starts after two forwards (20), works 8 x 60, waits 10 for its first gradient; two backwards (40) follow
    assert lines[0] == "1F1B with P=4, V=1, M=8: 3 steps of 551 ms (median)"
    rows = lines[3 : lines.index("", 3)]
    change = [float(row.partition(" ms  ")[2].split(" %")[0]) for row in rows if " ms  " in row]
    assert change == sorted(change)
    assert any(row.startswith("stage 2 repaired") for row in rows)


def test_options_are_one_change_and_lists_are_alternatives(run_dir: Path) -> None:
    done = whatif(
        run_dir, "--json", "--microbatches", "8,16", "--schedule", "gpipe", "--schedule", "interleaved:2",
        "--repair", "stage:2", "--network", "x10", "--link", "0-1=x2", "--overlap", "--checkpoint",
    )  # fmt: skip
    found = json.loads(done.output)
    assert found["schema"] == "ppdiag.whatif/1"
    assert found["run"]["microbatches"] == 8
    others = "link 0-1 x2, network x10, overlapped transfers, activation checkpointing, stage 2 repaired"
    assert {row["change"] for row in found["predictions"]} == {
        f"{m} microbatches, {name}, {others}" for m in (8, 16) for name in ("gpipe", "interleaved with 2 stages a rank")
    }


def test_the_best_split_is_given_with_its_layers(run_dir: Path) -> None:
    # 40 units of work, 16 of them on stage 2 of 551 ms: near 10 on each, which takes 11 x 37.5 ms
    done = json.loads(whatif(run_dir, "--json", "--balance", "--layers-now", "8,8,8,8").output)
    row = done["predictions"][0]
    assert sum(row["layers"]) == 32
    assert row["gain_fraction"] == pytest.approx(1 - 11 * 37.5 / 551, abs=0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--microbatches", "0"], "cannot read --microbatches '0'"),
        (["--schedule", "zigzag"], "'zigzag' is no schedule; choose from"),
        (["--schedule", "zb-2p"], "is found by a search for each model's times"),
        (["--schedule", "interleaved:0"], "write NAME or NAME:V"),
        (["--schedule", ":2"], "write NAME or NAME:V"),
        (["--schedule", "zbv:3"], "ZB-V has 2 stages a rank, not 3"),
        (["--layers", "8,8"], "the run has 4 stages, and 8,8 is for 2"),
        (["--link", "0-1"], "write two stages and how many times as fast"),
        (["--link", "0-3=x2"], "no message goes between stages 0 and 3"),
        (["--network", "x0"], "from x0.001 to x1000000"),
        (["--repair", "stage:4"], "the run has stages 0 to 3, not 4"),
        (["--repair", "everything"], "write stage:N or rank:N"),
        (["--memory-limit", "nan"], "'nan' is not a number"),
        (["--memory-limit", "80"], "no readings of the device's memory"),
        (["--microbatches", "1000000"], "is too large to replay"),
        (["--balance"], "give --layers-now, or record with ppdiag run --layer-times"),
        (["--balance", "--layers", "1,2,3,4", "--layers-now", "1,2,3,4"], "use one of them"),
        (["--keep-batch"], "--keep-batch needs --microbatches"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(run_dir: Path, options: list[str], words: str) -> None:
    done = whatif(run_dir, *options)
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output


def test_a_layout_that_is_stated_must_be_one_of_so_many_ranks(run_dir: Path) -> None:
    assert whatif(run_dir, "--pp", "4").exit_code == 0
    done = whatif(run_dir, "--pp", "3")
    assert done.exit_code == 2
    assert "has 3 ranks, and the job 4" in done.output
