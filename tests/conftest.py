"""What all tests share: the checkout's place, and a clean environment for the processes that they start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(autouse=True)
def environment_of_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite itself may run under ``ppdiag run``; the jobs that it starts must not record there."""
    for name in [name for name in os.environ if name.startswith("PPDIAG_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def checkout_environment() -> dict[str, str]:
    """The environment of a process that shall import ppdiag from this checkout, installed or not."""
    others = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(REPOSITORY), others]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": ""}
