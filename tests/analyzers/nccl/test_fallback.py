"""TCP beside RDMA: found where a channel proves it, and never from what was loaded."""

from __future__ import annotations

import pytest

from ppdiag.analyzers.nccl.model import FallbackStatus
from ppdiag.analyzers.nccl.transports import transports_of
from tests.analyzers.nccl.formats import read

SOCKET = "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0"
IB = "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA"
LIBFABRIC = "Channel 00/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/0"
DEVICES = "NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>"
EMPTY = "NET/IB : Using [RO]; OOB eth0:10.0.0.1<0>"
NO_DEVICE = "NET/IB : No device found."
NO_VERBS = "Failed to open libibverbs.so[.1]"
IB_OFF = "NCCL_IB_DISABLE set by environment to 1."
IB_ON = "NCCL_IB_DISABLE set by environment to 0."


def _read(*texts: str, host: str = "gpu1"):
    return read("".join(f"{host}:31:40 [0] NCCL INFO {text}\n" for text in texts))


@pytest.mark.parametrize(
    ("texts", "status", "reason"),
    [
        ((DEVICES, SOCKET), FallbackStatus.FALLBACK, "NCCL listed RDMA devices on these hosts: mlx5_0, mlx5_1"),
        ((IB_OFF, SOCKET), FallbackStatus.FALLBACK, "NCCL_IB_DISABLE=1 is set"),
        (("NCCL_NET set by environment to Socket", SOCKET), FallbackStatus.FALLBACK, "NCCL_NET=Socket is set"),
        (
            ("NCCL_NET_PLUGIN set by environment to ofi", "NET/Plugin: Could not find: libnccl-net-ofi.so. ", SOCKET),
            FallbackStatus.FALLBACK,
            "the network plug-in that was asked for was not found",
        ),
        (
            (
                "Plugin name set by env to libnccl-net-ofi.so",
                "NET/Plugin: No plugin found (libnccl-net-ofi.so)",
                SOCKET,
            ),
            FallbackStatus.FALLBACK,
            "the network plug-in that was asked for was not found",
        ),
        (
            ("Failed to initialize NET plugin IB", SOCKET),
            FallbackStatus.FALLBACK,
            "the network plug-in IB could not be used",
        ),
        ((NO_DEVICE, SOCKET), FallbackStatus.POSSIBLE, "NCCL found no RDMA device (NET/IB : No device found)"),
        ((NO_VERBS, SOCKET), FallbackStatus.POSSIBLE, "libibverbs could not be opened"),
        (
            ("NET/OFI Selected Provider is tcp;ofi_rxm (found 1 nics)", LIBFABRIC),
            FallbackStatus.POSSIBLE,
            "the Libfabric provider is tcp;ofi_rxm",
        ),
    ],
)
def test_tcp_is_a_finding_with_its_reason(texts, status, reason):
    fallback = _read(*texts).fallback
    assert (fallback.status, fallback.hosts, fallback.connections) == (status, ("gpu1",), 1)
    assert reason in fallback.reasons
    assert fallback.advice


@pytest.mark.parametrize(
    ("texts", "status"),
    [
        ((DEVICES, IB), FallbackStatus.NONE),
        ((DEVICES, "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "Using network Socket"), FallbackStatus.NONE),
        ((DEVICES, "Using network Socket", "NET/Socket : Using [0]eth0:10.0.0.1<0>"), FallbackStatus.UNKNOWN),
        ((IB_OFF, NO_DEVICE), FallbackStatus.UNKNOWN),
        ((EMPTY, SOCKET), FallbackStatus.SOCKET),
        ((IB_ON, SOCKET), FallbackStatus.SOCKET),
        (("NET/Plugin: Could not find: libnccl-net.so. ", SOCKET), FallbackStatus.SOCKET),
        (
            ("NCCL_NET_PLUGIN set by environment to none", "NET/Plugin: Could not find: x.so", SOCKET),
            FallbackStatus.SOCKET,
        ),
        (("NET/OFI Selected Provider is efa (found 4 nics)", LIBFABRIC), FallbackStatus.NONE),
    ],
)
def test_what_is_no_fallback_is_not_called_one(texts, status):
    assert _read(*texts).fallback.status is status


def test_devices_of_another_host_make_no_fallback_here():
    lines = [("gpu1", SOCKET), ("gpu2", DEVICES), ("gpu2", "Channel 00/0 : 1[0] -> 0[0] [send] via NET/IB/0")]
    report = read("".join(f"{host}:31:40 [0] NCCL INFO {text}\n" for host, text in lines))
    assert report.fallback.status is FallbackStatus.SOCKET
    assert report.fallback.hosts == ("gpu1",)


def test_a_torn_socket_line_makes_no_fallback():
    torn = f"gpu1:31:40 [0] NCCL INFO {SOCKET}gpu2:7:7 [1] NCCL INFO {DEVICES}\n"
    report = read(f"gpu1:31:40 [0] NCCL INFO {DEVICES}\n{torn}")
    assert report.fallback.status is FallbackStatus.UNKNOWN
    assert report.counts.unknown_connections == 1


def test_only_the_tcp_rows_carry_the_verdict():
    p2p = "Channel 00/0 : 0[0] -> 2[1] via P2P/CUMEM"
    rows = {row["transport"]: row["fallback"] for row in transports_of(_read(DEVICES, SOCKET, p2p))}
    assert rows["P2P/CUMEM"] is None
    assert rows["NET/Socket"]["status"] == "fallback"
