"""The comparison in a terminal: what it calls most of a change, and what was not measured."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ppdiag.comparison import Change, Comparison, PlaceChange, Side, StageChange, What
from ppdiag.reports.comparison import render
from tests.reports.factory import make_diagnosis


def host(rank: int, change_s: float) -> PlaceChange:
    return PlaceChange(What.HOST, stage=None, rank=rank, link=None, group=None, change_s=change_s)


def rendered(*places: PlaceChange, width: int = 100) -> str:
    """A step of 1 s that became 100 ms longer, with these places."""
    side = Side("run", make_diagnosis().job, 10, 1.0, 1.0)
    step = Change("step", 1.0, 1.1, 0.09, 0.11)
    stages = (StageChange(0, (0.01, 0.0, 0.0), (0.01, 0.02, 0.0)),)
    found = Comparison(side, side, step, (step,), places, stages, same_work=True, notes=())
    file = io.StringIO()
    render(found, Console(file=file, width=width, color_system=None))
    return file.getvalue()


@pytest.mark.parametrize(("change_s", "said"), [(0.09, "Most of it"), (0.04, "The largest part")])
def test_only_more_than_half_of_a_change_is_most_of_it(change_s: float, said: str) -> None:
    assert f"{said}: host of rank 1 (+{change_s:.2f} s a step)" in rendered(host(1, change_s))


def test_a_larger_change_the_other_way_is_no_part_of_it() -> None:
    text = rendered(host(2, -0.2), host(1, 0.09))
    assert "Most of it: host of rank 1" in text
    assert "Most of it" not in rendered(host(2, -0.2))


def test_ops_that_one_run_lacks_have_a_dash_for_their_time() -> None:
    row = next(line for line in rendered().splitlines() if line.split()[:1] == ["0"])
    assert row.split() == ["0", "10.0", "ms", "10.0", "ms", "-", "20.0", "ms", "+200.0", "%"]


@pytest.mark.parametrize(
    ("width", "names"),
    [
        (80, ["why", "A", "B", "change", "95", "%", "interval", "of", "A's", "step"]),
        (40, ["why", "A", "B", "change", "of", "A's", "step"]),
        (30, ["why", "A", "B", "change"]),
    ],
)
def test_a_narrow_terminal_keeps_both_sides_longer_than_the_interval(width: int, names: list[str]) -> None:
    lines = rendered(width=width).splitlines()
    assert next(line for line in lines if line.split()[:1] == ["why"]).split() == names
