"""Ranges: their names, and when there are none."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ppdiag.hooks import nvtx as ranges
from ppdiag.hooks.recorder import compute_tail
from ppdiag.model import NONE, Kind

TOOL = Path(__file__).parents[1] / "tools" / "nvtx_tool.c"


class Domain:
    """Takes down what it is told, as a tool's would."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.told: list[str] = []
        self.prepared = 0

    def get_event_attributes(self, message: str, **_: Any) -> str:
        self.prepared += 1
        return message

    def push_range(self, attributes: str) -> None:
        self.open.append(attributes)
        self.told.append(attributes)

    def pop_range(self) -> None:
        self.open.pop()

    def start_range(self, attributes: str) -> str:
        self.told.append(attributes)
        return attributes

    def end_range(self, range_id: str) -> None:
        self.told.append(f"end of {range_id}")


def test_a_range_says_what_it_is_of_which_stage_and_microbatch() -> None:
    domain = Domain()
    found = ranges.Ranges(domain)
    found.push(compute_tail(Kind.BACKWARD, 0, (5, 2, 0), 0))
    found.push((0, 64, 0, 0, 1, 0, 5, 2, 0, 0, 0, 0, int(Kind.RECV), 0))
    found.push(compute_tail(Kind.OPTIMIZER, 0, (NONE, NONE, NONE), 0))
    assert domain.open == ["B stage 2 mb 5", "recv-wait stage 2 mb 5 from rank 1", "optimizer"]
    for _ in range(3):
        found.pop()
    assert domain.open == []


def test_attributes_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "MOST_PREPARED", 3)
    domain = Domain()
    found = ranges.Ranges(domain)
    for _ in range(10):
        for microbatch in range(3):
            found.push(compute_tail(Kind.FORWARD, 0, (microbatch, 0, 0), 0))
    assert domain.prepared == 3
    for microbatch in range(100):
        found.push(compute_tail(Kind.FORWARD, 0, (microbatch, 0, 0), 0))
        assert len(found._prepared) <= 3


def test_a_step_is_one_range_until_the_next_begins() -> None:
    domain = Domain()
    found = ranges.Ranges(domain)
    found.next_step(7)
    found.next_step(8)
    assert domain.told == ["step 7", "end of step 7", "step 8"]


def test_without_a_tool_there_are_no_ranges() -> None:
    pytest.importorskip("nvtx")
    assert ranges.open_ranges() is None


def test_without_the_package_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert ranges.open_ranges() is None


def test_an_older_package_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before_0_2_11 = SimpleNamespace(annotate=None)
    domain = SimpleNamespace(get_event_attributes=Domain().get_event_attributes)
    for package in (before_0_2_11, SimpleNamespace(get_domain=lambda _: domain)):
        monkeypatch.setitem(sys.modules, "nvtx", package)
        assert ranges.open_ranges() is None


def test_a_real_tool_sees_the_ranges(tmp_path: Any, checkout_environment: dict[str, str]) -> None:
    pytest.importorskip("nvtx")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    library = tmp_path / "tool.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, TOOL], check=True)
    code = """
        from ppdiag.hooks import nvtx
        from ppdiag.hooks.recorder import compute_tail
        ranges = nvtx.open_ranges()
        ranges.push(compute_tail(1, 0, (5, 2, 0), 0))
        ranges.pop()
    """
    environment = {**checkout_environment, "NVTX_INJECTION64_PATH": str(library)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines() == ["ppdiag: push F stage 2 mb 5", "ppdiag: pop"]
