from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.cells import cell_len
from rich.console import Console

from ppdiag.reports.terminal import render
from tests.reports.factory import (
    HOSTILE,
    make_diagnosis,
    make_late_host,
    make_single,
    make_slow_link,
    make_undecided,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppdiag.diagnosis import Diagnosis

GOLDEN = Path(__file__).parent / "golden"
MAKERS = {
    "heavy_stage": make_diagnosis,
    "late_host": make_late_host,
    "single": make_single,
    "slow_link": make_slow_link,
    "undecided": make_undecided,
}


def rendered(diagnosis: Diagnosis, width: int = 80) -> str:
    file = io.StringIO()
    render(diagnosis, Console(file=file, width=width, color_system=None))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


@pytest.mark.parametrize("name", MAKERS)
def test_text_at_80_columns_is_the_golden_one(name: str) -> None:
    """``UPDATE_GOLDEN=1 pytest tests/reports`` rewrites the golden files: read the difference before committing."""
    text = rendered(MAKERS[name]())
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [20, 40, 69, 70, 80, 200])
@pytest.mark.parametrize("make", MAKERS.values())
def test_no_line_is_wider_than_the_terminal(make: Callable[[], Diagnosis], width: int) -> None:
    assert max(map(cell_len, rendered(make(), width).splitlines())) <= width


def test_the_verdict_comes_first_and_says_what_where_how_much_and_how_sure() -> None:
    first, second, third = rendered(make_diagnosis()).splitlines()[:3]
    assert first == "Imbalance at stage 2"
    assert second == "  It takes 28 % of the step time, over all ranks. How sure: measured."
    assert third.startswith("  Stage 2 on node works 2.0 times as long")


def test_the_bar_shows_each_share_by_its_length() -> None:
    line = next(line for line in rendered(make_diagnosis()).splitlines() if line.startswith("   >2"))
    bar = line.split("%  ")[1]
    assert (bar.count("."), bar.count("o"), bar.count("h")) == (33, 5, 1)  # of 39: 84.5 %, 13.4 %, 2.1 %


@pytest.mark.parametrize("width", [40, 80])
def test_no_control_character_of_the_record_reaches_the_terminal(width: int) -> None:
    text = rendered(make_diagnosis(text=HOSTILE), width)
    assert not {c for c in text if c != "\n" and not c.isprintable()}
    assert r"\x1b" in text


def test_markup_in_a_name_is_shown_as_it_stands() -> None:
    text = rendered(make_diagnosis(text="[red]x[/red][/]:warning:"), 200)
    assert "/runs/[red]x[/red][/]:warning:/ppdiag-run" in text


def test_many_stages_leave_a_short_table_that_says_so() -> None:
    lines = rendered(make_late_host()).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("stage"))
    assert lines[start + 1].split()[0] == ">41"  # the stage of the verdict's rank
    assert lines[start + 2].split()[0] == "40"  # the slowest stage
    assert lines[start + 14] == "52 more stages are left out; shown are the slowest and the most idle."


def test_no_colour_is_sent_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    render(make_diagnosis(), Console(file=file, width=80, force_terminal=True))
    assert "\x1b[3" not in file.getvalue()  # bold and dim may stay: they are no colour


def test_a_dumb_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    render(make_diagnosis(), Console(file=file, width=80, force_terminal=True))
    assert "\x1b" not in file.getvalue()


def test_a_stream_that_knows_only_ascii_gets_ascii() -> None:
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding="ascii")
    render(make_slow_link(), Console(file=file, width=80))
    file.flush()
    text = buffer.getvalue().decode("ascii")
    assert r"\u8282\u70b9" in text
    assert "up to 14.0 us" in text


def test_links_are_shown_only_where_communication_matters() -> None:
    assert "Links between stages" in rendered(make_slow_link())
    assert "Links between stages" not in rendered(make_diagnosis())


def test_a_size_that_was_not_recorded_is_no_zero() -> None:
    diagnosis = make_slow_link()
    links = tuple(replace(link, bytes=0, bandwidth_bytes_per_s=None) for link in diagnosis.links)
    assert "0 B" not in rendered(replace(diagnosis, links=links))


def test_numbers_that_are_not_known_are_dashes() -> None:
    diagnosis = make_diagnosis()
    stage = replace(diagnosis.stages[0], forward_s=float("nan"), busy_fraction=float("nan"))
    text = rendered(replace(diagnosis, stages=(stage,), replay_error_fraction=float("nan")))
    assert "nan" not in text.lower().replace("unexplained", "")


def test_of_a_single_step_no_spread_is_told() -> None:
    diagnosis = make_diagnosis()
    one = replace(diagnosis, steps=replace(diagnosis.steps, count=1, dropped=1))
    assert "one step, so that its spread is not known; 1 dropped" in " ".join(rendered(one).split())
    assert "percentile" not in rendered(one)
