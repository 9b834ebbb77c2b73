"""The figure of the trade-off parses, and shows every plan and the memory that there is."""

from __future__ import annotations

import re
from itertools import pairwise
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


def test_the_labels_of_the_time_axis_are_as_far_apart_as_they_say():
    plans = [
        SimpleNamespace(tensor=1, pipeline=1, chunks=1, micro_batch=1, memory_bytes=(2.0**35,), step_s=step_s)
        for step_s in (15.3, 16.8)
    ]
    labels = re.findall(r"<!-- (1[0-9.]+) s -->", draw(plans, usable_bytes=2.0**36))
    gaps = {round(float(b) - float(a), 3) for a, b in pairwise(labels)}
    assert len(labels) >= 3
    assert len(gaps) == 1
