"""Text that fits: what narrow terminals do without, and what files get whole."""

from __future__ import annotations

import pytest

from ppdiag.reports.fitting import NARROWEST, columns, paragraph, table

ROWS = [["name", "time", "range", "kept"], ["gpipe", "20 ms", "19 ms to 21 ms, by steps", "4"]]


@pytest.fixture
def terminal(monkeypatch):
    return lambda width: monkeypatch.setenv("COLUMNS", str(width))


def test_a_wide_terminal_has_the_whole_table(terminal):
    terminal(60)
    assert table(ROWS, gives_up=("kept", "range"), left=1) == [
        "name    time                     range  kept",
        "gpipe  20 ms  19 ms to 21 ms, by steps     4",
    ]


def test_a_narrow_terminal_does_without_the_columns_that_matter_least(terminal):
    terminal(42)
    assert table(ROWS, gives_up=("kept", "range"), left=1) == [
        "name    time                     range",
        "gpipe  20 ms  19 ms to 21 ms, by steps",
    ]


def test_what_a_table_does_not_give_up_stays(terminal):
    terminal(NARROWEST)
    assert table([["one", "two"], ["x" * 30, "y" * 30]], gives_up=()) == [
        f"{'one':>30}  {'two':>30}",
        f"{'x' * 30}  {'y' * 30}",
    ]


def test_a_file_gets_the_whole_table(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    assert table([["a", "b"], ["x" * 200, "y" * 200]], gives_up=("b",))[1] == f"{'x' * 200}  {'y' * 200}"


def test_a_paragraph_is_as_wide_as_the_terminal_and_no_wider_than_is_read_well(terminal):
    text = "word " * 40
    terminal(60)
    assert max(map(len, paragraph(text, 100, first="  why  ", rest=" " * 7).splitlines())) in range(52, 61)
    terminal(300)
    assert max(map(len, paragraph(text, 100).splitlines())) in range(92, 101)
    terminal(5)
    assert columns(100) == NARROWEST
