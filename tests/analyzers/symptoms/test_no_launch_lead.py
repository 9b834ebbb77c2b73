from __future__ import annotations

from dataclasses import replace

import pytest

from ppdiag.diagnosis import Why
from ppdiag.model import Flag, Kind
from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import MEGATRON, evidence, messages, symptom
from tests.reports.factory import make_diagnosis


def launched(lead_ns: int, *, host: float = 0.2, flags: int = Flag.DEVICE, framework: str = MEGATRON):
    rows = [
        {
            "rank": 0,
            "kind": Kind.FORWARD,
            "start_ns": at,
            "end_ns": at + 10 * MS,
            "flags": flags,
            "launch_ns": at - lead_ns,
        }
        for at in (50 * MS, 100 * MS, 150 * MS)
    ]
    diagnosis = replace(make_diagnosis(), why=Why(host=host))
    diagnosis = replace(diagnosis, job=replace(diagnosis.job, framework=framework))
    return symptom("no-launch-lead", evidence(diagnosis, messages(rows)))


def test_launches_just_in_time_are_pointed_out_beside_host_time() -> None:
    seen = launched(MS // 10)
    assert seen is not None
    assert seen.evidence == (
        "host 20.0 % of the step",
        "half of the forwards and backwards were launched at most 0.10 ms early; they take 10.00 ms",
    )
    assert "batch_p2p_sync=False" in seen.advice[0].how
    other = launched(MS // 10, framework="")
    assert other is not None
    assert "set_sync_debug_mode" in other.advice[0].how
    assert "batch_p2p_sync" not in other.advice[0].how


@pytest.mark.parametrize(
    "seen",
    [launched(20 * MS), launched(MS // 10, host=0.04), launched(MS // 10, flags=0)],
    ids=["a host far ahead", "no host time", "times of the host"],
)
def test_other_launches_are_not(seen) -> None:
    assert seen is None
