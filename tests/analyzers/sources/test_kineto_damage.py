"""Damaged and hostile traces of torch.profiler: read as far as they go, and what was left out is said."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.sources.kineto import blocks
from ppdiag.analyzers.sources.kineto.events import Category, read_events
from ppdiag.analyzers.sources.kineto.rank import read_rank
from ppdiag.errors import BadRecord, PpdiagError

DATA = Path(__file__).parents[2] / "data" / "kineto"
REAL = DATA / "hta_with_gpu_user_annotation_step_based_trace_2543932.json.gz"


def event(**fields):
    return {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 100, "dur": 50, "args": {}, **fields}


def written(folder, trace, name="rank0.json"):
    path = folder / name
    path.write_text(trace if isinstance(trace, str) else json.dumps(trace))
    return path


def kernels(path):
    events = read_events(path)
    return [(int(events.start_ns[i]), int(events.end_ns[i])) for i in events.of(Category.KERNEL)]


def in_kinetos_layout(events):
    """As Kineto writes it: an event over several lines, the same bytes between all of them."""
    rows = []
    for row in events:
        args = json.dumps(row.get("args", {}))
        head = f'"ph": "{row["ph"]}", "cat": "{row["cat"]}", "name": {json.dumps(row["name"])}'
        rows.append(f'{head}, "pid": 0, "tid": 7,\n    "ts": {row["ts"]}, "dur": {row["dur"]},\n    "args": {args}')
    return '{\n  "schemaVersion": 1,\n  "traceEvents": [\n  {\n    ' + "\n  },\n  {\n    ".join(rows) + "\n  }\n  ]\n}"


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
def test_a_file_that_is_cut_off_is_read_to_its_last_whole_event(tmp_path, share):
    whole = gzip.decompress(REAL.read_bytes())
    path = tmp_path / "rank0.json"
    path.write_bytes(whole[: int(len(whole) * share)])
    events = read_events(path)
    # an event is whole where its closing brace, indented by two, is there
    expected = sum(
        part.startswith(b'\n    "ph": "X", "cat": "kernel"') and (b"\n  }" in part)
        for part in path.read_bytes().split(b"\n  {")
    )
    assert len(events.of(Category.KERNEL)) == expected
    assert any("cut off" in text for text in events.damage)


def test_a_compressed_file_that_is_cut_off_is_read_too(tmp_path):
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(REAL.read_bytes()[: REAL.stat().st_size * 9 // 10])
    events = read_events(path)
    assert 0 < len(events.of(Category.KERNEL)) < 130
    assert any("compressed data end early" in text for text in events.damage)


def test_a_compressed_file_without_its_ending_in_the_name_is_read(tmp_path):
    path = tmp_path / "rank0.json"
    path.write_bytes(REAL.read_bytes())
    assert len(kernels(path)) == 130


def test_two_compressed_parts_make_one_file(tmp_path):
    whole = gzip.decompress(REAL.read_bytes())
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(whole[:100_000]) + gzip.compress(whole[100_000:]))
    assert len(kernels(path)) == 130


def test_the_array_form_is_read(tmp_path):
    assert kernels(written(tmp_path, [event(), event(ts=300)])) == [(100_000, 150_000), (300_000, 350_000)]


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"ts": None}, "no time or name"),
        ({"ts": "soon"}, "no time or name"),
        ({"name": 5}, "no time or name"),
        ({"dur": None}, "no time or no duration"),
        ({"dur": -3}, "no time or no duration"),
        ({"dur": float("nan")}, "no time or no duration"),
        ({"ts": float("inf")}, "no time or no duration"),
        ({"ts": 10**30}, "no time or no duration"),
        ({"dur": 10**30}, "no time or no duration"),
    ],
)
@pytest.mark.parametrize("layout", [json.dumps, in_kinetos_layout])
def test_an_event_without_times_costs_that_event_alone(tmp_path, odd, why, layout):
    rows = [event(), event(**odd), event(ts=300)]
    text = layout(rows) if layout is in_kinetos_layout else layout({"traceEvents": rows})
    path = written(tmp_path, text.replace("None", "null"))
    events = read_events(path)
    assert len(events.of(Category.KERNEL)) == 2
    assert sum(events.left_out.values()) == 1
    if layout is json.dumps:
        assert why in events.left_out or "no JSON" in events.left_out


def test_an_event_without_a_duration_is_said_to_be_left_out(tmp_path):
    odd = event()
    del odd["dur"]
    record = read_rank(written(tmp_path, {"traceEvents": [event(), odd]}))
    assert record.warnings == ["1 events were left out: no time or no duration"]


@pytest.mark.parametrize("number", ["NaN", "-nan", "inf", "-Infinity"])
@pytest.mark.parametrize("layout", [json.dumps, in_kinetos_layout])
def test_what_is_no_number_among_the_arguments_costs_nothing(tmp_path, number, layout):
    rows = [event(args={"occupancy": "@"}), event(ts=300)]
    text = layout(rows) if layout is in_kinetos_layout else layout({"traceEvents": rows})
    events = read_events(written(tmp_path, text.replace('"@"', number)))
    assert len(events.of(Category.KERNEL)) == 2
    assert not events.left_out


def test_huge_integers_and_doubled_keys_among_the_arguments_cost_nothing(tmp_path):
    text = json.dumps({"traceEvents": [event(args={"Comms Id": 10**40, "a": 1}), event(ts=300)]})
    text = text.replace('"a": 1', '"a": 1, "a": 2, "a": {"a": 3}')
    assert len(kernels(written(tmp_path, text))) == 2


def test_each_digit_of_a_time_since_the_epoch_counts(tmp_path):
    """A double would round it to a quarter of a us."""
    text = json.dumps({"traceEvents": [event(ts="@")]}).replace('"@"', "1712195495519689.047")
    (found,) = kernels(written(tmp_path, text))
    assert found[0] == 1712195495519689047


def test_overlapping_kernels_of_a_stream_count_once(tmp_path):
    rows = [event(ts=100, dur=50), event(ts=140, dur=50), event(ts=149, dur=1)]
    assert read_rank(written(tmp_path, {"traceEvents": rows})).sums.compute_ns == 90_000


def test_objects_among_the_arguments_do_not_end_an_event(tmp_path):
    rows = [event(ts=ts, args={"list": [{"a": 1}, {"b": "}, {"}]}) for ts in range(100, 400, 100)]
    assert len(kernels(written(tmp_path, {"traceEvents": rows}))) == 3


def test_blocks_of_any_size_give_the_same_events(tmp_path, monkeypatch):
    whole = gzip.decompress(REAL.read_bytes())
    path = tmp_path / "rank0.json"
    one_line = tmp_path / "rank1.json"
    path.write_bytes(whole)
    one_line.write_text(json.dumps(json.loads(whole)))
    expected = kernels(path)
    for size in (700, 4096, 65_536):
        monkeypatch.setattr(blocks, "BLOCK_BYTES", size)
        assert kernels(path) == expected
        assert kernels(one_line) == expected


def test_a_garbled_stretch_costs_the_events_in_it(tmp_path):
    whole = gzip.decompress(REAL.read_bytes())
    middle = len(whole) // 2
    path = tmp_path / "rank0.json"
    path.write_bytes(whole[:middle] + b'\x00\xff{"[' * 20 + whole[middle:])
    events = read_events(path)
    assert 125 <= len(events.of(Category.KERNEL)) <= 130
    assert sum(events.left_out.values()) <= 5


@pytest.mark.parametrize(
    "text", ["", "{", "[", "{}", "null", '{"traceEvents": 5}', '{"traceEvents": {"a": 1}}', "\x00" * 99]
)
def test_what_is_no_trace_is_one_line(tmp_path, text):
    with pytest.raises(PpdiagError) as found:
        read_trace([written(tmp_path, text)])
    assert "\n" not in str(found.value)


def test_a_file_without_a_list_of_events_is_said_to_be_none(tmp_path):
    with pytest.raises(BadRecord, match="holds no list `traceEvents`"):
        read_rank(written(tmp_path, '{"schemaVersion": 1, "a": 2}'))


def test_a_file_made_to_burst_is_left(tmp_path):
    path = tmp_path / "rank0.json.gz"
    row = json.dumps(event()).encode() + b", "
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + row * 500_000))
    begin = time.process_time()
    events = read_events(path)
    assert time.process_time() - begin < 10
    assert any("unpacks to more than 100 times its size" in text for text in events.damage)


@pytest.mark.parametrize("text", ['{"a": ' * 100_000, "[" * 200_000, '{"a": "}, {' * 100_000, "}, {" * 200_000])
def test_nesting_and_broken_strings_end_soon(tmp_path, text):
    begin = time.process_time()
    with pytest.raises(PpdiagError):
        read_trace([written(tmp_path, '{"traceEvents": [' + text)])
    assert time.process_time() - begin < 10


def test_ranks_and_microbatches_without_bounds_are_not_believed(tmp_path):
    told = {"rank": 10**18, "world_size": -5, "pg_config": [{"ranks": [10**30, None]}, 5]}
    labels = [event(cat="user_annotation", name=f"PP:{10**6}F{10**6}"), event(cat="user_annotation", name="PP:1F0")]
    calls = [event(cat="cpu_op", name="c10d::send", args={"Concrete Inputs": ["", "", "-7", "99999999999"]})]
    path = written(tmp_path, {"distributedInfo": told, "traceEvents": [*labels, *calls]})
    record = read_rank(path)
    assert record.rank == 0  # of its name
    assert record.facts == {"pg_config": [{"ranks": [10**30, None]}]}
    assert record.spans["peer"].tolist() == [-1, -1]
