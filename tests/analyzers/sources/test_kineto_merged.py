"""Several ranks in one file: the ways in which scripts merge traces give the spans of the files they merged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.sources.kineto.source import Kineto
from ppdiag.errors import BadRecord
from tests.analyzers.sources.kineto_factory import write_job

GLOO = Path(__file__).parents[2] / "data" / "kineto" / "gloo"
DEVICE = ("kernel", "gpu_user_annotation")
WAYS = {
    "label": lambda rank, pid: f"[TP00-PP{rank:02d}] {pid}",
    "rank-before": lambda rank, pid: f"rank{rank}_{pid}",
    "rank-alone": lambda rank, _: f"rank_{rank}",
    "number-of-the-rank": lambda rank, _: rank,
    "number-added": lambda rank, pid: pid + rank * 100_000,
    "as-they-were": lambda _, pid: pid,
}
SAY_THE_RANK = ("rank-before", "rank-alone", "number-of-the-rank")


def job(tmp_path, labels="device", *, own_devices=True):
    """The traces of both ranks, each process with an id and a device of its own, as on one machine."""
    folder = tmp_path / "files"
    folder.mkdir()
    traces = []
    for rank, path in enumerate(write_job(folder, labels=labels)):
        trace = json.loads(path.read_text())
        for event in trace["traceEvents"]:
            device = rank if own_devices else 0
            event["pid"] = device if event["cat"] in DEVICE else 4711 + rank
        # Kineto writes what the host did before what the device did.
        trace["traceEvents"].sort(key=lambda event: event["cat"] in DEVICE)
        traces.append(trace)
    return folder, traces


def merge(tmp_path, traces, way=WAYS["as-they-were"], **header):
    events = [
        {**event, "pid": way(rank, event["pid"])} for rank, trace in enumerate(traces) for event in trace["traceEvents"]
    ]
    path = tmp_path / "merged.json"
    path.write_text(json.dumps({"schemaVersion": 1, **header, "traceEvents": events}))
    return path


def same(found, expected):
    for name in expected.spans.dtype.names:
        assert np.array_equal(found.spans[name], expected.spans[name]), name


@pytest.mark.parametrize("labels", ["device", "host", "none"])
@pytest.mark.parametrize("way", WAYS)
def test_a_merged_file_is_read_as_its_files_are(tmp_path, way, labels):
    folder, traces = job(tmp_path, labels)
    trace = read_trace([merge(tmp_path, traces, WAYS[way], distributedInfo=traces[0]["distributedInfo"])])
    same(trace, read_trace([folder]))
    assumed = [warning for warning in trace.warnings if "says no rank, taken for rank" in warning]
    assert len(assumed) == (0 if way in SAY_THE_RANK else 2)


def test_kernels_go_to_the_process_that_launched_them_where_the_order_says_otherwise(tmp_path):
    folder, traces = job(tmp_path, "none")
    for event in traces[1]["traceEvents"]:
        if "correlation" in event["args"]:
            event["args"]["correlation"] += 1000
    path = merge(tmp_path, traces)
    merged = json.loads(path.read_text())
    merged["traceEvents"].sort(key=lambda event: (event["cat"] in DEVICE, event["pid"]))
    path.write_text(json.dumps(merged))
    same(read_trace([path]), read_trace([folder]))


def test_ranks_are_those_of_a_list_in_the_header_or_of_the_user(tmp_path):
    _, traces = job(tmp_path)
    header = [{"rank": 5, "world_size": 8}, {"rank": 7, "world_size": 8}]
    assert sorted(read_trace([merge(tmp_path, traces, distributedInfo=header)]).ranks) == [5, 7]
    assert sorted(Kineto(ranks=(3, 4)).read([merge(tmp_path, traces)], None).ranks) == [3, 4]


def test_kernels_of_one_device_number_are_not_divided_by_guessing(tmp_path):
    _, traces = job(tmp_path, own_devices=False)
    with pytest.raises(BadRecord, match=r"2 processes merged into one file.*of 1 device\); name the files"):
        read_trace([merge(tmp_path, traces)])


def test_a_device_that_stands_before_every_process_is_nobodys(tmp_path):
    _, traces = job(tmp_path)
    for trace in traces:
        for event in trace["traceEvents"]:
            event["args"].pop("correlation", None)
    kernels = [{**event, "pid": 7} for event in traces[0]["traceEvents"] if event["cat"] == "kernel"]
    traces[0]["traceEvents"][:0] = kernels
    with pytest.raises(BadRecord, match="2 processes merged into one file"):
        read_trace([merge(tmp_path, traces)])


def test_a_damaged_id_makes_no_second_rank(tmp_path):
    folder, _ = job(tmp_path)
    expected = read_trace([folder])
    path = folder / "rank0.json"
    trace = json.loads(path.read_text())
    trace["traceEvents"] *= 20
    trace["traceEvents"].append({**trace["traceEvents"][0], "pid": 99})
    path.write_text(json.dumps(trace))
    assert sorted(read_trace([folder]).ranks) == sorted(expected.ranks)


def test_ranks_of_gloo_merged_are_those_of_the_files(tmp_path):
    files = [GLOO / f"ZBVZeroBubble-rank{rank}.json.gz" for rank in range(4)]
    traces = [json.loads(gzip.decompress(file.read_bytes())) for file in files]
    header = {name: value for name, value in traces[0].items() if name != "traceEvents"}
    trace = read_trace([merge(tmp_path, traces, **header)])
    same(trace, read_trace(files))
