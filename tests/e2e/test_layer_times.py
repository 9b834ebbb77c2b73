"""Layers timed in real jobs: the job computes what it did without, and the split is worth what was said."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import analyse
from ppdiag.analyzers.what_if import predict, run_of
from ppdiag.analyzers.what_if.measured_layers import MEASURED, measured_layers
from ppdiag.analyzers.what_if.survey import best_layers
from ppdiag.rundir import LAYER_TIMES_VARIABLE
from tests.e2e.conftest import TIMEOUT_S, job_environment, read_results, read_trace, torchrun, torchrun_command

if TYPE_CHECKING:
    from pathlib import Path

    from ppdiag.trace import Trace

SCRIPT = "layered_pipeline.py"
LONG = ("--layer-factor", "2:3", "--forward-ms", "10", "--backward-ms", "20", "--ends-ms", "2")


def recorded(ranks: int, *arguments: str, run_dir: Path) -> Trace:
    """A job whose layers are timed."""
    environment = job_environment(run_dir) | {LAYER_TIMES_VARIABLE: "1"}
    command = torchrun_command(ranks, SCRIPT, *arguments)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return read_trace(run_dir)


def test_losses_and_gradients_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    job = ("--layers", "2,3", "--steps", "8", "--microbatches", "4", "--forward-ms", "1", "--backward-ms", "1")
    torchrun(2, SCRIPT, *job, "--results", str(tmp_path / "without"))
    trace = recorded(2, *job, "--results", str(tmp_path / "with"), run_dir=tmp_path / "run")
    assert read_results(tmp_path / "with", 2) == read_results(tmp_path / "without", 2)
    assert [row["names"] for rank in (0, 1) for row in trace.ranks[rank].facts["layers"]] == [
        ["layers.0", "layers.1"],
        ["layers.2", "layers.3", "layers.4"],
    ]
    assert not any(facts.faults for facts in trace.ranks.values())


@pytest.mark.slow
def test_the_slow_layer_is_found_and_the_split_is_worth_what_was_said(tmp_path: Path) -> None:
    trace = recorded(4, "--layers", "2,2,2,2", *LONG, run_dir=tmp_path / "before")
    run = run_of(analyse(trace))
    measured = measured_layers(run.trace, run.shape)
    assert measured is not None
    times_L = np.concatenate(measured.weights)
    assert times_L.argmax() == 2
    assert times_L[2] == pytest.approx(3 * np.median(times_L), rel=0.15)

    change = best_layers(run)
    assert change.layers == (2, 1, 3, 2)  # of 2, 4, 2, 2 units none is longer than the slow layer's 3
    predicted = predict(run, change)
    assert predicted.layer_times == MEASURED
    after = analyse(recorded(4, "--layers", "2,1,3,2", *LONG, run_dir=tmp_path / "after"))
    assert predicted.step_s == pytest.approx(float(np.median(after.steps.duration_s)), rel=0.10)
