"""Drawings of schedules: every op once, nothing beyond the width, pictures that parse."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from ppdiag.reports.schedule_drawing import Box, Picture, page, png, svg, text

BOXES = (
    Box(0, "F", 0, 0, 0.0, 1.0),
    Box(0, "B", 0, 0, 4.0, 6.0),
    Box(1, "F", 0, 0, 1.0, 2.0),
    Box(1, "B", 0, 0, 2.0, 4.0),
)
PICTURE = Picture("1F1B: P=2 V=1 M=1", 2, 1, BOXES, (("bubble / total", "50.0 %"),))
SVG = "{http://www.w3.org/2000/svg}"


def test_each_op_is_its_letter_and_microbatch_and_idle_is_dots():
    assert text([PICTURE], width=80).splitlines() == [
        "1F1B: P=2 V=1 M=1",
        "rank 0  F0 .........B0---",
        "rank 1  ...F0 B0--- ......",
        "",
        "  bubble / total  50.0 %",
    ]


def test_a_long_schedule_stays_within_the_width():
    boxes = tuple(Box(0, "FB"[i % 2], i % 2, i // 2, float(i), i + 1.0) for i in range(500))
    lines = text([Picture("long", 1, 2, boxes, ())], width=100).splitlines()
    assert max(map(len, lines)) <= 100
    assert set(lines[1].split()[-1]) <= set("Ffb.")


def test_two_schedules_share_one_time_axis():
    short = Picture("short", 2, 1, BOXES[:1], ())
    lines = text([PICTURE, short], width=80).splitlines()
    assert lines[lines.index("short") + 1] == "rank 0  F0"


def test_the_svg_has_one_box_an_op_and_says_what_it_is():
    root = ET.fromstring(svg([PICTURE, PICTURE]))
    titles = [element.text for element in root.iter(f"{SVG}title")]
    assert len(titles) == 8
    assert titles[0] == "F0: 0 to 1"
    assert root.get("aria-label") == "1F1B: P=2 V=1 M=1; 1F1B: P=2 V=1 M=1"


def test_boxes_stay_inside_the_svg():
    root = ET.fromstring(svg([PICTURE]))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
        assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height


def test_the_page_runs_and_needs_no_network():
    html = page([PICTURE])
    assert "animation-delay:8.00s" in html  # 4 of 6, played in 12 s
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "<td>50.0 %</td>" in html


@pytest.mark.parametrize("count", [1, 3])
def test_the_png_is_one(count):
    assert png([PICTURE] * count).startswith(b"\x89PNG")
