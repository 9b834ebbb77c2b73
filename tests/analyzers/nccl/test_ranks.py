"""Ranks of a communicator become ranks of the job, or stay open."""

from __future__ import annotations

from ppdiag.analyzers.nccl.transports import pairs, transports_of
from tests.analyzers.nccl.formats import between, read


def _log(*entries: tuple[str, int, int, str]) -> str:
    return "".join(f"{host}:{pid}:{thread} [0] NCCL INFO {text}\n" for host, pid, thread, text in entries)


def _start(comm: str, rank: int, size: int, identity: str) -> str:
    who = f"comm {comm} rank {rank} nranks {size}"
    return f"ncclCommInitRank {who} cudaDev 0 nvmlDev 0 busId c1000 commId {identity} - Init START"


def _send(source: int, destination: int, transport: str = "NET/IB/0/GDRDMA", channel: int = 0) -> str:
    return f"Channel {channel:02d}/0 : {source}[0] -> {destination}[0] [send] via {transport}"


def _receive(source: int, destination: int, transport: str = "NET/IB/0") -> str:
    return f"Channel 00/0 : {source}[0] -> {destination}[0] [receive] via {transport}"


WORLD = [(f"gpu{rank}", 30 + rank, 1, _start("0xaa", rank, 4, "0x111")) for rank in range(4)]
PAIR = [  # ranks 2 and 3 of the job are 0 and 1 of their own communicator
    ("gpu2", 32, 5, _start("0xbb", 0, 2, "0x222")),
    ("gpu3", 33, 5, _start("0xbb", 1, 2, "0x222")),
    ("gpu2", 32, 5, _send(0, 1, "NET/Socket/0")),
    ("gpu3", 33, 5, _receive(0, 1, "NET/Socket/0")),
]


def test_in_the_world_communicator_a_rank_is_the_rank_of_the_job():
    report = read(_log(*WORLD, ("gpu0", 30, 1, _send(0, 3))))
    assert between(report, 0, 3) == "NET/IB/GDRDMA"
    assert between(report, 3, 0) is None


def test_in_a_smaller_communicator_ranks_are_mapped_by_its_members():
    report = read(_log(*WORLD, *PAIR))
    assert between(report, 2, 3) == "NET/Socket"
    assert between(report, 0, 1) is None


def test_without_the_members_a_rank_of_a_smaller_communicator_stays_open():
    report = read(_log(*WORLD, PAIR[0], PAIR[2]))
    (pair,) = pairs(report)
    assert (pair.source, pair.destination, pair.ends) == (2, None, (0, 1))


def test_a_record_of_the_job_says_whose_process_it_is():
    ranks = {("gpu2.cluster.example", 32): 6, ("gpu3.cluster.example", 33): 7}
    report = read(_log(*PAIR), ranks=ranks, world_size=8)
    assert between(report, 6, 7) == "NET/Socket"
    assert between(report, 0, 1) is None


def test_two_processes_of_a_larger_job_are_not_taken_for_its_world():
    report = read(_log(*PAIR), ranks={}, world_size=8)
    assert between(report, 0, 1) is None
    assert len(report.connections) == 2


def test_a_channel_connected_by_another_thread_goes_to_the_communicator_that_fits():
    lazy = ("gpu2", 32, 99, _send(2, 3))
    report = read(_log(*WORLD, *PAIR[:2], lazy))
    assert report.connections[0].communicator == "0x111"
    assert between(report, 2, 3) == "NET/IB/GDRDMA"


def test_where_two_communicators_fit_none_is_named():
    # gpu0 is rank 0 of both, and the line says no more than 0 -> 1.
    other = [("gpu0", 30, 2, _start("0xcc", 0, 2, "0x333")), ("gpu2", 32, 2, _start("0xcc", 1, 2, "0x333"))]
    report = read(_log(*WORLD, *other, ("gpu0", 30, 99, _send(0, 1))))
    assert report.connections[0].communicator == ""
    assert between(report, 0, 1) is None
    assert between(report, 0, 2) is None


def test_before_commids_the_thread_tells_the_communicator_and_complete_comes_last():
    text = "comm 0xaa rank 0 nranks 2 cudaDev 0 busId c1000 - Init COMPLETE"
    send = "Channel 00 : 0[c1000] -> 1[47000] [send] via NET/IB/0/GDRDMA"
    report = read(_log(("gpu0", 30, 1, send), ("gpu0", 30, 1, text)))
    assert between(report, 0, 1) == "NET/IB/GDRDMA"
    assert report.connections[0].communicator == "0xaa@gpu0:30"


def test_before_2_18_what_a_thread_wrote_belongs_to_the_communicator_that_it_completes():
    lines = []
    for rank in (0, 1):
        world, pair = f"comm 0xaa rank {rank} nranks 2", f"comm 0xbb rank {1 - rank} nranks 2"
        for comm, identity, source in ((world, "0x111", rank), (pair, "0x222", 1 - rank)):
            ends = f"{source}[c1000] -> {1 - source}[c1000]"
            texts = ("Ring 00 : 1 -> 0 -> 1", f"Channel 00/0 : {ends} [send] via NET/IB/0")
            done = f"{comm} cudaDev 0 busId c1000 commId {identity} - Init COMPLETE"
            lines += [(f"gpu{rank}", 30 + rank, 1, text) for text in (*texts, done)]
    report = read(_log(*lines))
    assert [each.communicator for each in report.connections] == ["0x111", "0x222", "0x111", "0x222"]
    assert [each.rings for each in report.communicators] == [1, 1, 1, 1]


def test_the_children_of_a_split_are_one_communicator():
    lines = [*WORLD]
    for rank in (2, 3):
        who = f"comm 0xbb rank {rank - 2} nranks 2 cudaDev 0 nvmlDev 0 busId c1000"
        split = f"{who} parent 0xaa splitCount 1 color 77 key 0"
        lines.append((f"gpu{rank}", 30 + rank, 5, f"ncclCommSplit {split}- Init START"))
    report = read(_log(*lines, ("gpu2", 32, 5, _send(0, 1, "NET/Socket/0"))))
    assert report.connections[0].communicator == "0x111/1.77"
    assert between(report, 2, 3) == "NET/Socket"


def test_a_channel_that_the_same_thread_connects_later_is_not_laid_to_its_last_communicator():
    done = [(host, pid, thread, text.replace("START", "COMPLETE")) for host, pid, thread, text in WORLD]
    late = ("gpu2", 32, 1, _send(0, 1, "NET/Socket/0"))  # rank 0 of the pair, by the thread that set the world up
    report = read(_log(*WORLD, *done, *PAIR[:2], late))
    assert report.connections[0].communicator == "0x222"
    assert between(report, 2, 3) == "NET/Socket"


def test_a_log_of_channel_lines_alone_is_numbered_by_them():
    assert between(read(_log(("gpu0", 30, 1, _send(0, 1)))), 0, 1) == "NET/IB/GDRDMA"


def test_both_sides_of_a_connection_count_once():
    report = read(_log(*WORLD, ("gpu0", 30, 1, _send(0, 3)), ("gpu3", 33, 1, _receive(0, 3))))
    assert [(pair.transport, pair.channels) for pair in pairs(report)] == [("NET/IB/GDRDMA", 1)]


def test_the_receivers_line_counts_where_the_senders_log_is_missing():
    report = read(_log(*WORLD, ("gpu3", 33, 1, _receive(0, 3))))
    assert between(report, 0, 3) == "NET/IB"


def test_several_transports_of_a_link_are_named_by_their_channels():
    sends = [("gpu0", 30, 1, _send(0, 3, "NET/Socket/0", channel)) for channel in (0, 1)]
    report = read(_log(*WORLD, *sends, ("gpu0", 30, 1, _send(0, 3, "NET/IB/8(2)/GDRDMA", 2))))
    assert between(report, 0, 3) == "NET/Socket + NET/IB/GDRDMA (PXN)"


def test_an_address_used_again_is_a_new_communicator():
    end = "comm 0xaa rank 0 nranks 4 cudaDev 0 busId c1000 - Destroy COMPLETE"
    again = ("gpu0", 30, 1, _start("0xaa", 0, 4, "0x999"))
    before, after = ("gpu0", 30, 1, _send(0, 1)), ("gpu0", 30, 1, _send(0, 2))
    report = read(_log(*WORLD, before, ("gpu0", 30, 1, end), again, after))
    assert [each.communicator for each in report.connections] == ["0x111", "0x999"]
    assert {each.ended for each in report.communicators if each.id == "0x111"} == {"", "Destroy"}


def test_rows_for_the_diagnosis_have_the_ranks_and_nvls_has_its_own():
    nvls = "NVLS comm 0xaa headRank 0 nHeads 4 buffSize 1 nvlsPerRankSize 1 nvlsTotalSize 1"
    rows = transports_of(read(_log(*WORLD, ("gpu0", 30, 1, nvls), ("gpu0", 30, 1, _send(0, 3)))))
    assert rows == (
        {
            "src_rank": 0,
            "dst_rank": 3,
            "communicator": "0x111",
            "transport": "NET/IB/GDRDMA",
            "family": "IB",
            "channels": 1,
            "hosts": ["gpu0"],
            "fallback": None,
        },
        {
            "src_rank": None,
            "dst_rank": None,
            "communicator": "0x111",
            "transport": "NVLS",
            "family": "NVLS",
            "channels": 0,
            "hosts": ["gpu0"],
            "fallback": None,
        },
    )
