"""The GPU check runs: here on a stand-in device whose stream is a thread, with gloo."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT, job_environment

SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
NOT_HERE = {"NVML", "NCCL log"}


def check(*arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and the table: name -> (verdict, text)."""
    command = [sys.executable, str(SCRIPT), "--dry-run", *arguments]
    done = subprocess.run(command, env=job_environment(None), capture_output=True, text=True, check=False, timeout=280)
    table = done.stdout.partition("\n\n")[2].splitlines()
    rows = {line[6:27].strip(): (line[:5].strip(), line[27:]) for line in table[:-1]}
    assert rows, done.stdout + done.stderr
    return done.returncode, rows


@pytest.mark.slow
def test_each_row_passes_but_those_that_need_a_gpu() -> None:
    exit_code, rows = check("--rounds", "2")
    assert exit_code == 0, rows
    assert {name for name, (verdict, _) in rows.items() if verdict != "PASS"} <= {*NOT_HERE, "NVTX tool", "NVTX"}
    assert "stage 1" in rows["verdict"][1]
    assert rows["NCCL log"] == ("SKIP", "gloo")


@pytest.mark.slow
def test_one_rank_alone_is_checked_as_far_as_it_goes() -> None:
    exit_code, rows = check("--ranks", "1")
    assert exit_code == 0, rows
    assert rows["known kernel"][0] == "PASS"
    assert rows["verdict"] == ("SKIP", "one rank has no pipeline")


def test_without_a_device_the_check_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, env=job_environment(None), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "no CUDA device here; --dry-run checks the script itself\n")
