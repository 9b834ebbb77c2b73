"""Prefixes, torn and interleaved lines, and lines that prove nothing."""

from __future__ import annotations

import pytest

from ppdiag.analyzers.nccl.lines import MAX_LINE_BYTES
from ppdiag.analyzers.nccl.model import Severity
from tests.analyzers.nccl.formats import DATA, HEADER, read

P2P = "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
NET = "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA"


def test_the_real_log_uses_p2p_on_all_48_connections_and_leaves_its_roce_devices_unused():
    report = read((DATA / "single_node_roce_unused.log").read_bytes())
    assert len(report.connections) == 48
    assert {each.text for each in report.connections} == {"P2P/direct pointer/read"}
    assert {each.channel for each in report.connections} == set(range(24))
    assert {(each.source_job_rank, each.destination_job_rank) for each in report.connections} == {(0, 1), (1, 0)}
    assert [(hca.name, hca.link, hca.gdr) for hca in report.hcas] == [
        ("mlx5_0", "RoCE", False),
        ("mlx5_1", "RoCE", False),
    ]
    assert report.networks_loaded == ("IB",)
    assert report.versions == ("2.27.7+cuda13.0",)
    assert [(each.rank, each.size, each.channels, each.ended) for each in report.communicators] == [
        (0, 2, 24, "Destroy"),
        (1, 2, 24, "Destroy"),
    ]
    assert report.fallback.status.value == "none"
    assert report.complaints(Severity.ERROR, Severity.WARNING, Severity.NOTE) == ()
    assert (report.counts.torn, report.counts.unknown_connections) == (0, 0)


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("", None),
        ("[default3]:", None),
        ("[trainer3]: ", None),
        ("[rank3]:", 3),
        ("[default0]:[rank3]:", 3),
        ("3: ", 3),
        (" 3: ", 3),
        ("[1,3]<stdout>:", 3),
        ("[1,3]<stderr>: ", 3),
        ("[prterun-gpu1-77@1,3]<stdout>:", 3),
        ("(RayWorkerWrapper pid=531, ip=10.0.0.7) ", None),
        ("\x1b[36m(RayWorkerWrapper pid=531, ip=10.0.0.7)\x1b[0m ", None),
        ("(pid=531) ", None),
        ("[2026-01-31 10:11:12] ", None),
        ("2026-01-31T10:11:12.123456Z ", None),
        ("[pod/trainer-0/pytorch] ", None),
        ("worker-1  | ", None),
        ("[1,3]<stdout>:[2026-01-31 10:11:12] ", 3),
    ],
)
def test_what_a_launcher_puts_before_a_line_is_stripped_and_its_rank_kept(prefix, rank):
    report = read(f"{prefix}gpu1:31:40 [0] NCCL INFO {P2P}\n")
    (found,) = report.connections
    assert (found.process.host, found.process.pid, found.transport) == ("gpu1", 31, "P2P/CUMEM")
    start = "comm 0xaa rank 0 nranks 2 cudaDev 0 busId c1 commId 0xabc - Init START"
    # With the ranks in the prefixes and no communicator of all GPUs, the number is the rank in the job.
    lines = "".join(f"{prefix}gpu1:31:40 [0] NCCL INFO {text}\n" for text in (start, P2P))
    others = "".join(f"gpu1:{pid}:1 [0] NCCL INFO {start.replace('0xabc', hex(pid))}\n" for pid in (32, 33))
    (found,) = read(lines + others).connections
    assert found.source_job_rank == rank


def test_ray_folds_equal_lines_together_and_says_how_many():
    line = f"(Worker pid=5) gpu1:31:40 [0] NCCL INFO {P2P}"
    text = f"{line} [repeated 7x across cluster] (Ray deduplicates logs by default.)\n"
    assert read(text).connections[0].transport == "P2P/CUMEM"
    warning = "(Worker pid=5) gpu1:31:40 [0] x.cc:1 NCCL WARN Cuda failure 'x' [repeated 7x across cluster]\n"
    assert read(warning).messages[0].count == 7


def test_a_bare_version_line_is_read_with_a_prefix_or_without():
    text = "NCCL version 2.21.5+cuda12.4\n[1,0]<stdout>:NCCL version 2.21.5+cuda12.4\n"
    assert read(text).versions == ("2.21.5+cuda12.4",)
    assert read("gpu1:1:1 [0] NCCL INFO RCCL version 2.18.3+hip6.0 HEAD:abc\n").versions == ("RCCL 2.18.3+hip6.0",)


def test_the_words_nccl_version_inside_another_sentence_are_no_version():
    text = "RuntimeError: NCCL error in: x.cpp:1331, unhandled system error, NCCL version 2.14.3\n"
    assert read(f"{HEADER}{P2P}\n{text}").versions == ()


TORN = [
    f"{HEADER}Channel 00/0 : 0[0] -> 1[1] viagpu2:7:7 [1] NCCL INFO Using network IB\n P2P/CUMEM\n",
    f"{HEADER}Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/1gpu2:7:7 [1] NCCL INFO Using network IB\n0/GDRDMA\n",
    f"{HEADER}Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0[default1]:gpu2:7:7 [1] NCCL INFO Using network IB\n",
    f"{HEADER}Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0",
    f"{HEADER}Channel 00/0 : 0[0] -> 8[0] [send] via NET/Soc\n",
    f"{HEADER}Channel 00/0 : 0[0] -> 1[1] via \n",
    "[2] -> 3[3] via P2P/CUMEM\n" + HEADER + "Using network IB\n",
    f"{HEADER}Channel 00/0 : 0[0] -> 1[1] via P2P/IPCChannel 01/0 : 0[0] -> 1[1] via P2P/IPC\n",
    f"{HEADER}Channel 00/0 : 0[0] -> 1[1] via NET/IB/0/GDRDMA\n",  # no side: NCCL never writes this
    f"{HEADER}Channel 00/0 : 0[0] -> 1[1] [send] via P2P/IPC\n",
    f"{HEADER}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read/GDRDMA/and more\n",
    f"{HEADER}Channel 00/0 : 0[0] -> 1[1] via P2P/RDMA\n",
]


@pytest.mark.parametrize("text", TORN)
def test_a_torn_channel_line_is_unknown_and_never_a_transport(text):
    report = read(text)
    assert report.connections == ()
    assert report.counts.unknown_connections == 1


def test_reading_goes_on_at_the_entry_that_tore_another():
    text = f"{HEADER}Channel 00/0 : 0[0] -> 1[1] viagpu2:7:7 [1] NCCL INFO {NET}\n{HEADER}{P2P}\n"
    report = read(text)
    assert [each.transport for each in report.connections] == ["NET/IB", "P2P/CUMEM"]
    assert report.counts.torn == 1


def test_a_host_is_known_again_although_a_torn_word_runs_into_it():
    torn = f"{HEADER}Channel 00/0 : 0[0] -> 1[1] viagpu2:7:7 [1] NCCL INFO {NET}\n"
    assert read(f"gpu2:7:7 [1] NCCL INFO Using network IB\n{torn}").connections[0].process.host == "gpu2"


def test_an_entry_behind_another_programs_unfinished_line_is_whole():
    assert len(read(f" 45%|####     | 12/27 [00:01]\r{HEADER}{P2P}\n").connections) == 1


TRAPS = [
    "Using network Socket",
    "NET/Socket : Using [0]eth0:10.0.0.1<0>",
    "NET/Socket: Using 2 threads and 8 sockets per thread",
    "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
    "NET/IB : Using [RO]",
    "Channel 00/24 :    0   1",
    "Channel 00/02 : 0 1 2 3 4 5 6 7",
    "Ring 00 : 1 -> 0 -> 1",
    "Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1",
    "NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)",
    "Connected all rings, use ring PXN 0 GDR 1",
    "Pattern 4, crossNic 0, nChannels 12, bw 20.000000/20.000000, type NVL/PIX, sameChannels 1",
    "New proxy send connection 0 from local rank 0, transport 2",
    "comm 0xaa rank 0 nranks 2 cudaDev 0 busId c1000 - Abort COMPLETE",
    "MNNVL 1 cliqueId 1 cliqueSize 8 cliqueRank 0",
    "SHM legacy: sharing buffer with GPU via cudaHostRegister + cudaHostGetDevicePointer (host 0x7f size 3)",
    "RAS connected with 10.0.0.1<5> via a socket that's no longer current!",
]


@pytest.mark.parametrize("text", TRAPS)
def test_what_is_loaded_planned_or_able_is_no_transport(text):
    report = read(f"{HEADER}{text}\n")
    assert (report.connections, report.counts.unknown_connections) == ((), 0)
    assert report.complaints(Severity.ERROR, Severity.WARNING) == ()


def test_an_empty_list_of_devices_is_no_device():
    assert read(f"{HEADER}NET/IB : Using [RO]\n").hcas == ()
    assert read(f"{HEADER}NET/IB : Using [RO]; OOB eth0:10.0.0.1<0>\n").hcas == ()


def test_socket_is_named_and_every_channel_is_p2p():
    report = read(f"{HEADER}NET/Socket : Using [0]eth0:10.0.0.1<0>\n{HEADER}Using network Socket\n{HEADER}{P2P}\n")
    assert [each.transport for each in report.connections] == ["P2P/CUMEM"]
    assert report.fallback.status.value == "none"


def test_ib_is_named_and_every_channel_is_mnnvl():
    line = "Channel 00/0 : 0[0] -> 4[0] via P2P/MNNVL"
    report = read(f"{HEADER}Using network IB\n{HEADER}{line}\n")
    assert [each.transport for each in report.connections] == ["P2P/MNNVL"]


def test_a_line_longer_than_the_limit_is_cut_and_counted():
    report = read("x" * 100 + HEADER + P2P + "y" * (3 * MAX_LINE_BYTES) + f"\n{HEADER}{P2P}\n")
    assert report.counts.overlong == 1
    assert report.counts.lines == 2
    assert len(report.connections) == 1


def test_carriage_returns_at_line_ends_do_no_harm():
    assert len(read(f"{HEADER}{P2P}\r\n").connections) == 1
