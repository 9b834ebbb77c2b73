"""Two real jobs, one with a stage that takes half as long again: the change, its place, and an export of each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.sources import read_trace
from ppdiag.cli import main
from tests.e2e.conftest import torchrun

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

JOB = "--microbatches 6 --steps 14 --forward-ms 10 --backward-ms 20"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    torchrun(2, "sleeping_pipeline.py", *JOB.split(), run_dir=folder / "even")
    torchrun(2, "sleeping_pipeline.py", *JOB.split(), "--stage-factor", "1:1.5", run_dir=folder / "heavy")
    return folder


def test_a_heavier_stage_is_found_and_the_gate_closes(jobs: Path) -> None:
    words = [str(jobs / "even"), str(jobs / "heavy"), "--json", "-", "--fail-on", "slower>0.1"]
    done = CliRunner().invoke(main, ["compare", *words])
    assert done.exit_code == 3
    found = json.loads(done.stdout)
    assert (found["places"][0]["what"], found["places"][0]["stage"]) == ("work", 1)
    # By hand: from (6 + 1) * 30 = 210 ms to 10 + 6 * 45 + 20 = 300 ms, which is 43 % more.
    assert 0.3 < found["slower_fraction"] < 0.55
    assert abs(sum(part["change_s"] for part in found["parts"]) - found["step"]["change_s"]) < 1e-9


def test_the_gate_stays_open_the_other_way_round(jobs: Path) -> None:
    words = [str(jobs / "heavy"), str(jobs / "even"), "-q", "--fail-on", "slower>=0"]
    assert CliRunner().invoke(main, ["compare", *words]).exit_code == 0


@pytest.mark.parametrize(("option", "name"), [("--perfetto", "trace.pftrace"), ("--chrome", "trace.json.gz")])
def test_an_export_gives_the_diagnosis_of_the_run_itself(jobs: Path, tmp_path: Path, option: str, name: str) -> None:
    CliRunner().invoke(main, ["export", str(jobs / "heavy"), option, str(tmp_path / name)], catch_exceptions=False)
    run, export = (diagnose(read_trace([path])).to_dict() for path in (jobs / "heavy", tmp_path / name))
    assert {**export, "source": run["source"]} == run
