"""Reading run directories: what was written comes back, and nothing damaged or hostile brings the reader down."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.sources import read_trace
from ppdiag.errors import BadRecord, NotARun, NothingRecorded, PathNotFound, PpdiagError, VersionMismatch
from ppdiag.launch import prepare_run_directory
from ppdiag.model import SPAN_FIELDS, Flag, Kind, RankStatus
from ppdiag.rundir import BLOCK_HEADER, BLOCK_MAGIC, RUN_FILE, encode_block, encode_header
from ppdiag.stated import StatedLayout
from ppdiag.trace import Waiting, sorted_spans
from tests.analyzers.factory import Pipeline
from tests.analyzers.runs import blocks, header_bytes, write_run, write_spans, write_state, write_words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ppdiag.trace import Trace


def small(ranks: int = 2, steps: int = 4) -> Trace:
    orders = schedules.order("1F1B", ranks=ranks, chunks=1, microbatches=ranks)
    return Pipeline(orders, list(range(ranks)), steps=steps, tail=0).trace()


def explain(folder: Path) -> str:
    """The whole way: the class of the error, or 'ok' where there is a diagnosis that JSON can hold."""
    try:
        diagnosis = diagnose(read_trace([folder]))
    except PpdiagError as error:
        return type(error).__name__
    json.dumps(diagnosis.to_dict(), allow_nan=False)
    return "ok"


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    trace = small()
    write_run(tmp_path, trace)
    found = read_trace([tmp_path])
    for name in ("rank", "kind", "step", "peer", "seq", "start_ns", "end_ns", "post_ns", "stage", "microbatch", "tag"):
        assert (found.spans[name] == trace.spans[name]).all()
    assert {group.ranks for group in found.groups} == {group.ranks for group in trace.groups}
    assert found.warnings == ()
    assert found.job.framework == "torch.distributed.pipelining"
    assert found.ranks[0].status == "finished"
    assert found.clock_error_s == 0.0


def test_groups_that_the_ranks_number_differently_are_one(tmp_path: Path) -> None:
    trace = small()
    spans = trace.spans.copy()
    for rank in (0, 1):
        own = spans[spans["rank"] == rank]
        own["group"] = 4 + rank
        write_spans(tmp_path / f"rank0000{rank}-0.spans", own, {"rank": rank, "clock": "one"})
        words = [{"type": "group", "id": 4 + rank, "name": f"name{rank}", "ranks": [0, 1]}]
        write_words(tmp_path / f"rank0000{rank}-0.jsonl", words)
    found = read_trace([tmp_path])
    assert [group.ranks for group in found.groups] == [(0, 1)]
    assert (found.spans["group"] == 0).all()


def test_the_peak_of_a_ranks_memory_reaches_the_tables_and_an_impossible_one_does_not(tmp_path: Path) -> None:
    write_run(tmp_path, small())
    with (tmp_path / "rank00001-0.jsonl").open("a") as stream:
        for current, peak in ((700, 900), (100, 1200), (5, -1)):
            word = {"type": "memory", "stage": 1, "current_bytes": current, "peak_bytes": peak}
            stream.write(json.dumps(word) + "\n")
    found = diagnose(read_trace([tmp_path]))
    assert [rank.peak_memory_bytes for rank in found.ranks] == [None, 1200]
    assert [stage.peak_memory_bytes for stage in found.stages] == [None, 1200]


def test_a_torn_last_block_loses_no_other(tmp_path: Path) -> None:
    trace = small()
    write_run(tmp_path, trace)
    path = tmp_path / "rank00001-0.spans"
    path.write_bytes(path.read_bytes()[:-5])
    found = read_trace([tmp_path])
    own = trace.spans[trace.spans["rank"] == 1]
    assert len(found.by_rank()[1]) == 16 * ((len(own) - 1) // 16)
    assert any("torn or damaged" in warning for warning in found.warnings)
    assert explain(tmp_path) == "ok"


def test_a_damaged_block_in_the_middle_loses_itself_only(tmp_path: Path) -> None:
    trace = small()
    write_run(tmp_path, trace)
    path = tmp_path / "rank00000-0.spans"
    parts = blocks(trace.spans[trace.spans["rank"] == 0])
    damaged = bytearray(parts[1])
    damaged[40] ^= 0xFF
    path.write_bytes(encode_header({"rank": 0, "clock": "one"}) + parts[0] + bytes(damaged) + b"".join(parts[2:]))
    found = read_trace([tmp_path])
    assert len(found.by_rank()[0]) == int((trace.spans["rank"] == 0).sum()) - 16
    assert explain(tmp_path) == "ok"


def test_garbage_between_blocks_is_skipped(tmp_path: Path) -> None:
    trace = small()
    write_run(tmp_path, trace)
    own = blocks(trace.spans[trace.spans["rank"] == 0])
    garbage = BLOCK_MAGIC + b"\xff" * 50 + BLOCK_HEADER.pack(BLOCK_MAGIC, 2**32 - 1, 0)
    whole = encode_header({"rank": 0, "clock": "one"}) + garbage.join(own) + garbage
    (tmp_path / "rank00000-0.spans").write_bytes(whole)
    assert len(read_trace([tmp_path])) == len(trace)


@pytest.mark.timeout(20)
def test_a_file_of_false_blocks_is_given_up_in_time(tmp_path: Path) -> None:
    # 8 MB of marks, each promising the next 740 kB: to check them all would read 500 GB
    trace = small()
    write_run(tmp_path, trace)
    path = tmp_path / "rank00000-0.spans"
    path.write_bytes(path.read_bytes() + BLOCK_HEADER.pack(BLOCK_MAGIC, 10_000, 7) * 700_000)
    found = read_trace([tmp_path])
    assert len(found) == len(trace)
    assert any(f"{12 * 700_000} bytes" in warning for warning in found.warnings)


def test_an_empty_directory_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        read_trace([tmp_path])


def test_a_run_without_ranks_says_that_nothing_was_recorded(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text("{}")
    with pytest.raises(NothingRecorded):
        read_trace([tmp_path])


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound, match="nowhere"):
        read_trace([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    "content", [b"", b"garbage" * 100, b"PPDIAG-SPANS\n", b"PPDIAG-SPANS\n{\n", b"PPDIAG-SPANS\n7\n"]
)
def test_a_file_that_is_no_span_file_is_a_bad_record(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank00000-0.spans").write_bytes(content)
    with pytest.raises(BadRecord, match=r"rank00000-0\.spans"):
        read_trace([tmp_path])


def test_one_bad_file_among_good_ones_is_a_warning(tmp_path: Path) -> None:
    write_run(tmp_path, small())
    (tmp_path / "rank00002-0.spans").write_bytes(b"garbage")
    assert any("rank00002-0.spans" in warning for warning in read_trace([tmp_path]).warnings)
    assert explain(tmp_path) == "ok"


def test_another_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank00000-0.spans").write_bytes(header_bytes(version=99))
    with pytest.raises(VersionMismatch, match="99"):
        read_trace([tmp_path])


FIELDS: list[Any] = [
    None,
    7,
    "start_ns",
    [["start_ns", "<i8"]],
    [["start_ns", "O"]],
    [["start_ns"]],
    [["start_ns", "<i8"], ["start_ns", "<i8"]],
    {"start_ns": "<i8"},
    [[name, "<f8"] for name, _ in json.loads(header_bytes().split(b"\n")[1])["fields"]],
    [[name, "V9" * 50] for name, _ in json.loads(header_bytes().split(b"\n")[1])["fields"]],
    [[name, "(1000000000,)i8"] for name, _ in json.loads(header_bytes().split(b"\n")[1])["fields"]],
    [[name, "M8[ns]"] for name, _ in json.loads(header_bytes().split(b"\n")[1])["fields"]],
]


@pytest.mark.parametrize("fields", FIELDS)
def test_a_header_with_strange_fields_is_a_bad_record(tmp_path: Path, fields: Any) -> None:
    (tmp_path / "rank00000-0.spans").write_bytes(header_bytes(fields=fields) + b"BLK1" + b"\0" * 100)
    with pytest.raises(BadRecord):
        read_trace([tmp_path])


def test_fields_that_a_later_version_adds_are_ignored(tmp_path: Path) -> None:
    trace = small()
    write_run(tmp_path, trace)
    good = json.loads(header_bytes().split(b"\n")[1])["fields"]
    one = trace.spans[trace.spans["rank"] == 0][:1]
    record = blocks(one)[0][BLOCK_HEADER.size :] + struct.pack("<q", 7)
    whole = header_bytes(fields=[*good, ["temperature", "<i8"]], clock="one") + encode_block(record, 1)
    (tmp_path / "rank00000-0.spans").write_bytes(whole)
    assert read_trace([tmp_path]).by_rank()[0]["end_ns"].tolist() == one["end_ns"].tolist()


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, small(ranks=3))
    (tmp_path / "rank00001-0.spans").unlink()
    warnings = " ".join(read_trace([tmp_path]).warnings)
    assert "no record of 1 of 3 ranks (1)" in warnings
    assert explain(tmp_path) == "ok"


def test_missing_words_are_named_and_not_needed(tmp_path: Path) -> None:
    write_run(tmp_path, small())
    (tmp_path / "rank00001-0.jsonl").unlink()
    assert any("rank00001-0.jsonl" in warning for warning in read_trace([tmp_path]).warnings)
    assert explain(tmp_path) == "ok"


def test_of_a_restarted_job_the_last_start_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, small(steps=3))
    write_run(tmp_path, small(steps=5), start=1)
    found = read_trace([tmp_path])
    assert int(found.spans["step"].max()) == 4
    assert any("started up to 2 times" in warning for warning in found.warnings)


def test_two_directories_of_one_job_are_read_together(tmp_path: Path) -> None:
    trace = small()
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        write_run(tmp_path / str(rank), trace.where(trace.spans["rank"] == rank))
    assert len(read_trace([tmp_path / "0", tmp_path / "1"])) == len(trace)


def test_a_rank_that_died_inside_an_op_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, small())
    write_state(tmp_path / "rank00001-0.state", status=RankStatus.RAISED, kind=Kind.RECV, peer=0, microbatch=1)
    warnings = " ".join(diagnose(read_trace([tmp_path])).warnings)
    assert "rank 1 ended with an exception, inside the wait for a receive" in warnings
    assert "the wait for a receive from rank 0 (message 3, 1024 bytes) of microbatch 1 of stage 1 in step 7" in warnings


@pytest.mark.parametrize(("tag", "words"), [(0, "(message 3, 1024 bytes)"), (12, "(message 3, tag 12, 1024 bytes)")])
def test_a_wait_for_a_message_is_known_with_its_tag(tmp_path: Path, tag: int, words: str) -> None:
    write_run(tmp_path, small())
    write_state(tmp_path / "rank00001-0.state", kind=Kind.SEND, peer=0, tag=tag)
    facts = read_trace([tmp_path]).ranks[1]
    assert words in facts.inside
    assert facts.waiting == Waiting(is_send=True, peer=0, seq=3, tag=tag, size_bytes=1024, step=7)
    assert read_trace([tmp_path]).ranks[0].waiting is None


HOSTILE_WORDS = [
    b"[" * 100_000 + b"]" * 100_000,
    b'{"type": "fact", "name": "x", "value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"type": "group", "id": -7, "name": "g", "ranks": [0, 1]}',
    b'{"type": "group", "id": 1e999, "name": "g", "ranks": [0, 1]}',
    b'{"type": "group", "id": 1e12, "name": "g", "ranks": [0, 1]}',
    b'{"type": "group", "id": NaN, "name": "g", "ranks": [0, 1]}',
    b'{"type": "group", "id": 0, "name": "g", "ranks": [0, Infinity]}',
    b'{"type": "group", "id": 0, "name": "g", "ranks": [-1, 99999999999999999999999]}',
    b'{"type": "group", "id": 0, "name": null, "ranks": []}',
    b'{"type": "group", "id": [], "name": {}, "ranks": 7}',
    b'{"type": ["group"]}',
    b'{"type": "clock"}',
    b'{"type": "clock", "t0": "x", "t1": null, "t2": 1e400, "t3": []}',
    b'{"type": "fault"}',
    b'{"type": "fact", "name": "world_size", "value": 1000000000000000}',
    b'{"type": "fact", "name": "world_size", "value": "many"}',
    b'{"type": "fact", "name": "world_size", "value": -5}',
    b'{"type": "fact", "name": "microbatches", "value": "\\ud800"}',
    b'{"type": "fact", "name": "tp", "value": 0}',
    b'{"type": "fact", "name": "dp", "value": "x"}',
    b'{"type": "fact", "name": "framework", "value": 7}',
    b'{"type": "fact", "name": "schedule", "value": true}',
    b'{"type": "fact", "name": "host", "value": {}}',
    b"1" * 10_000,
    b"null",
    b"\xff\xfe\x00",
    b'"type"',
    b"[]",
]


@pytest.mark.parametrize("line", HOSTILE_WORDS, ids=range(len(HOSTILE_WORDS)))
@pytest.mark.parametrize("clock", ["one", "another"])
def test_hostile_words_bring_nothing_down(tmp_path: Path, line: bytes, clock: str) -> None:
    write_run(tmp_path, small())
    path = tmp_path / "rank00001-0.spans"
    own = small().by_rank()[1]
    write_spans(path, own, {"rank": 1, "clock": clock, "host": "host1"})
    with path.with_suffix(".jsonl").open("ab") as stream:
        stream.write(line + b"\n")
    assert explain(tmp_path) == "ok"


@pytest.mark.parametrize(
    "facts",
    [
        {"world_size": 10**15},
        {"world_size": -1},
        {"world_size": None},
        {"host": [1]},
        {"clock": None, "started_unix_ns": "x", "started_local_ns": []},
        {"clock": 7, "started_unix_ns": 10**30, "started_local_ns": -(10**30)},
        {"clock": {}, "started_unix_ns": float("nan")},
        {"framework": 7, "microbatches": "8", "pp": "x", "tp": "x", "dp": 0},
        {"tp": 0},
        {"tp": -3},
    ],
)
def test_hostile_headers_bring_nothing_down(tmp_path: Path, facts: dict[str, Any]) -> None:
    write_run(tmp_path, small())
    write_spans(tmp_path / "rank00001-0.spans", small().by_rank()[1], {"rank": 1, **facts})
    assert explain(tmp_path) == "ok"
    write_run(tmp_path, small(), header=facts)
    assert explain(tmp_path) == "ok"


EXTREMES = (-(2**63), -(2**31), -(2**15), -2, -1, 0, 1, 2, 3, 7, 99, 2**15 - 1, 2**16 - 1, 2**31 - 1, 2**62, 2**63 - 1)
ON_DISK = {name: dtype for name, _, dtype in SPAN_FIELDS}

fuzz = settings(
    max_examples=60, deadline=5_000, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@st.composite
def mutations(draw: st.DrawFn) -> list[tuple[float, str, int | float]]:
    """(which span, as a fraction; which field; its new value, or by how much it grows)."""
    value = st.sampled_from(EXTREMES) | st.floats(-3e7, 3e7, allow_nan=False)
    return draw(
        st.lists(st.tuples(st.floats(0, 0.999), st.sampled_from(sorted(ON_DISK)), value), min_size=1, max_size=8)
    )


@fuzz
@given(mutations())
def test_a_record_with_any_values_gives_a_result_or_one_clear_error(
    tmp_path: Path, changes: list[tuple[float, str, int | float]]
) -> None:
    trace = small()
    write_run(tmp_path, changed(trace, changes))
    explain(tmp_path)


def changed(trace: Trace, changes: Sequence[tuple[float, str, int | float]]) -> Trace:
    spans = trace.spans.copy()
    for where, name, value in changes:
        column = spans[name]
        index = int(where * len(column))
        bounds = np.iinfo(ON_DISK[name])
        wanted = int(value) if isinstance(value, int) else int(column[index]) + int(value)
        column[index] = min(max(wanted, bounds.min), bounds.max)
    return replace(trace, spans=spans)


@fuzz
@given(st.sampled_from(sorted(ON_DISK)), st.sampled_from(EXTREMES), st.floats(0, 0.999))
def test_a_column_of_one_value_gives_a_result_or_one_clear_error(
    tmp_path: Path, name: str, value: int, share: float
) -> None:
    trace = small()
    count = len(trace)
    write_run(tmp_path, changed(trace, [(i / count, name, value) for i in range(int(share * count), count)]))
    explain(tmp_path)


@fuzz
@given(
    st.sampled_from(["spans", "jsonl", "state"]),
    st.lists(st.tuples(st.floats(0, 0.9999), st.integers(0, 255)), min_size=1, max_size=20),
    st.floats(0, 1),
)
def test_damaged_bytes_give_a_result_or_one_clear_error(
    tmp_path: Path, suffix: str, changes: list[tuple[float, int]], kept: float
) -> None:
    write_run(tmp_path, small())
    path = tmp_path / f"rank00001-0.{suffix}"
    data = bytearray(path.read_bytes())
    for where, byte in changes:
        data[int(where * len(data))] = byte
    path.write_bytes(bytes(data[: int(kept * len(data)) + 1]))
    explain(tmp_path)


def test_spans_that_end_before_they_begin_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = small()
    spans = trace.spans.copy()
    spans["end_ns"][5] = spans["start_ns"][5] - 1
    write_run(tmp_path, changed(trace, [(5.5 / len(spans), "end_ns", int(spans["start_ns"][5]) - 1)]))
    found = read_trace([tmp_path])
    assert len(found) == len(trace) - 1
    assert any("1 spans" in warning for warning in found.warnings)


def test_init_traffic_is_kept_and_is_no_work(tmp_path: Path) -> None:
    trace = small()
    changes = [(i / len(trace) + 1e-6, "flags", int(Flag.INIT)) for i in range(4)]
    write_run(tmp_path, changed(trace, changes))
    assert int((read_trace([tmp_path]).spans["flags"] == Flag.INIT).sum()) == 4


def test_the_logs_of_nccl_beside_the_record_name_the_transport_of_each_link(tmp_path: Path) -> None:
    write_run(tmp_path, small())
    for rank in (0, 1):
        prefix = f"host{rank}:{100 + rank}:{100 + rank} [{rank}] NCCL INFO"
        device = f"cudaDev {rank} nvmlDev {rank} busId {rank}000"
        lines = [
            f"{prefix} ncclCommInitRank comm 0x1 rank {rank} nranks 2 {device} commId 0xabc - Init COMPLETE",
            f"{prefix} Channel 00/0 : {rank}[{rank}] -> {1 - rank}[{1 - rank}] [send] via NET/Socket/0",
        ]
        (tmp_path / f"nccl-host{rank}-{100 + rank}.log").write_text("\n".join(lines) + "\n")
    found = diagnose(read_trace([tmp_path]))
    assert {link.transport for link in found.links} == {"NET/Socket"}
    assert {(row["src_rank"], row["dst_rank"]) for row in found.transports} == {(0, 1), (1, 0)}


def test_two_jobs_are_not_read_as_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, small())
    with pytest.raises(NotARun, match="both hold rank 0"):
        read_trace([tmp_path / "a", tmp_path / "b"])
    assert len(read_trace([tmp_path / "a", tmp_path / "a"])) == len(small())


def test_a_world_size_that_is_no_number_leaves_no_rank_out(tmp_path: Path) -> None:
    write_run(tmp_path, small(ranks=2), header={"world_size": float("nan")})
    assert sorted(read_trace([tmp_path]).ranks) == [0, 1]


def test_ranks_that_an_earlier_job_of_another_size_left_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, small(ranks=4), header={"started_unix_ns": 1})
    write_run(tmp_path, small(ranks=2), start=1, header={"started_unix_ns": 2})
    found = read_trace([tmp_path])
    assert sorted(found.ranks) == [0, 1]
    assert any("2 ranks of a job of another size" in warning for warning in found.warnings)


def with_layers(folder: Path, *, called: bool) -> Trace:
    """A run whose rank 0 has named its layers, and recorded a call of one in its first forward."""
    trace = small()
    first = trace.spans[(trace.spans["rank"] == 0) & (trace.spans["kind"] == Kind.FORWARD)][:1].copy()
    first["kind"], first["op"], first["seq"] = Kind.LAYER, Kind.FORWARD, 0
    spans = np.concatenate([trace.spans, first]) if called else trace.spans
    write_run(folder, replace(trace, spans=sorted_spans(spans)))
    with next(folder.glob("rank00000*.jsonl")).open("a") as words:
        words.write(json.dumps({"type": "layers", "first": 0, "root": "Model", "names": ["layers.7"]}) + "\n")
    return trace


def test_layers_become_facts_of_their_rank_and_no_spans(tmp_path: Path) -> None:
    written = with_layers(tmp_path, called=True)
    found = read_trace([tmp_path])
    assert len(found) == len(written)
    (row,) = found.ranks[0].facts["layers"]
    assert (row["names"], row["stage"], row["forward_rest_s"]) == (["layers.7"], 0, 0.0)
    assert found.ranks[1].facts["layers"] == []
    assert found.warnings == ()


def test_layers_of_which_no_call_was_seen_are_spoken_of(tmp_path: Path) -> None:
    with_layers(tmp_path, called=False)
    (warning,) = read_trace([tmp_path]).warnings
    assert "rank 0: no call of its layers was seen" in warning


def test_a_rank_whose_words_are_lost_is_named(tmp_path):
    write_run(tmp_path, small())
    (tmp_path / "rank00001-0.jsonl").write_bytes(b"")
    found = read_trace([tmp_path])
    assert "rank00001-0.jsonl: names no group of rank 1, so that its messages have no other end" in found.warnings
    assert not any("rank00000-0.jsonl: names no group" in warning for warning in found.warnings)


def test_the_layout_that_was_stated_for_the_job_is_that_of_its_record(tmp_path: Path) -> None:
    path = prepare_run_directory(tmp_path / "run", ["train"], StatedLayout(pp=2, vpp=2))
    write_run(path, small())
    assert read_trace([path]).layout == StatedLayout(pp=2, vpp=2)


def test_a_stated_layout_of_another_number_of_ranks_is_spoken_of_and_not_used(tmp_path: Path) -> None:
    path = prepare_run_directory(tmp_path / "run", ["train"], StatedLayout(pp=3))
    write_run(path, small())
    trace = read_trace([path])
    assert not trace.layout
    assert any("not used" in warning and "has 3 ranks, and the job 2" in warning for warning in trace.warnings)


@pytest.mark.parametrize(
    "stated",
    ["pp", 7, {}, {"order": 7}, {"pp": -1, "order": "pp"}, {"pp": 10**30, "order": "pp"}, {"pp": True, "order": ""}],
)
def test_a_damaged_layout_states_nothing(tmp_path: Path, stated: object) -> None:
    write_run(tmp_path, small())
    (tmp_path / RUN_FILE).write_text(json.dumps({"layout": stated}))
    assert not read_trace([tmp_path]).layout
