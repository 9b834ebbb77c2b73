"""What ``ppdiag compare`` prints and returns, from runs written to disk."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ppdiag.analyzers import schedules
from ppdiag.cli import main
from tests.analyzers.factory import MS, Pipeline
from tests.analyzers.runs import write_run


def _by_rank(durations):
    def duration(op, rank, step):  # noqa: ARG001
        return durations[rank]

    return duration


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """a; b, whose stage 1 takes half as long again; c, which does twice the microbatches."""
    folder = tmp_path_factory.mktemp("runs")
    for name, factor, microbatches in (("a", 2, 4), ("b", 3, 4), ("c", 2, 8)):
        orders = schedules.order("1F1B", ranks=2, chunks=1, microbatches=microbatches)
        durations = {0: 10 * MS, 1: factor * 5 * MS}
        pipeline = Pipeline(orders, [0, 1], steps=7, tail=0, tail_of_all=True, duration=_by_rank(durations))
        (folder / name).mkdir()
        write_run(folder / name, pipeline.trace())
    return folder


def _compare(runs, *arguments):
    words = [str(runs / word) if word in "abc" else word for word in arguments]
    return CliRunner().invoke(main, ["compare", *words], env={"COLUMNS": "100"})


def test_the_headline_says_how_much_and_where(runs):
    done = _compare(runs, "a", "b")
    first, second = done.stdout.splitlines()[:2]
    # By hand: (4 + 1) * 20 + 1 = 101 ms; with 15 ms ops on stage 1: 10 + 4 * 30 + 10 + 1 = 141 ms.
    assert first == "B is 39.6 % slower than A"
    assert second == "  Most of it: work of stage 1 (+40.00 ms a step)"
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("conditions", "code"),
    [
        (["slower>0.05"], 3),
        (["slower>50%"], 0),
        (["host>0.01", "work>=10%"], 3),
        (["slower<0.5"], 2),
        (["idle>0.1"], 2),
        (["slower>5"], 2),
    ],
)
def test_conditions_decide_the_exit_code(runs, conditions, code):
    done = _compare(runs, "a", "b", *[word for text in conditions for word in ("--fail-on", text)])
    assert done.exit_code == code


def test_a_condition_that_holds_is_said_with_its_value(runs):
    assert _compare(runs, "a", "b", "-q", "--fail-on", "slower>5%").stderr == (
        "ppdiag: --fail-on slower>0.05 (slower is 0.396)\n"
    )


def test_the_faster_way_round_holds_no_condition(runs):
    assert _compare(runs, "b", "a", "--fail-on", "slower>=0").exit_code == 0


def test_a_condition_on_jobs_that_do_not_do_the_same_is_refused_after_the_table(runs):
    done = _compare(runs, "a", "c", "--fail-on", "slower>0.05")
    assert done.exit_code == 4
    assert "M (microbatches) 4 and 8" in done.stdout
    assert done.stderr.startswith("ppdiag: a step of ")
    assert "not-comparable" in done.stderr


def test_json_on_standard_output_is_alone_there(runs):
    found = json.loads(_compare(runs, "a", "b", "--json", "-").stdout)
    assert (found["outcome"], found["places"][0]["stage"]) == ("slower", 1)


def test_quiet_prints_nothing(runs):
    assert _compare(runs, "a", "b", "--quiet").output == ""


@pytest.mark.parametrize("width", ["40", "80"])
def test_no_line_is_wider_than_the_terminal(runs, width):
    words = ["compare", str(runs / "a"), str(runs / "c")]
    done = CliRunner().invoke(main, words, env={"COLUMNS": width})
    assert max(map(len, done.stdout.splitlines())) <= int(width)


def test_what_is_no_run_is_one_line(runs, tmp_path):
    done = CliRunner().invoke(main, ["compare", str(runs / "a"), str(tmp_path / "gone")])
    assert (done.exit_code, done.stderr.count("\n")) == (4, 1)
