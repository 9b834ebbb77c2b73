"""The figure of the trade-off parses, and shows every plan and the memory that there is."""

from __future__ import annotations

from types import SimpleNamespace
from xml.etree import ElementTree as ET

from ppdiag.reports.plan_figure import draw

PLANS = [
    SimpleNamespace(tensor=8, pipeline=length, chunks=1, micro_batch=1, memory_bytes=(2.0**35,), step_s=1.0 + length)
    for length in (1, 4, 8)
]


def test_each_length_of_pipeline_has_its_mark():
    root = ET.fromstring(draw(PLANS, usable_bytes=2.0**36))
    assert root.tag.endswith("svg")
    text = draw(PLANS, usable_bytes=2.0**36)
    assert all(f"<!-- PP = {length} -->" in text for length in (1, 4, 8))


def test_no_plan_is_still_a_figure():
    assert ET.fromstring(draw([], usable_bytes=2.0**36)).tag.endswith("svg")
