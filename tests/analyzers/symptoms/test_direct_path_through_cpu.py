from __future__ import annotations

from dataclasses import replace

import pytest

from ppdiag.diagnosis import LinkResult, Verdict, Why
from tests.analyzers.symptoms.cases import evidence, symptom
from tests.reports.factory import make_diagnosis


def link(transport: str, rate: float, *, size: int = 8 << 20, cause: str = "communication"):
    row = LinkResult(0, 1, "forward", size, size / rate, rate, transport)
    verdict = Verdict(cause, None, (0, 1), None, 0.25, "measured", "")
    diagnosis = replace(make_diagnosis(), links=(row,), verdict=verdict, why=Why(communication=0.25))
    return symptom("direct-path-through-cpu", evidence(diagnosis))


def test_a_slow_direct_link_is_pointed_out() -> None:
    seen = link("P2P/CUMEM", 3e9)
    assert seen is not None
    assert seen.evidence == ("communication 25.0 % of the step", "stage 0 to 1 by P2P/CUMEM: 3.0 GB/s")
    assert seen.advice[0].how.startswith("NCCL_P2P_LEVEL=NODE")


@pytest.mark.parametrize(
    "seen",
    [link("SHM/direct", 3e9), link("P2P/CUMEM", 20e9), link("P2P", 3e9, size=4096), link("P2P", 3e9, cause="bubble")],
    ids=["host memory", "fast", "small messages", "another cause"],
)
def test_other_links_are_not(seen) -> None:
    assert seen is None
