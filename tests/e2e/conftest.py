"""Real torchrun jobs on gloo, recorded by the checkout's own start-up hook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.analyzers.sources.run_directory import RunDirectory
from ppdiag.model import Flag

if TYPE_CHECKING:
    import numpy as np

    from ppdiag.trace import Trace

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "tests" / "jobs"
BOOTSTRAP = ROOT / "ppdiag" / "hooks" / "bootstrap"
TIMEOUT_S = 240.0


def job_environment(run_dir: Path | None) -> dict[str, str]:
    """The environment of a job: recorded into ``run_dir``, or free of us."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PPDIAG_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
        environment |= {"PPDIAG_RUN_DIR": str(run_dir), "PYTHONPATH": str(BOOTSTRAP)}
    return environment


def torchrun_command(ranks: int, script: str, *arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, str(JOBS / script), *arguments]


def torchrun(ranks: int, script: str, *arguments: str, run_dir: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a job of ``tests/jobs`` to its end; its output is in the failure's message where it fails."""
    command = torchrun_command(ranks, script, *arguments)
    result = subprocess.run(
        command, env=job_environment(run_dir), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-8000:]}"
    return result


def torch_version() -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(part) for part in pytest.importorskip("torch").__version__.split(".")[:2])


def torch_runs(schedule: str, *, evaluate: bool = False) -> bool:
    """Whether the torch at hand can run a schedule on gloo.

    In 2.10 and before, those in a V end with an error of gloo's: a rank sends to itself. 2.8 has no evaluation.
    """
    version = torch_version()
    return version >= (2, 13) or not (schedule in ("ZBVZeroBubble", "DualPipeV") or (evaluate and version < (2, 9)))


def read_trace(run_dir: Path) -> Trace:
    return RunDirectory().read([run_dir], None)


def read_results(prefix: Path, ranks: int) -> list[list[dict[str, Any]]]:
    """What each rank of a job wrote to its ``--results``."""
    return [[json.loads(line) for line in Path(f"{prefix}{rank}").read_text().splitlines()] for rank in range(ranks)]


def work_only(spans: np.ndarray) -> np.ndarray:
    """Without initialisation traffic."""
    return spans[spans["flags"] & int(Flag.INIT) == 0]


@pytest.fixture(autouse=True)
def _torch_is_there() -> None:
    pytest.importorskip("torch")
