"""Synchronising calls in traces of GPUs: in real ones counted by hand, in made ones with what they cost."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.sources.kineto.events import Category, read_events
from ppdiag.model import HostCause, Kind
from tests.analyzers.sources.kineto_factory import MAIN, STEP_US, Writer

DATA = Path(__file__).parents[2] / "data" / "kineto"
NAMES = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "hipDeviceSynchronize")


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json.gz")), ids=lambda path: path.name[:40])
def test_the_calls_of_a_real_trace_are_those_of_its_json(path):
    raw = json.loads(gzip.decompress(path.read_bytes()))
    rows = raw["traceEvents"] if isinstance(raw, dict) else raw
    runtime = ("cuda_runtime", "hip_runtime", "cuda_driver", "Runtime")
    wanted = [
        row
        for row in rows
        if row.get("cat") in runtime and row.get("name", "").endswith("Synchronize") and row.get("ph") == "X"
    ]
    events = read_events(path)
    calls = events.of(Category.SYNCHRONISING)
    assert len(calls) == len(wanted)
    taken_us = sum(row["dur"] for row in wanted)
    assert (events.end_ns[calls] - events.start_ns[calls]).sum() / 1e3 == pytest.approx(taken_us, abs=0.01)


def job(folder, *, wait_us):
    """Rank 1 waits for its device, which ends its last forward at 3100 us, and launches the first backward at 3600."""
    paths = []
    for rank in (0, 1):
        writer = Writer(rank)
        writer.run(4)
        for step in range(4):
            begin = step * STEP_US
            if rank == 1:
                writer.complete("cuda_runtime", "cudaDeviceSynchronize", MAIN, (begin + 3100 - wait_us, begin + 3100))
        paths.append(writer.write(folder))
    return paths


@pytest.mark.parametrize(("wait_us", "calls"), [(500, 4), (60, 0)])
def test_long_calls_are_spans_and_short_ones_are_not(tmp_path, wait_us, calls):
    trace = read_trace(job(tmp_path, wait_us=wait_us))
    found = trace.spans[(trace.spans["kind"] == Kind.HOST) & (trace.spans["op"] == HostCause.SYNCHRONISING)]
    assert len(found) == calls
    assert set(found["rank"].tolist()) <= {1}
    assert np.unique(found["end_ns"] - found["start_ns"]).tolist() == [wait_us * 1000] * bool(calls)
    assert diagnose(trace).steps.median_s == pytest.approx(0.010)
