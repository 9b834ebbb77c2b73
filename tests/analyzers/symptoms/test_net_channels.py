from __future__ import annotations

from dataclasses import replace

import pytest

from ppdiag.diagnosis import Why
from tests.analyzers.symptoms.cases import evidence, symptom, told
from tests.analyzers.test_hand_calculations import pipeline
from tests.reports.factory import make_diagnosis


def hosts(
    count: int = 8,
    *,
    channels: int = 2,
    others: int | None = None,
    family: str = "IB",
    version: str = "2.21.5",
    env=None,
    share=0.2,
):
    diagnosis = make_diagnosis(stages=count)
    ranks = tuple(replace(row, host=f"node{row.rank}") for row in diagnosis.ranks)
    rows = tuple(
        {
            "src_rank": rank,
            "dst_rank": rank + 1,
            "family": family,
            "channels": (others or channels) if rank else channels,
        }
        for rank in range(count - 1)
    )
    diagnosis = replace(diagnosis, ranks=ranks, transports=rows, why=Why(communication=share))
    trace = replace(told(pipeline().trace(), env=env or {}), nccl={"versions": (version,)})
    return symptom("net-channels", evidence(diagnosis, trace))


def test_few_channels_between_eight_hosts_are_pointed_out() -> None:
    seen = hosts()
    assert seen is not None
    assert seen.evidence == (
        "communication 20.0 % of the step, on 8 hosts",
        "7 of 7 pairs of ranks have at most 2 channels of RDMA",
    )
    assert seen.advice[0].how.startswith("NCCL_NCHANNELS_PER_NET_PEER=4")


@pytest.mark.parametrize(
    "seen",
    [
        hosts(7),
        hosts(channels=4),
        hosts(channels=2, others=4),
        hosts(family="Socket"),
        hosts(version="2.19.3"),
        hosts(env={"NCCL_NCHANNELS_PER_NET_PEER": "4"}),
        hosts(share=0.04),
    ],
    ids=["few hosts", "channels", "channels of most", "TCP", "an old NCCL", "set already", "no loss"],
)
def test_otherwise_they_are_not(seen) -> None:
    assert seen is None
