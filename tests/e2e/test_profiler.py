"""One run, two recorders: torch.profiler's traces of a job and ppdiag's own record of it give the same diagnosis."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest

from ppdiag.analyzers import sources
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import PIPELINE_KINDS, Kind
from tests.e2e.conftest import read_trace, torch_runs, torchrun

if TYPE_CHECKING:
    from pathlib import Path

    from ppdiag.trace import Trace

RANKS, MICROBATCHES, STEPS = 4, 8, 8
CHUNKS = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
WITHIN = 0.05
"""Of the step time: by so much each cause may differ."""


def ops_of(trace: Trace) -> Counter[tuple[int, str]]:
    spans = trace.spans[[span["kind"] in PIPELINE_KINDS for span in trace.spans]]
    return Counter((int(span["rank"]), Kind(span["kind"]).name) for span in spans)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", CHUNKS)
def test_both_records_of_a_run_give_one_diagnosis(tmp_path: Path, schedule: str) -> None:
    if not torch_runs(schedule):
        pytest.skip("this torch cannot, on gloo")
    traces = tmp_path / "traces"
    traces.mkdir()
    size = ["--dim", "384", "--batch", "96", "--steps", str(STEPS), "--microbatches", str(MICROBATCHES)]
    job = ["--jobs", schedule, *size, "--profile", f"{traces}/"]
    torchrun(RANKS, "torch_schedule.py", *job, run_dir=tmp_path / "run")
    own = read_trace(tmp_path / "run")
    own = own.where(own.spans["step"] >= 1)  # the profiler sees no first step
    profiled = sources.read_trace([traces])
    assert ops_of(profiled) == ops_of(own)
    found, expected = diagnose(profiled), diagnose(own)
    for job_found in (found.job, expected.job):
        shape = (job_found.pp, job_found.vpp, job_found.microbatches)
        assert shape == (RANKS, CHUNKS[schedule], MICROBATCHES)
        assert (job_found.schedule_name, job_found.schedule_match) == (schedule, 1.0)
    assert found.steps.count == expected.steps.count
    for cause in fields(expected.why):
        difference = getattr(found.why, cause.name) - getattr(expected.why, cause.name)
        assert abs(difference) <= WITHIN, f"{cause.name}: {found.why} and {expected.why}"
