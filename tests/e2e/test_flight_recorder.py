"""A real hang of torch's gloo, as its own Flight Recorder dumps it."""

from __future__ import annotations

import json

import pytest

from ppdiag.analyzers.hang import diagnose_hang
from ppdiag.analyzers.sources import read_recording
from ppdiag.analyzers.sources.flight_recorder import Dumps
from ppdiag.hang import RootKind
from tests.e2e.conftest import torchrun


@pytest.mark.slow
def test_the_rank_that_does_not_come_to_a_collective_is_named(tmp_path):
    torchrun(3, "stands_still.py", str(tmp_path))
    recording = read_recording([tmp_path])
    assert isinstance(recording, Dumps)
    found = diagnose_hang(recording)
    assert found.world_size == 3
    assert (found.roots[0].kind, found.roots[0].ranks, found.roots[0].held_up) == (RootKind.HOST, (2,), 2)
    assert (found.stuck[0].operation.name, found.stuck[0].operation.sequence) == ("all_reduce", 3)
    assert json.loads((tmp_path / "dump_0.json").read_text())["version"] >= "2.1"
