from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ppdiag.model import Flag, Kind
from tests.analyzers.symptoms.cases import TORCH, evidence, symptom, told
from tests.analyzers.test_hand_calculations import pipeline
from tests.reports.factory import make_diagnosis


def received(missing: int, *, framework: str = TORCH, torch: str = "2.6.0"):
    """GPipe of 2 ranks, 5 steps of 2 microbatches: rank 1 has 10 receives."""
    trace = told(pipeline().trace(), torch=torch)
    spans = trace.spans.copy()
    own = ((spans["kind"] == Kind.RECV) & (spans["rank"] == 1)).nonzero()[0]
    assert len(own) == 10
    spans["flags"][own[:missing]] |= np.uint16(Flag.NEVER_WAITED)
    diagnosis = make_diagnosis()
    diagnosis = replace(diagnosis, job=replace(diagnosis.job, framework=framework))
    return symptom("receives-not-waited-for", evidence(diagnosis, replace(trace, spans=spans)))


def test_receives_without_a_wait_are_counted_and_an_old_torch_is_named() -> None:
    seen = received(5)
    assert seen is not None
    assert seen.evidence == ("rank 1: no wait for 5 of 10 receives (50.0 %)", "torch 2.6")
    assert seen.advice[0].how == "torch 2.8 or later"
    own_code = received(5, framework="hand-written", torch="2.9.1")
    assert own_code is not None
    assert "work.wait()" in own_code.advice[0].how


@pytest.mark.parametrize("seen", [received(0), received(5, torch="2.13.0")], ids=["all waited for", "a new torch"])
def test_otherwise_nothing_is_said(seen) -> None:
    assert seen is None
