"""A job that stands still: the reports say so before what its steps lost."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from ppdiag.diagnosis import STUCK, Advice, Symptom
from ppdiag.reports import REPORTS
from ppdiag.reports.words import what_first
from tests.reports.factory import make_diagnosis

if TYPE_CHECKING:
    from pathlib import Path

    from ppdiag.diagnosis import Diagnosis


def stuck() -> Diagnosis:
    advice = Advice("Look at rank 0", "its stack", None, "")
    return replace(
        make_diagnosis(),
        symptoms=(Symptom(STUCK, "Stuck in a wait for a message", "critical", ("rank 1",), (advice,)),),
    )


def test_the_headline_of_a_hung_job_is_the_hang() -> None:
    assert what_first(stuck()) == "Stuck in a wait for a message"
    assert what_first(make_diagnosis()) != "Stuck in a wait for a message"


def test_the_terminal_begins_with_the_hang_and_gives_no_share_of_a_step_for_it() -> None:
    stream = io.StringIO()
    REPORTS.load("terminal")(stuck(), Console(file=stream, width=100))
    assert stream.getvalue().splitlines()[0] == "Stuck in a wait for a message"
    assert "of the step time, over all ranks. How sure" not in stream.getvalue()


def test_the_page_begins_with_the_hang(tmp_path: Path) -> None:
    REPORTS.load("html")(stuck(), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<h1>Stuck in a wait for a message</h1>" in page
    assert '<p class="share">' not in page
