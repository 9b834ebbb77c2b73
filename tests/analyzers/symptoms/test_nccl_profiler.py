from __future__ import annotations

from dataclasses import replace

import pytest

from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import found, told
from tests.analyzers.test_hand_calculations import pipeline


def profiled(env=None, plugins=(), milliseconds: int = 10):
    trace = told(pipeline(transfer=lambda _a, _b: milliseconds * MS).trace(), env=env or {})
    return found(replace(trace, nccl={"plugins": plugins}))


def test_a_profiler_plug_in_is_pointed_out_by_log_or_environment() -> None:
    symptom = profiled(plugins=(("net", "ib"), ("profiler", "inspector")))["nccl-profiler"]
    assert symptom.evidence == (
        "communication 30.5 % of the step",
        "profiler plug-in inspector; NCCL_PROFILE_EVENT_MASK not set",
    )
    env = {"NCCL_PROFILER_PLUGIN": "libp.so", "NCCL_PROFILE_EVENT_MASK": "71"}
    assert profiled(env)["nccl-profiler"].evidence[1] == "profiler plug-in libp.so; NCCL_PROFILE_EVENT_MASK 71"


@pytest.mark.parametrize(
    "symptoms",
    [
        profiled(plugins=(("net", "ib"),)),
        profiled({"NCCL_PROFILER_PLUGIN": "none"}),
        profiled({"NCCL_PROFILER_PLUGIN": "libp.so"}, milliseconds=0),
    ],
    ids=["another plug-in", "switched off", "no communication"],
)
def test_otherwise_it_is_not(symptoms) -> None:
    assert "nccl-profiler" not in symptoms
