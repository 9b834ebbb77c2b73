"""Logs of NCCL's Inspector, in the form of the examples of its README."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.analyzers.sources import read_trace
from ppdiag.errors import BadRecord, NoPipelineFound


def record(rank, number, time_us, **perf):
    """As the README's example: 485.12 GB/s on 8 ranks."""
    return {
        "header": {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": 4, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "",
            "rec_mechanism": "profiler_plugin",
            "dump_timestamp_us": 1748030377748202,
            "hostname": "example-hostname",
            "pid": 1639453,
        },
        "coll_perf": {
            "coll": "AllReduce",
            "coll_sn": number,
            "coll_msg_size_bytes": 17179869184,
            "coll_exec_time_us": time_us,
            "coll_algobw_gbs": 277.210914,
            "coll_busbw_gbs": 485.119099,
            **perf,
        },
    }


def write(folder, times_us, calls=20):
    for rank, time_us in enumerate(times_us):
        lines = [json.dumps(record(rank, number, time_us)) for number in range(calls)]
        (folder / f"host-pid{rank}.log").write_text("\n".join(lines) + "\n")
    return folder


def said(folder):
    with pytest.raises(NoPipelineFound) as caught:
        read_trace([folder])
    return str(caught.value)


def test_the_speed_of_each_communicator_is_said(tmp_path):
    text = said(write(tmp_path, (61974, 61974, 61974, 61974)))
    assert "no ops of a pipeline" in text
    assert "4 ranks, 80 AllReduce of 17179869184 bytes: 62 ms, 485 GB/s" in text


def test_the_rank_that_spends_the_least_time_in_a_collective_has_come_last(tmp_path):
    assert "rank 2 of it comes last to 20 of 20 (50 ms after the first)" in said(
        write(tmp_path, (61000, 62000, 12000, 61500))
    )


def test_nobody_is_blamed_for_few_calls_or_turns(tmp_path):
    assert "comes last" not in said(write(tmp_path, (61000, 62000, 12000, 61500), calls=5))
    for rank in range(4):
        lines = [json.dumps(record(rank, n, 100 if n % 4 == rank else 500)) for n in range(40)]
        (tmp_path / f"host-pid{rank}.log").write_text("\n".join(lines))
    assert "comes last" not in said(tmp_path)


def test_packed_logs_are_read_as_far_as_they_go(tmp_path):
    lines = "\n".join(json.dumps(record(0, number, 5.0)) for number in range(2000))
    packed = gzip.compress(lines.encode())
    (tmp_path / "host.log.gz").write_bytes(packed[: len(packed) // 2])
    assert "AllReduce" in said(tmp_path)


def test_a_packed_bomb_is_read_no_further_than_is_sensible(tmp_path):
    line = json.dumps(record(0, 1, 5.0)).encode() + b"\n"
    packed = gzip.compress(line + b" " * (70 << 20) + b"\n" + b"{}\n" * 1000)
    assert len(packed) < 1 << 20
    (tmp_path / "host.log.gz").write_bytes(packed)
    assert "lines were left out" not in said(tmp_path)


def test_lines_that_are_cut_off_are_counted(tmp_path):
    line = json.dumps(record(0, 1, 5.0))
    (tmp_path / "host.log").write_text(f"{line}\n{line[:300]}\n")
    assert "1 lines were left out" in said(tmp_path)


def message(rank, end, peer, time_us, size=4096):
    row = record(rank, 1, 5.0)
    del row["coll_perf"]
    perf = {"p2p": end, "p2p_sn": 1, "p2p_peer": peer, "p2p_msg_size_bytes": size, "p2p_exec_time_us": time_us}
    return {**row, "p2p_perf": perf}


def lines(folder, rows):
    (folder / "host.log").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def test_the_slowest_link_takes_what_the_end_that_waits_less_says(tmp_path):
    rows = [message(0, "Send", 1, 900.0), message(1, "Recv", 0, 200.0), message(1, "Send", 2, 300.0)]
    assert "4 ranks, messages on 2 links, slowest from rank 1 to 2 of it: 4096 bytes in 0.3 ms" in said(
        lines(tmp_path, rows)
    )


def test_records_without_a_communicator_are_of_the_one_named_last(tmp_path):
    """As newer versions write them: one record of the communicator, then its calls."""
    rows = []
    for rank in range(4):
        whole = record(rank, 7, 62.0)
        perf = whole.pop("coll_perf")
        stats = {"coll_records": 1, "coll_dropped_since_last_dump": 3, "p2p_dropped_since_last_dump": 0}
        rows += [{**whole, "dump_stats": stats}, {"coll_perf": perf}, {"proxy_trace": {}}]
    text = said(lines(tmp_path, rows))
    assert "4 ranks, 4 AllReduce of 17179869184 bytes: 0.062 ms, 485 GB/s" in text
    assert "12 calls were dropped by the Inspector itself" in text
    assert "lines were left out" not in text


def test_calls_behind_a_damaged_communicator_are_not_those_of_the_one_before(tmp_path):
    whole = record(0, 7, 62.0)
    perf = {"coll_perf": whole.pop("coll_perf")}
    good = json.dumps({**whole, "dump_stats": {}})
    (tmp_path / "host.log").write_text("\n".join([good, json.dumps(perf), good[:-40], json.dumps(perf)]))
    text = said(tmp_path)
    assert "1 AllReduce" in text
    assert "2 lines were left out" in text


def test_numbers_without_bounds_are_no_records(tmp_path):
    odd = [record(0, 1, 5.0, coll_msg_size_bytes="9" * 400), record(0, -1, 5.0), message(2**80, "Send", 1, 5.0)]
    assert "3 lines were left out" in said(lines(tmp_path, [record(0, 1, 5.0), *odd]))


def test_records_of_other_kinds_alone_are_none(tmp_path):
    row = record(0, 1, 5.0)
    row["p2p_perf"] = row.pop("coll_perf")
    with pytest.raises(BadRecord, match="expected records of NCCL's Inspector"):
        read_trace([lines(tmp_path, [row])])


VALUES = st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)


@given(st.dictionaries(st.sampled_from(["header", "coll_perf"]), VALUES), st.dictionaries(st.text(max_size=9), VALUES))
def test_odd_records_are_left_out_or_read(tmp_path_factory, odd, perf):
    folder = tmp_path_factory.mktemp("odd")
    rows = [record(0, 1, 5.0), {**record(0, 1, 5.0), **odd}, record(0, 1, 5.0, **perf)]
    (folder / "host.log").write_text("\n".join(json.dumps(row) for row in rows))
    assert "AllReduce" in said(folder)
