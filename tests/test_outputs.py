"""What is done with a diagnosis: files, standard output, conditions."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppdiag import outputs
from ppdiag.conditions import parse_condition
from ppdiag.errors import OutputFailed
from ppdiag.outputs import Wanted, check_targets, report, terminal, writing_text
from tests.reports.factory import make_diagnosis


@pytest.fixture(autouse=True)
def found(monkeypatch):
    diagnosis = make_diagnosis()
    monkeypatch.setattr(outputs, "_diagnose", lambda *_: diagnosis)
    return diagnosis


def test_all_that_is_wanted_is_written(tmp_path, capsys):
    page, data = tmp_path / "page.html", tmp_path / "found.json"
    assert report([Path("run")], Wanted(str(data), page)) == []
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert data.read_text(encoding="utf-8").startswith("{")
    assert capsys.readouterr().out.startswith("Imbalance at stage 2\n")


def test_nothing_is_printed_that_was_not_asked_for(capsys):
    report([Path("run")], Wanted(summary=False))
    assert capsys.readouterr() == ("", "")


def test_the_summary_goes_to_stderr_where_stdout_is_the_jobs(capsys):
    report([Path("run")], Wanted(), summary_on_stderr=True)
    out, err = capsys.readouterr()
    assert (out, err.startswith("Imbalance at stage 2\n")) == ("", True)


def test_no_line_ends_in_blanks_where_the_output_is_no_terminal(capsys):
    report([Path("run")], Wanted())
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []


def test_conditions_that_hold_are_told_with_their_value(found):
    conditions = (parse_condition("imbalance>1%"), parse_condition("host>0.99"))
    expected = f"imbalance>0.01 (imbalance is {found.why.imbalance:.3g})"
    assert report([Path("run")], Wanted(conditions=conditions, summary=False)) == [expected]


@pytest.mark.parametrize("kind", ["html", "json"])
def test_no_directory_is_made_for_a_file(tmp_path, kind):
    target = tmp_path / "new" / f"out.{kind}"
    asked = Wanted(html=target) if kind == "html" else Wanted(json=str(target))
    with pytest.raises(OutputFailed, match="No such file or directory"):
        report([Path("run")], asked)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_does_not_cost_the_summary(tmp_path, capsys):
    with pytest.raises(OutputFailed):
        report([Path("run")], Wanted(html=tmp_path / "none" / "page.html"))
    assert capsys.readouterr().out.startswith("Imbalance at stage 2\n")


def test_a_report_that_could_not_be_written_is_refused_before_the_job(tmp_path):
    (tmp_path / "there").mkdir()
    check_targets(Wanted("-", tmp_path / "there" / "page.html"), run_directory=tmp_path / "run")
    check_targets(Wanted(html=tmp_path / "run" / "page.html"), run_directory=tmp_path / "run")
    with pytest.raises(OutputFailed, match=r"there is no directory .*gone; the job was not started"):
        check_targets(Wanted(str(tmp_path / "gone" / "found.json")), run_directory=tmp_path / "run")


def test_a_text_is_shown_in_what_the_stream_can_hold(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with terminal() as console:
        assert console.encoding == "ascii"


def test_a_dash_is_standard_output(capsys):
    with writing_text("-") as stream:
        stream.write("text\n")
    assert capsys.readouterr().out == "text\n"


def test_progress_is_shown_at_terminals_only(monkeypatch):
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: False))
    with outputs.progress() as progress:
        assert progress is None


@pytest.mark.parametrize(("term", "width"), [("dumb", 40), ("xterm", 40)])
def test_a_terminal_has_its_own_width_and_a_dumb_one_no_progress(monkeypatch, term, width):
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 20, width, 0, 0))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", term)
    with os.fdopen(follower, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "__stdout__", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr("rich.console._STD_STREAMS", (stream.fileno(),))
        with terminal() as console:
            assert console.width == width
        with outputs.progress() as progress:
            assert (progress is None) == (term == "dumb")
    os.close(leader)


def test_progress_takes_one_line_whatever_is_being_done(monkeypatch):
    leader, follower = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(follower, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with outputs.progress() as tell:
            assert tell is not None
            tell("reading ranks", 1, 2)
            tell("replaying the step", 3, 4)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(leader, 1 << 16):
            shown += part
    os.close(leader)
    text = shown.decode()
    assert any("replaying the step" in frame and "75%" in frame for frame in text.split("\x1b[2K"))
    assert text.count("\x1b[1A") == 1, "the cursor goes up once, when the line is taken back"
