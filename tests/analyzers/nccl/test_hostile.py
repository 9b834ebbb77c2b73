"""Any bytes may be in a log: nothing crashes, memory stays bounded, and no transport is made up."""

from __future__ import annotations

import io
import json
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.analyzers.nccl import complaints, surroundings, wiring
from ppdiag.analyzers.nccl.lines import MAX_LINE_BYTES, read_lines
from ppdiag.analyzers.nccl.transports import pairs, transports_of
from tests.analyzers.nccl.formats import DATA, FORMATS, HEADER, fill_somehow, read

LINES = [f"{HEADER}{fill_somehow(row.text)}".encode() for row in FORMATS[::9]]
REAL = (DATA / "single_node_roce_unused.log").read_bytes().splitlines()[:1300:3]


def _check(data: bytes) -> None:
    report = read(data)
    json.dumps(report.to_dict())
    transports_of(report)
    assert report.counts.lines <= data.count(b"\n") + 1


@given(st.binary(max_size=2000))
def test_any_bytes_are_read(data):
    _check(data)


@given(st.lists(st.sampled_from([*LINES, *REAL]), max_size=8), st.binary(max_size=40), st.integers(0, 2000))
def test_any_bytes_between_lines_of_nccl_are_read(lines, noise, place):
    data = b"\n".join(lines)
    _check(data[:place] + noise + data[place:])


@given(st.text(max_size=300))
def test_any_text_of_an_entry_is_read(text):
    report = read(f"{HEADER}{text}\n")
    assert report.counts.lines >= 1


def test_10000_mutated_lines_crash_nothing():
    chance = random.Random(7)
    for _ in range(100):
        lines = [bytearray(chance.choice(LINES) if chance.random() < 0.5 else chance.choice(REAL)) for _ in range(100)]
        for line in lines:
            for _ in range(chance.randrange(4)):
                _mutate(line, chance)
        _check(b"\n".join(lines) + b"\n")


def _mutate(line: bytearray, chance: random.Random) -> None:
    place = chance.randrange(len(line) + 1)
    match chance.randrange(4):
        case 0:
            del line[place:]
        case 1:
            line[place:place] = chance.randbytes(chance.randrange(1, 6))
        case 2:
            del line[place : place + chance.randrange(1, 12)]
        case _:
            line[place:place] = bytes(chance.choice(REAL))[: chance.randrange(1, 80)]


def test_channel_lines_cut_anywhere_and_run_into_each_other_make_up_no_transport():
    """Every cut of two ranks' channel lines: what is found was written, or nothing is."""
    first = f"{HEADER}Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/10/GDRDMA"
    second = "gpu2:7:7 [1] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/CUMEM/read"
    written = {("NET/IB", 10, True, 0, 8), ("P2P/CUMEM", None, False, 1, 0)}
    for cut in range(len(first) + 1):
        report = read(f"{first[:cut]}{second}\n{first[cut:]}\n")
        found = {
            (each.transport, each.net_device, each.gdrdma, each.source_job_rank, each.destination_job_rank)
            for each in report.connections
        }
        assert found <= written, cut
        assert ("P2P/CUMEM", None, False, 1, 0) in found, cut


@pytest.mark.parametrize(
    "line",
    [
        b"a" * MAX_LINE_BYTES,
        b"1:" * (MAX_LINE_BYTES // 2),
        b"gpu1:1:1 [0] " * (MAX_LINE_BYTES // 13),
        b"[0]x:1/IB " * 1600,
        HEADER.encode() + b"NET/IB : Using" + b" [0]m:1/IB" * 1500,
        HEADER.encode() + b"Bootstrap : Using" + b" eth0:1<0>" * 1500 + b"!",
        HEADER.encode() + b"NET/Plugin : " + b"No plugin found (" * 900,
        HEADER.encode() + b"NCCL_" + b"A" * 16000,
        HEADER.encode() + b"comm 0xaa rank 0 nranks 2 cudaDev 0 busId c1 " + b"- Init STAR" * 1400,
        HEADER.encode() + b"(" * 16000,
        b"[default0]:" * 1400 + HEADER.encode(),
    ],
    ids=lambda line: line[-40:-20],
)
def test_no_line_takes_long(line):
    start = time.process_time()
    for _ in range(5):
        read(line + b" NCCL via NET/ nccl\n")
    assert time.process_time() - start < 1.0


def test_memory_is_bounded_and_what_is_left_out_is_counted(monkeypatch):
    monkeypatch.setattr(wiring, "MAX_RECORDS", 10)
    monkeypatch.setattr(surroundings, "MAX_NAMES", 5)
    monkeypatch.setattr(complaints, "MAX_MESSAGES", 4)
    lines = [f"{HEADER}Channel 00/0 : {rank}[0] -> 1[0] [send] via NET/IB/0\n" for rank in range(30)]
    lines += [f"{HEADER}NCCL_V{'A' * place} set by environment to 1\n" for place in range(8)]
    lines += [f"gpu1:1:1 [0] x.cc:1 NCCL WARN complaint {'x' * place}\n" for place in range(9)]
    report = read("".join(lines))
    assert (len(report.connections), len(report.environment), len(report.messages)) == (10, 5, 4)
    assert report.counts.dropped == 20 + 3
    assert len(pairs(report)) == 10


def test_lines_are_read_one_at_a_time():
    stream = io.BytesIO(b"one\ntwo\n")
    lines = read_lines(stream)
    assert next(lines).text == "one"
    assert stream.tell() == 4
