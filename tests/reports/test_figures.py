from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from ppdiag.reports.figures import DARK, compute_times, step_times
from tests.reports.factory import make_diagnosis, make_late_host, make_single

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppdiag.diagnosis import Diagnosis
    from ppdiag.reports.figures import Theme


@pytest.mark.parametrize("draw", [compute_times, step_times])
@pytest.mark.parametrize("make", [make_diagnosis, make_late_host, make_single])
def test_each_chart_is_an_svg(draw: Callable[[Diagnosis, Theme], str], make: Callable[[], Diagnosis]) -> None:
    root = ET.fromstring(draw(make(), DARK))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_text_of_the_record_changes_no_chart() -> None:
    plain, named = make_diagnosis(text="a"), make_diagnosis(text="节点\x1b")
    assert drawn_paths(compute_times(plain)) == drawn_paths(compute_times(named))


def drawn_paths(svg: str) -> list[str]:
    return [path.attrib.get("d", "") for path in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")]


def test_a_hundred_thousand_steps_make_a_small_chart() -> None:
    diagnosis = replace(make_diagnosis(), step_times_s=tuple(0.5 + 0.001 * (i % 89) for i in range(100_000)))
    assert len(step_times(diagnosis)) < 300_000


def test_figures_need_no_pyplot_and_no_display() -> None:
    code = "import sys, ppdiag.reports.figures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
