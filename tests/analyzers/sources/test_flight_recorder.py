"""Dumps of Flight Recorder: versions, formats, damage."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.analyzers.hang import diagnose_hang
from ppdiag.analyzers.sources import read_recording, read_trace
from ppdiag.analyzers.sources.flight_recorder import Dumps, FlightRecorder
from ppdiag.errors import BadRecord, NoPipelineFound
from tests.analyzers.test_hang import call, dump, write

DATA = Path(__file__).parents[2] / "data" / "flight_recorder"
JOBS = ("gpu_error_1st", "lock_gil_1st")


@pytest.mark.parametrize("job", JOBS)
def test_real_dumps_are_read_as_pickle_reads_them(job):
    found = FlightRecorder().read([DATA / job], None)
    assert sorted(found.by_rank) == list(range(16))
    for rank in range(16):
        plain = pickle.loads((DATA / job / f"_dump_{rank}").read_bytes())
        entries = found.by_rank[rank].entries
        assert [entry.order for entry in entries] == [row["record_id"] for row in plain["entries"]]
        assert len(found.by_rank[rank].groups) == len(plain["pg_config"])


def test_ranks_of_messages_are_those_of_the_job():
    """Rank 8 is the third of pipeline group 43 (0, 4, 8, 12): its ``recv 2<-3`` comes from rank 12."""
    dumps = FlightRecorder().read([DATA / "gpu_error_1st"], None)
    first = dumps.by_rank[8].entries[0]
    assert (first.name, first.peer, first.sequence) == ("recv", 12, 13694)
    assert first.sizes == "4096x1x5120 BFloat16"


def test_the_status_of_a_group_is_found_by_the_order_of_creation():
    """Rank 9 has no entries that would say which group is which; its dump has number 11: 45264."""
    dumps = FlightRecorder().read([DATA / "lock_gil_1st"], None)
    assert dumps.by_rank[9].entries == ()
    assert dumps.by_rank[9].called["72"] == 45264


def test_json_of_torch_is_read_with_its_numbers_as_texts():
    dumps = FlightRecorder().read([DATA / "gloo_one_rank"], None)
    entries = dumps.by_rank[0].entries
    assert [(entry.name, entry.sequence, entry.finished) for entry in entries] == [("all_reduce", 1, True)] * 2
    assert dumps.by_rank[0].called == {"0": 1, "1": 1}


def test_pickle_and_json_of_one_dump_are_alike(tmp_path):
    value = dump([call("nccl:all_reduce", 7)], ranks=[0, 1])
    (tmp_path / "p_0").write_bytes(pickle.dumps(value, 2))
    (tmp_path / "j_0.json").write_text(json.dumps(value))
    found = [FlightRecorder().read([tmp_path / name], None).by_rank for name in ("p_0", "j_0.json")]
    assert found[0] == found[1]


def test_the_users_line_is_the_first_outside_of_torch(tmp_path):
    frames = [
        {"name": "wrapper", "filename": "/x/torch/distributed/c10d_logger.py", "line": 83},
        {"name": "step", "filename": "train.py", "line": 12},
        {"name": "main", "filename": "train.py", "line": 99},
    ]
    write(tmp_path, [dump([{**call("nccl:all_reduce", 7), "frames": frames}], ranks=[0])])
    assert FlightRecorder().read([tmp_path], None).by_rank[0].entries[0].called_at == "train.py:12 step"


def test_calls_of_a_batch_are_as_finished_as_what_closes_it(tmp_path):
    """torch watches the call that closes a batch of messages, and not the messages."""
    rows = []
    for number, state in ((1, "scheduled"), (2, "completed"), (3, "scheduled")):
        rows += [call("nccl:send 0->1", number), call("nccl:recv 0<-1", number)]
        rows.append({**call("nccl:coalesced", number, state), "is_p2p": True, "p2p_seq_id": number})
    for order, row in enumerate(rows):
        row["record_id"] = order
    write(tmp_path, [dump(rows, ranks=[0, 1])])
    entries = FlightRecorder().read([tmp_path], None).by_rank[0].entries
    assert [(entry.name, entry.sequence) for entry in entries if not entry.finished] == [("send", 3), ("recv", 3)]


def test_a_collective_of_several_tensors_is_a_call(tmp_path):
    write(tmp_path, [dump([call("nccl:allreduce_coalesced", 7)], ranks=[0, 1])])
    assert FlightRecorder().read([tmp_path], None).by_rank[0].entries[0].name == "allreduce_coalesced"


def test_older_dumps_without_status_and_members_are_read(tmp_path):
    value = dump([call("nccl:all_reduce", 7)], ranks=[0])
    del value["pg_status"], value["pg_config"]
    row = value["entries"][0]
    row["seq_id"] = row.pop("collective_seq_id")
    write(tmp_path, [{**value, "nccl_comm_state": {}}])
    assert FlightRecorder().read([tmp_path], None).by_rank[0].entries[0].sequence == 7


def test_a_dump_without_a_rank_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(dump([], ranks=[0])))
    with pytest.raises(BadRecord, match="its rank is not known"):
        read_recording([path])
    found = read_recording([path], ranks=[5])
    assert isinstance(found, Dumps)
    assert list(found.by_rank) == [5]


def test_a_damaged_dump_beside_good_ones_is_said(tmp_path):
    write(tmp_path, [dump([call("nccl:all_reduce", 7)], ranks=[0, 1])] * 2)
    whole = (tmp_path / "dump_1").read_bytes()
    (tmp_path / "dump_1").write_bytes(whole[: len(whole) // 2])
    found = read_recording([tmp_path])
    assert isinstance(found, Dumps)
    assert sorted(found.by_rank) == [0]
    assert any("dump_1" in warning and "cut off" in warning for warning in found.warnings)


def test_two_dumps_of_one_rank_are_refused(tmp_path):
    for name in ("a_0", "b_0"):
        (tmp_path / name).write_bytes(pickle.dumps(dump([call("nccl:all_reduce", 7)], ranks=[0]), 2))
    with pytest.raises(BadRecord, match="rank 0 is in an earlier dump"):
        read_recording([tmp_path])


def test_dumps_are_no_trace():
    with pytest.raises(NoPipelineFound, match="who waits for whom"):
        read_trace([DATA / "lock_gil_1st"])


VALUES = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3) | st.just({"a": [1]})


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("pg_config", "pg_status", "entries", "rank"), VALUES)))
def test_odd_values_are_left_out_or_refused(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("odd") / "dump_3"
    path.write_bytes(pickle.dumps({"nccl_comm_state": 1, **value}, 2))
    with contextlib.suppress(BadRecord):
        diagnose_hang(FlightRecorder().read([path], None)).to_dict()


@given(
    st.dictionaries(
        st.sampled_from(sorted(call("nccl:send 0->1", 1))) | st.just("frames"), VALUES | st.just([{"filename": 3}])
    )
)
def test_odd_entries_are_read_or_left_out(tmp_path_factory, odd):
    folder = tmp_path_factory.mktemp("odd")
    write(folder, [dump([{**call("nccl:send 0->1", 1), **odd}], ranks=[0, 1])])
    diagnose_hang(FlightRecorder().read([folder], None)).to_dict()


@given(st.data())
def test_any_byte_may_be_wrong(tmp_path_factory, data):
    whole = bytearray((DATA / "gpu_error_1st" / "_dump_15").read_bytes())
    for _ in range(3):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("odd") / "_dump_15"
    path.write_bytes(whole)
    with contextlib.suppress(BadRecord):
        diagnose_hang(FlightRecorder().read([path], None)).to_dict()
