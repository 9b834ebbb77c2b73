from __future__ import annotations

from dataclasses import replace

import pytest

from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import found
from tests.analyzers.test_hand_calculations import pipeline

SAID = {
    "slug": "no-gpu-direct",
    "severity": "warning",
    "text": "4 of 4 channels pass through host memory",
    "advice": "",
    "count": 1,
    "hosts": ("gpu1", "gpu2"),
}


def received(*rows, milliseconds: int = 10):
    trace = pipeline(transfer=lambda _a, _b: milliseconds * MS).trace()
    return found(replace(trace, nccl={"messages": rows}))


def test_rdma_through_host_memory_is_pointed_out_once() -> None:
    symptoms = received(SAID)
    assert symptoms["no-gpu-direct"].evidence == (
        "communication 30.5 % of the step",
        "4 of 4 channels pass through host memory (gpu1, gpu2)",
    )
    assert symptoms["no-gpu-direct"].severity == "critical"
    assert "nvidia-peermem" in symptoms["no-gpu-direct"].advice[0].how
    assert "nccl-errors" not in symptoms


@pytest.mark.parametrize(
    "symptoms",
    [received(), received({**SAID, "slug": "nvls"}), received(SAID, milliseconds=0)],
    ids=["nothing said", "another message", "no communication"],
)
def test_otherwise_it_is_not(symptoms) -> None:
    assert "no-gpu-direct" not in symptoms
