"""The symptom fires on proven TCP beside RDMA that costs something, and on nothing less."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from ppdiag.analyzers.nccl.transports import transports_of
from ppdiag.analyzers.symptoms import SYMPTOMS, Evidence
from ppdiag.diagnosis import Cause, Why
from tests.analyzers.nccl.formats import read
from tests.reports.factory import make_slow_link

DEVICES = "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>"
SOCKET = "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0"
IB = "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0"
NO_DEVICE = "NET/IB : No device found."
P2P = "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"


def _symptom(*texts: str, communication: float = 0.25):
    report = read("".join(f"gpu1:31:40 [0] NCCL INFO {text}\n" for text in texts))
    diagnosis = replace(make_slow_link(), why=Why(communication=communication), transports=transports_of(report))
    unused = cast(Any, None)
    return SYMPTOMS.load("tcp-fallback")(Evidence(diagnosis, unused, gains={Cause.COMMUNICATION: 0.2}))


@pytest.mark.parametrize(("communication", "severity"), [(0.25, "critical"), (0.12, "warning"), (0.06, "info")])
def test_proven_tcp_fires_with_its_numbers_and_the_gain(communication, severity):
    symptom = _symptom(DEVICES, SOCKET, communication=communication)
    assert (symptom.id, symptom.severity) == ("tcp-fallback", severity)
    assert symptom.evidence[0].startswith("communication ")
    assert symptom.evidence[1] == "rank 0 to rank 1: 1 channels by NET/Socket"
    assert symptom.evidence[2] == "NCCL listed RDMA devices on these hosts: mlx5_0"
    (advice,) = symptom.advice
    assert advice.gain_fraction == 0.2
    assert "NCCL_IB_HCA" in advice.how


@pytest.mark.parametrize(
    "texts",
    [(DEVICES, IB), (DEVICES, P2P, "Using network Socket"), (NO_DEVICE, SOCKET), (SOCKET,), (DEVICES, SOCKET[:-4]), ()],
)
def test_less_than_proof_fires_nothing(texts):
    assert _symptom(*texts) is None


def test_a_fallback_that_costs_nothing_is_not_advised_on():
    assert _symptom(DEVICES, SOCKET, communication=0.04) is None


def test_many_pairs_are_counted_not_listed():
    lines = [f"Channel 00/0 : {rank}[0] -> {rank + 1}[0] [send] via NET/Socket/0" for rank in range(9)]
    assert _symptom(DEVICES, *lines).evidence[5] == "and 5 more pairs of ranks"
