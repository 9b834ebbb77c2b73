"""Each format string of NCCL that names a transport, network, interface, device or error gives the right field.

The values that are filled in and those that are expected are written out for each format string.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from ppdiag.analyzers.nccl.model import Family, Interface, Plugin
from ppdiag.analyzers.nccl.rules import RULES
from tests.analyzers.nccl.formats import FORMATS, HEADER, fill, fill_somehow, read, read_line

if TYPE_CHECKING:
    from ppdiag.analyzers.nccl.model import Connection

A, B = ("0", "c1000"), ("8", "47000")

NETWORK = [
    # format, values, transport, family, direction, channel, index, device, GDRDMA, PXN rank, flags
    (
        "Channel %02d : %d[%lx] -> %d[%lx] [receive] via NET/%s/%d%s%s",
        (3, *A, *B, "IB", 1, "/GDRDMA", ""),
        ("NET/IB", Family.IB, "receive", 3, None, 1, True, None, ()),
    ),
    (
        "Channel %02d : %d[%lx] -> %d[%lx] [send] via NET/%s/%d%s%s",
        (3, *A, *B, "Socket", 0, "", "/Shared"),
        ("NET/Socket", Family.SOCKET, "send", 3, None, 0, False, None, ("Shared",)),
    ),
    (
        "Channel %02d/%d : %d[%lx] -> %d[%lx] [receive] via NET/%s/%d%s%s",
        (12, 0, *A, *B, "AWS Libfabric", 2, "/GDRDMA", "/Shared"),
        ("NET/AWS Libfabric", Family.LIBFABRIC, "receive", 12, 0, 2, True, None, ("Shared",)),
    ),
    (
        "Channel %02d/%d : %d[%lx] -> %d[%lx] [send] via NET/%s/%d%s%s",
        (12, 1, *A, *B, "IBext_v8", 5, "", ""),
        ("NET/IBext_v8", Family.IB, "send", 12, 1, 5, False, None, ()),
    ),
    (
        "Channel %02d/%d : %d[%lx] -> %d[%lx] [send] via NET/%s/%d(%d)%s%s",
        (0, 0, *A, *B, "IB", 8, 4, "/GDRDMA", ""),
        ("NET/IB", Family.IB, "send", 0, 0, 8, True, 4, ()),
    ),
    (
        "Channel %02d/%d : %d[%d] -> %d[%d] [receive] via NET/%s/%d%s%s",
        (1, 0, 0, 0, 8, 0, "Libfabric", 0, "/GDRDMA", ""),
        ("NET/Libfabric", Family.LIBFABRIC, "receive", 1, 0, 0, True, None, ()),
    ),
    (
        "Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d%s%s",
        (1, 0, 0, 0, 8, 0, "Socket", 3, "", ""),
        ("NET/Socket", Family.SOCKET, "send", 1, 0, 3, False, None, ()),
    ),
    (
        "Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d(%d)%s%s",
        (1, 0, 0, 0, 8, 0, "IB", 3, 2, "", "/Shared"),
        ("NET/IB", Family.IB, "send", 1, 0, 3, False, 2, ("Shared",)),
    ),
    (
        "Channel %02d/%d : %d[%d] -> %d[%d] [receive] via NET/%s/%d%s%s%s",
        (1, 0, 0, 0, 8, 0, "IB", 3, "/GDRDMA", "(PCI)", "/Shared"),
        ("NET/IB", Family.IB, "receive", 1, 0, 3, True, None, ("PCI", "Shared")),
    ),
    (
        "Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d%s%s%s",
        (1, 0, 0, 0, 8, 0, "FasTrak", 3, "", "", ""),
        ("NET/FasTrak", Family.OTHER_NET, "send", 1, 0, 3, False, None, ()),
    ),
    (
        "Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d(%d)%s%s%s",
        (1, 0, 0, 0, 8, 0, "IB", 3, 7, "/GDRDMA", "", ""),
        ("NET/IB", Family.IB, "send", 1, 0, 3, True, 7, ()),
    ),
]

LOCAL = [
    # format, glued words, values, transport, family, channel, index, flags
    (
        "Channel %02d : %d[%lx] -> %d[%lx] via P2P/IPC%s",
        "",
        (2, *A, *B, "/read"),
        ("P2P/IPC", Family.P2P, 2, None, ("read",)),
    ),
    (
        "Channel %02d : %d[%lx] -> %d[%lx] via P2P/IPC%s%s",
        "",
        (2, *A, *B, "/read", "/CE"),
        ("P2P/IPC", Family.P2P, 2, None, ("read", "CE")),
    ),
    (
        "Channel %02d : %d[%lx] -> %d[%lx] via P2P/direct pointer%s",
        "",
        (2, *A, *B, ""),
        ("P2P/direct pointer", Family.P2P, 2, None, ()),
    ),
    (
        "Channel %02d : %d[%lx] -> %d[%lx] via P2P/indirect/%d[%lx]%s",
        "",
        (2, *A, *B, 5, "2a000", ""),
        ("P2P/indirect/5[2a000]", Family.P2P, 2, None, ()),
    ),
    (
        "Channel %02d : %d[%lx] -> %d[%lx] via direct shared memory",
        "",
        (2, *A, *B),
        ("SHM/direct/direct", Family.SHM, 2, None, ()),
    ),
    (
        "Channel %02d : %d[%lx] -> %d[%lx] via SHM/%s/%sCEdirectCEdirect",
        "CEdirectCEdirect",
        (2, *A, *B, "CE", "direct"),
        ("SHM/CE/direct", Family.SHM, 2, None, ()),
    ),
    (
        "Channel %02d : %d[%d] -> %d[%d] via SHM/%s/%sCEdirectCEdirect",
        "CEdirectCEdirect",
        (2, 0, 0, 8, 0, "direct", "direct"),
        ("SHM/direct/direct", Family.SHM, 2, None, ()),
    ),
    (
        "Channel %02d : %d[%d] -> %d[%d] via SHM/direct",
        "",
        (2, 0, 0, 8, 0),
        ("SHM/direct", Family.SHM, 2, None, ()),
    ),
    (
        "Channel %02d/%01d : %d[%lx] -> %d[%lx] via P2P/IPC%s%s",
        "",
        (2, 0, *A, *B, "", ""),
        ("P2P/IPC", Family.P2P, 2, 0, ()),
    ),
    (
        "Channel %02d/%01d : %d[%lx] -> %d[%lx] via P2P/direct pointer%s",
        "",
        (2, 1, *A, *B, "/read"),
        ("P2P/direct pointer", Family.P2P, 2, 1, ("read",)),
    ),
    (
        "Channel %02d/%01d : %d[%lx] -> %d[%lx] via P2P/indirect/%d[%lx]%s",
        "",
        (2, 0, *A, *B, 5, "2a000", "/read"),
        ("P2P/indirect/5[2a000]", Family.P2P, 2, 0, ("read",)),
    ),
    (
        "Channel %02d/%01d : %d[%x] -> %d[%x] via P2P/CUMEM%s%s",
        "",
        (2, 0, *A, *B, "", ""),
        ("P2P/CUMEM", Family.P2P, 2, 0, ()),
    ),
    (
        "Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/CUMEM%s%s",
        "",
        (2, 0, 0, 0, 8, 0, "/read", ""),
        ("P2P/CUMEM", Family.P2P, 2, 0, ("read",)),
    ),
    (
        "Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/IPC%s%s",
        "",
        (2, 0, 0, 0, 8, 0, "", "/CE"),
        ("P2P/IPC", Family.P2P, 2, 0, ("CE",)),
    ),
    (
        "Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/direct pointer%s",
        "",
        (2, 0, 0, 0, 8, 0, "/read"),
        ("P2P/direct pointer", Family.P2P, 2, 0, ("read",)),
    ),
    (
        "Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/indirect/%d[%d]%s",
        "",
        (2, 0, 0, 0, 8, 0, 5, 5, ""),
        ("P2P/indirect/5[5]", Family.P2P, 2, 0, ()),
    ),
    (
        "Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/%s%s%s",
        "",
        (2, 0, 0, 0, 8, 0, "MNNVL", "/read", "/CE"),
        ("P2P/MNNVL", Family.P2P, 2, 0, ("read", "CE")),
    ),
]

COLLNET = [
    # format, values, transport, direction, channel, index, device, GDRDMA
    ("Coll %02d : %d [receive] via COLLNET/%s/%d%s", (1, 8, "SHARP", 0, "/GDRDMA"), ("receive", 1, None, 0, True)),
    ("Coll %02d : %d [send] via COLLNET/%s/%d%s", (1, 8, "SHARP", 0, ""), ("send", 1, None, 0, False)),
    ("CollNet %02d : %d [receive] via COLLNET/%s/%d%s", (1, 8, "SHARP", 2, ""), ("receive", 1, None, 2, False)),
    ("CollNet %02d : %d [send] via COLLNET/%s/%d%s", (1, 8, "SHARP", 2, "/GDRDMA"), ("send", 1, None, 2, True)),
    ("CollNet %02d/%1d : %d [receive] via COLLNET/%s/%d%s", (1, 0, 8, "SHARP", 2, ""), ("receive", 1, 0, 2, False)),
    ("CollNet %02d/%1d : %d [send] via COLLNET/%s/%d%s", (1, 0, 8, "SHARP", 2, "/GDRDMA"), ("send", 1, 0, 2, True)),
    (
        "CollNet %02d/%1d : %d [receive] via COLLNET/%s/%d%s%s",
        (1, 0, 8, "SHARP", 2, "/GDRDMA", "(PCI)"),
        ("receive", 1, 0, 2, True),
    ),
    ("CollNet %02d/%1d : %d [send] via COLLNET/%s/%d%s%s", (1, 0, 8, "SHARP", 2, "", ""), ("send", 1, 0, 2, False)),
]


def _ranks(found: Connection) -> tuple[int | None, int | None]:
    return (found.source.rank if found.source else None, found.destination.rank if found.destination else None)


@pytest.mark.parametrize(("text", "values", "expected"), NETWORK)
def test_a_network_channel_gives_its_transport(text, values, expected):
    (found,) = read_line(fill(text, *values)).connections
    assert (
        found.transport,
        found.family,
        found.direction,
        found.channel,
        found.index,
        found.net_device,
        found.gdrdma,
        found.proxy_rank,
        found.flags,
    ) == expected
    assert _ranks(found) == (0, 8)


@pytest.mark.parametrize(("text", "glued", "values", "expected"), LOCAL)
def test_a_channel_inside_a_machine_gives_its_transport(text, glued, values, expected):
    (found,) = read_line(fill(text, *values, glued=glued)).connections
    assert (found.transport, found.family, found.channel, found.index, found.flags) == expected
    assert (*_ranks(found), found.direction) == (0, 8, "send")


@pytest.mark.parametrize(("text", "values", "expected"), COLLNET)
def test_a_reduction_in_the_network_gives_its_transport(text, values, expected):
    (found,) = read_line(fill(text, *values)).connections
    assert (found.transport, found.family) == ("COLLNET/SHARP", Family.COLLNET)
    assert (found.direction, found.channel, found.index, found.net_device, found.gdrdma) == expected
    assert _ranks(found) == ((8, None) if found.direction == "send" else (None, 8))


@pytest.mark.parametrize(("text", "values", "expected"), NETWORK)
def test_rccl_adds_its_communicator_to_the_same_line(text, values, expected):
    (found,) = read_line(fill(text, *values) + " comm 0x7f1c00 nRanks 16").connections
    assert found.transport == expected[0]


@pytest.mark.parametrize(
    ("line", "transport"),
    [
        ("Ring 00 : 1 -> 0 [receive] via NET/Socket/0", "NET/Socket"),
        ("Ring 01 : 0[0] -> 1[1] via P2P/IPC", "P2P/IPC"),
        ("Ring 01 : 0[0] -> 1[1] via direct shared memory", "SHM/direct/direct"),
    ],
)
def test_the_channel_lines_of_nccl_2_4_are_read_too(line, transport):
    (found,) = read_line(line).connections
    assert found.transport == transport


# Networks, interfaces, devices

NETWORKS = [
    ("Using network %s", ("AWS Libfabric",), "AWS Libfabric"),
    ("Initialized NET plugin %s", ("IB",), "IB"),
    ("Assigned NET plugin %s to comm", ("Socket",), "Socket"),
]


@pytest.mark.parametrize(("text", "values", "network"), NETWORKS)
def test_a_network_that_is_chosen_is_loaded_and_proves_nothing(text, values, network):
    report = read_line(fill(text, *values))
    assert report.networks_loaded == (network,)
    assert report.connections == ()


INTERFACES = [
    ("Bootstrap : Using%s", "", (" eth0:10.0.0.1<0>",), [("bootstrap", "eth0", "10.0.0.1")]),
    (
        "Bootstrap : Using%s",
        "",
        (" [0]ib1:fe80::5054:ff:fe12:3456%ib1<0>",),
        [("bootstrap", "ib1", "fe80::5054:ff:fe12:3456%ib1")],
    ),
    ("Bootstrap: Using%s", "", (" eth0:10.0.0.1<0>",), [("bootstrap", "eth0", "10.0.0.1")]),
    ("Bootstrap: Using %s:%dN/A", "N/A", ("mlx5_0", 1), [("bootstrap", "mlx5_0", "")]),
    (
        "NET/Socket : Using%s",
        "",
        (" [0]eth0:10.0.0.1<0> [1]eth1.100:10.0.1.1<0>",),
        [("socket", "eth0", "10.0.0.1"), ("socket", "eth1.100", "10.0.1.1")],
    ),
    ("Found network interface %s with speed %d Mbps", "", ("eth0", 10000), [("found", "eth0", "")]),
]


@pytest.mark.parametrize(("text", "glued", "values", "expected"), INTERFACES)
def test_an_interface_is_read_with_its_use(text, glued, values, expected):
    report = read_line(fill(text, *values, glued=glued))
    assert report.interfaces == tuple(Interface("gpu1", *row) for row in expected)


HCAS = [
    ("NET/IB : Using%s ; OOB %s:%s", "", (" [0]mlx5_0:1/IB", "ib0", "10.0.0.1<0>"), [("mlx5_0", 1, "IB")]),
    (
        "NET/IB : Using%s %s; OOB %s:%s[RO]",
        "[RO]",
        (" [0]mlx5_0:1/RoCE [1]mlx5_bond_1:2/RoCE", "[RO]", "eth0", "10.0.0.1<0>"),
        [("mlx5_0", 1, "RoCE"), ("mlx5_bond_1", 2, "RoCE")],
    ),
    (
        "NET/IB : Using%s %s; OOB %s:%s[RO]",
        "[RO]",
        (" [0]={[0] mlx5_0:1/IB, [1] mlx5_1:1/IB} [1]mlx5_2:1/IB/SHARP", "", "eth0", "10.0.0.1<0>"),
        [("mlx5_0", 1, "IB"), ("mlx5_1", 1, "IB"), ("mlx5_2", 1, "IB/SHARP")],
    ),
    ("NET/IB : Using%s %s; OOB %s:%s[RO]", "[RO]", ("", "[RO]", "eth0", "10.0.0.1<0>"), []),
    (
        "NET/IB: [%d] %s:%s:%d/%s provider=%s speed=%d context=%p pciPath=%s ar=%d",
        "",
        (0, "mlx5_0", "uverbs0", 1, "RoCE", "Mlx5", 100000, "0x7f", "/sys/devices/x", 0),
        [("mlx5_0", 1, "RoCE")],
    ),
    (
        "NET/IB: [%d] %s:%s:%d/%s provider=%s speed=%d context=%p pciPath=%s ar=%d oooRqSize=%d",
        "",
        (0, "erdma_1", "uverbs1", 1, "RoCE", "None", 100000, "0x7f", "/sys/devices/x", 0, 0),
        [("erdma_1", 1, "RoCE")],
    ),
]


@pytest.mark.parametrize(("text", "glued", "values", "expected"), HCAS)
def test_devices_are_read_from_their_list(text, glued, values, expected):
    report = read_line(fill(text, *values, glued=glued))
    assert [(hca.name, hca.port, hca.link) for hca in report.hcas] == expected


def test_a_devices_own_line_adds_its_speed_and_provider():
    (hca,) = read_line(fill(HCAS[4][0], *HCAS[4][2])).hcas
    assert (hca.speed_mbps, hca.provider, hca.gdr) == (100000, "Mlx5", None)


GDR = [
    ("NET/IB : GPU Direct RDMA Disabled for HCA %d '%s' (no module)", "", (0, "mlx5_0"), (False, "mlx5_0", "")),
    (
        "NET/%s : GPU Direct RDMA %s for HCA %d '%s'EnabledDisabled",
        "EnabledDisabled",
        ("IB", "Enabled", 0, "mlx5_0"),
        (True, "mlx5_0", ""),
    ),
    (
        "GPU Direct RDMA Disabled for GPU %lx / HCA %d (distance %d > %d)",
        "",
        ("c1000", 0, 7, 4),
        (False, "GPU c1000 / HCA 0", "distance 7 > 4"),
    ),
    (
        "GPU Direct RDMA Disabled for GPU %lx / HCA %lx (distance %d > %d)",
        "",
        ("c1000", "0", 7, 4),
        (False, "GPU c1000 / HCA 0", "distance 7 > 4"),
    ),
    (
        "GPU Direct RDMA Disabled for GPU %d / HCA %lx (distance %d > %d)",
        "",
        (1, "a0", 7, 4),
        (False, "GPU 1 / HCA a0", "distance 7 > 4"),
    ),
    ("GPU Direct RDMA Disabled for %s", "", ("GPU 1",), (False, "GPU 1", "")),
    (
        "GPU Direct RDMA Enabled for GPU %lx / HCA %d (distance %d <= %d), read %d",
        "",
        ("c1000", 0, 3, 4, 1),
        (True, "GPU c1000 / HCA 0", "distance 3 <= 4"),
    ),
    (
        "GPU Direct RDMA Enabled for GPU %lx / HCA %lx (distance %d <= %d), read %d",
        "",
        ("c1000", "0", 3, 4, 1),
        (True, "GPU c1000 / HCA 0", "distance 3 <= 4"),
    ),
    (
        "GPU Direct RDMA Enabled for GPU %d / HCA %lx (distance %d <= %d), read %d",
        "",
        (1, "a0", 3, 4, 0),
        (True, "GPU 1 / HCA a0", "distance 3 <= 4"),
    ),
    (
        "GPU Direct RDMA Enabled for GPU %d / HCA %lx (distance %d <= %d), read %d mode %s",
        "",
        (1, "a0", 3, 4, 0, "Default"),
        (True, "GPU 1 / HCA a0", "distance 3 <= 4"),
    ),
    ("GPU Direct RDMA Enabled for %s", "", ("GPU 1",), (True, "GPU 1", "")),
]


@pytest.mark.parametrize(("text", "glued", "values", "expected"), GDR)
def test_the_choice_about_gpu_direct_rdma_is_read(text, glued, values, expected):
    (found,) = read_line(fill(text, *values, glued=glued)).gdr
    assert (found.enabled, found.subject, found.reason) == expected


def test_gpu_direct_rdma_is_noted_at_its_device():
    lines = [fill(HCAS[0][0], *HCAS[0][2]), fill(GDR[0][0], *GDR[0][2])]
    (hca,) = read("".join(f"{HEADER}{line}\n" for line in lines)).hcas
    assert hca.gdr is False


ENVIRONMENT = [
    ("%s set by environment to %s", "", ("NCCL_NET", "Socket"), ("NCCL_NET", "Socket")),
    ("%s set by environment to %lld.", "", ("NCCL_IB_DISABLE", 1), ("NCCL_IB_DISABLE", "1")),
    ("%s set by environment to %lu.NCCL_", "NCCL_", ("NCCL_IB_GID_INDEX", 3), ("NCCL_IB_GID_INDEX", "3")),
    ("%s set by environment to %d", "", ("NCCL_IB_TC", 106), ("NCCL_IB_TC", "106")),
    ("NCCL_IB_HCA set to %s", "", ("=mlx5_0:1,mlx5_1",), ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1")),
    ("NCCL_SOCKET_IFNAME set to %s", "", ("eth0",), ("NCCL_SOCKET_IFNAME", "eth0")),
    ("NCCL_SOCKET_IFNAME set by environment to %s", "", ("eth0",), ("NCCL_SOCKET_IFNAME", "eth0")),
    ("NCCL_SOCKET_FAMILY set by environment to %s", "", ("AF_INET",), ("NCCL_SOCKET_FAMILY", "AF_INET")),
    ("NCCL_OOB_NET_IFNAME set to %s", "", ("eth0",), ("NCCL_OOB_NET_IFNAME", "eth0")),
    ("NCCL_TUNER_PLUGIN set to %s", "", ("t.so",), ("NCCL_TUNER_PLUGIN", "t.so")),
    ("NCCL_HOSTID set by environment to %s", "", ("a",), ("NCCL_HOSTID", "a")),
    ("NCCL_IB_ADDR_FAMILY set by environment to %s", "", ("AF_INET",), ("NCCL_IB_ADDR_FAMILY", "AF_INET")),
    ("NCCL_IB_ADDR_RANGE set by environment to %s", "", ("10.0.0.0/8",), ("NCCL_IB_ADDR_RANGE", "10.0.0.0/8")),
    ("NCCL_NET_PLUGIN set by environment to %s", "", ("ofi",), ("NCCL_NET_PLUGIN", "ofi")),
    ("NCCL_IBVERBS_LIB set by environment to %s", "", ("/a.so",), ("NCCL_IBVERBS_LIB", "/a.so")),
]


@pytest.mark.parametrize(("text", "glued", "values", "expected"), ENVIRONMENT)
def test_ncclls_variables_are_read(text, glued, values, expected):
    assert read_line(fill(text, *values, glued=glued)).environment == (expected,)


# Plug-ins

PLUGINS = [
    (
        "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation",
        "",
        (),
        [("net", "libnccl-net.so", "missing")],
    ),
    (
        "NET/Plugin : No plugin found (%s), using internal implementation",
        "",
        ("libnccl-net-x.so",),
        [("net", "libnccl-net-x.so", "missing")],
    ),
    ("NET/Plugin : No plugin found, using internal implementation", "", (), [("net", "", "missing")]),
    (
        "NET/Plugin : dlerror=%s No plugin found (%s), using internal implementation",
        "",
        ("libnccl-net.so: cannot open shared object file: No such file or directory", "libnccl-net.so"),
        [("net", "libnccl-net.so", "missing")],
    ),
    ("NET/Plugin: No plugin found (%s)", "", ("libnccl-net.so",), [("net", "libnccl-net.so", "missing")]),
    ("TUNER/Plugin: No plugin found (%s)", "", ("libnccl-tuner.so",), [("tuner", "libnccl-tuner.so", "missing")]),
    (
        "NET/Plugin: Could not find:%s. Using internal network plugin.",
        "",
        (" libnccl-net-ofi.so libnccl-net.so",),
        [("net", "libnccl-net-ofi.so", "missing"), ("net", "libnccl-net.so", "missing")],
    ),
    (
        "TUNER/Plugin: Could not find:%s. Using internal tuner plugin.",
        "",
        (" libnccl-tuner.so",),
        [("tuner", "libnccl-tuner.so", "missing")],
    ),
    (
        "PROFILER/Plugin: Could not find:%s.",
        "",
        (" libnccl-profiler.so",),
        [("profiler", "libnccl-profiler.so", "missing")],
    ),
    (
        "%s/Plugin: Could not find:%s. %s",
        "",
        ("NET", " libnccl-net.so", "Using internal net plugin."),
        [("net", "libnccl-net.so", "missing")],
    ),
    (
        "%s/Plugin: Could not find:%s%s%s",
        "",
        ("NET", " libnccl-net.so", ". ", ""),
        [("net", "libnccl-net.so", "missing")],
    ),
    (r"Plugin name set by env to %s\n", "", ("ofi",), [("net", "ofi", "requested")]),
    ("Plugin name set by env to %s", "", ("libnccl-net-ofi.so",), [("net", "libnccl-net-ofi.so", "requested")]),
    ("NET/Plugin: Plugin name set by env to %s", "", ("ofi",), [("net", "ofi", "requested")]),
    ("TUNER/Plugin: Plugin name set by env to %s", "", ("t.so",), [("tuner", "t.so", "requested")]),
    ("PROFILER/Plugin: Plugin name set by env to %s", "", ("p.so",), [("profiler", "p.so", "requested")]),
    ("%s/Plugin: Plugin name set by env to %s", "", ("NET", "ofi"), [("net", "ofi", "requested")]),
    ("Failed to initialize NET plugin %s", "", ("Libfabric",), [("net", "Libfabric", "failed")]),
    ("External network plugin %s is unsupported", "", ("a.so",), [("net", "a.so", "failed")]),
    ("External env plugin %s is unsupported", "", ("a.so",), [("env", "a.so", "failed")]),
    ("External profiler plugin %s is unsupported", "", ("a.so",), [("profiler", "a.so", "failed")]),
    ("External tuner plugin %s is unsupported", "", ("a.so",), [("tuner", "a.so", "failed")]),
    ("Successfully loaded external plugin %s", "", ("a.so",), [("net", "a.so", "loaded")]),
    ("Successfully loaded external network plugin %s", "", ("a.so",), [("net", "a.so", "loaded")]),
    ("Successfully loaded external env plugin %s", "", ("a.so",), [("env", "a.so", "loaded")]),
    ("Successfully loaded external gin plugin %s", "", ("a.so",), [("gin", "a.so", "loaded")]),
    ("Successfully loaded external profiler plugin %s", "", ("a.so",), [("profiler", "a.so", "loaded")]),
    ("Successfully loaded external tuner plugin %s", "", ("a.so",), [("tuner", "a.so", "loaded")]),
]


@pytest.mark.parametrize(("text", "glued", "values", "expected"), PLUGINS)
def test_a_plugin_is_read_with_what_became_of_it(text, glued, values, expected):
    assert read_line(fill(text, *values, glued=glued)).plugins == tuple(Plugin(*row) for row in expected)


LOADED = [
    (row.text, *match.groups())
    for row in FORMATS
    if (match := re.match(r".*Loaded (net|coll|collnet|gin|rma) plugin %s \((v\d+)\)$", row.text))
]


@pytest.mark.parametrize(("text", "kind", "version"), LOADED)
def test_a_loaded_plugin_is_read_with_its_version(text, kind, version):
    expected = Plugin("collnet" if kind == "coll" else kind, "AWS Libfabric", "loaded", version)
    assert read_line(fill(text, "AWS Libfabric")).plugins == (expected,)


# Communicators

INITS = sorted({row.text for row in FORMATS if "- Init " in row.text})


@pytest.mark.parametrize("text", INITS)
def test_a_communicator_is_read_with_its_rank_and_size(text):
    values = {
        "comm": "0xaa",
        "rank": "5",
        "nranks": "16",
        "cudaDev": "0",
        "nvmlDev": "3",
        "busId": "c1000",
        "commId": "0xabc",
        "parent": "0xbb",
    }
    words = re.sub(
        r"(\w+) (0x)?%\w+", lambda m: f"{m[1]} {values.get(m[1], '1')}", text.replace("%s comm", "ncclCommInit comm")
    )
    (found,) = read_line(words).communicators
    assert (found.rank, found.size, found.bus_id) == (5, 16, "c1000")
    assert found.id == ("0xabc" if "commId" in text else "0xaa@gpu1:31")
    assert found.nvml_device == (3 if "nvmlDev" in text else None)
    assert found.parent == ("0xbb" if "parent" in text else "")


START = "ncclCommInitRank comm 0xaa rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId c1000 commId 0xabc - Init START"
ABOUT = [
    (
        "comm %p rank %d nRanks %d nNodes %d localRanks %d localRank %d MNNVL %d",
        "",
        ("0xaa", 0, 2, 2, 1, 0, 1),
        {"nodes": 2, "mnnvl": True},
    ),
    ("%d coll channels, %d p2p channels, %d p2p channels per peer", "", (4, 8, 2), {"channels": 4, "p2p_channels": 8}),
    (
        "%d coll channels, %d nvls channels, %d p2p channels, %d p2p channels per peer",
        "",
        (4, 0, 8, 2),
        {"channels": 4, "p2p_channels": 8},
    ),
    (
        "%d coll channels, %d collnet channels, %d nvls channels, %d p2p channels, %d p2p channels per peer",
        "",
        (24, 0, 16, 32, 32),
        {"channels": 24, "p2p_channels": 32},
    ),
    ("Ring %02d : %d -> %d -> %d", "", (0, 1, 0, 1), {"rings": 1}),
    ("Tree %d : %d -> %d -> %d/%d/%d", "", (0, -1, 0, 1, -1, -1), {"trees": 1}),
    ("rank %d Connected CollNet", "", (0,), {"collnet": True}),
    ("Connected NVLS tree", "", (), {"nvls": True}),
    (
        "comm %p rank %d nranks %d cudaDev %d busId %lx - Abort COMPLETE",
        "",
        ("0xaa", 0, 2, 0, "c1"),
        {"ended": "Abort"},
    ),
    (
        "comm %p rank %d nranks %d cudaDev %d busId %lx - Destroy COMPLETE",
        "",
        ("0xaa", 0, 2, 0, "c1"),
        {"ended": "Destroy"},
    ),
    (
        "comm %p rank %d nranks %d cudaDev %d busId %lx - %s COMPLETEAbortDestroy",
        "AbortDestroy",
        ("0xaa", 0, 2, 0, "c1", "Destroy"),
        {"ended": "Destroy"},
    ),
    (
        "comm %p rank %d nranks %d cudaDev %d busId %lx - %s COMPLETE",
        "",
        ("0xaa", 0, 2, 0, "c1", "Abort"),
        {"ended": "Abort"},
    ),
    ("comm %p rank %d nRanks %d cudaDev %d busId %lx - Abort START", "", ("0xaa", 0, 2, 0, "c1"), {"ended": "Abort"}),
    ("comm %p rank %d nRanks %d cudaDev %d busId %lx - Revoke START", "", ("0xaa", 0, 2, 0, "c1"), {"ended": "Revoke"}),
    (
        "comm %p rank %d nRanks %d cudaDev %d busId %lx - Revoke COMPLETE, result %d",
        "",
        ("0xaa", 0, 2, 0, "c1", 0),
        {"ended": "Revoke"},
    ),
]


@pytest.mark.parametrize(("text", "glued", "values", "expected"), ABOUT)
def test_a_line_about_the_communicator_is_noted_at_it(text, glued, values, expected):
    (found,) = read(f"{HEADER}{START}\n{HEADER}{fill(text, *values, glued=glued)}\n").communicators
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("text", [row.text for row in FORMATS if row.text.startswith("NVLS comm ")])
def test_nvls_is_in_use_where_it_was_set_up_for_the_communicator(text):
    line = fill_somehow(text).replace("0x7f00", "0xaa")
    (found,) = read(f"{HEADER}{START}\n{HEADER}{line}\n").communicators
    assert found.nvls


# All of the table

TABLES = (NETWORK, LOCAL, COLLNET, NETWORKS, INTERFACES, HCAS, GDR, ENVIRONMENT, PLUGINS, LOADED, ABOUT)
NO_DEVICE = {"NET/IB : No device found.", "Failed to open libibverbs.so[.1]"}  # in test_fallback.py
IN_TABLES = {row[0] for table in TABLES for row in table} | set(INITS) | NO_DEVICE


def test_each_rule_names_format_strings_that_exist_in_these_releases():
    named = {(form.first, form.last, form.text) for rule in RULES for form in rule.formats}
    assert named <= {(row.first, row.last, row.text) for row in FORMATS}


def test_each_format_string_of_a_rule_is_tested():
    named = {form.text for rule in RULES for form in rule.formats if not form.text.startswith("NVLS comm ")}
    assert named <= IN_TABLES


NAMES = re.compile(
    r"(Channel|Coll|CollNet) %02d.* via |Using network|NET plugin %s|^NET/IB : Using|^NET/IB: \[%d\]"
    r"|GPU Direct RDMA (%s|En|Dis)|^Bootstrap ?: Using|^NET/Socket : Using|^Found network interface|coll channels"
    r"|- (%s|Abort|Destroy|Revoke) (START|COMPLETE)|Loaded \w+ plugin|Plugin ?: No plugin found|: Could not find:"
    r"|Plugin name set by env|IFNAME set|HCA set|External \w+ plugin|loaded external"
)
OTHERWISE = {
    "GIN/Plugin: Successfully loaded external plugin %s",
    "RMA/Plugin: Successfully loaded external plugin %s",
}
"""Of plug-ins for one-sided communication; their own line 'Loaded gin plugin' is read."""


def test_no_format_string_of_these_kinds_is_left_out():
    found = {row.text for row in FORMATS if row.level == "INFO" and NAMES.search(row.text)}
    assert len(found) > 100
    assert found - IN_TABLES == OTHERWISE


CHANNELS = {row[0] for row in (*NETWORK, *LOCAL, *COLLNET)}


def test_no_other_line_of_nccl_proves_a_transport():
    others = [row for row in FORMATS if row.text not in CHANNELS]
    assert len(others) == len(FORMATS) - len(CHANNELS)
    for row in others:
        text = fill_somehow(row.text).replace("\\n", "\n")
        report = read(f"gpu1:31:40 [0] {'x.cc:1 NCCL WARN' if row.level == 'WARN' else 'NCCL INFO'} {text}\n")
        assert report.connections == (), row.text
        assert report.counts.unknown_connections == 0, row.text
        assert report.fallback.status.value == "unknown", row.text


def test_every_warning_of_nccl_is_reported_once():
    for row in FORMATS:
        if row.level != "WARN":
            continue
        text = fill_somehow(row.text).replace("\\n", "\n")
        first = text.split("\n", 1)[0].strip()
        found = read(f"gpu1:31:40 [0] misc/x.cc:12 NCCL WARN {text}\n").messages
        assert [(message.text, message.where, message.count) for message in found] == (
            [(first, "misc/x.cc:12", 1)] if first else []
        )


def test_every_failure_in_an_info_line_is_kept_as_a_note_or_as_harmless():
    failure = re.compile(r"\b(fail(ed)?|error|timeout)\b", re.IGNORECASE)
    texts = {row.text for row in FORMATS if row.level == "INFO" and failure.search(row.text)} - IN_TABLES
    assert len(texts) > 100
    for text in texts:
        (message,) = read_line(fill_somehow(text).split("\\n", 1)[0]).messages
        assert message.severity.value in {"note", "harmless"}, text
