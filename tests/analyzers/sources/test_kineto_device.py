"""Pipelines on GPUs: hand-made traces of NCCL come out as they were made, with labels and without."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.messages import match
from ppdiag.analyzers.sources import read_trace
from ppdiag.model import Kind
from tests.analyzers.sources.kineto_factory import PROGRAMS, write_job

US = 1000
LABELS = ("device", "host", "none")


def ops_of(trace, rank):
    """(kind, start, end) of the forwards and backwards of the first step, in us."""
    spans = trace.by_rank()[rank]
    chosen = spans[np.isin(spans["kind"], (Kind.FORWARD, Kind.BACKWARD)) & (spans["step"] == 3)]
    return [(Kind(s["kind"]).name[0], int(s["start_ns"]) // US, int(s["end_ns"]) // US) for s in chosen]


@pytest.mark.parametrize("labels", LABELS)
def test_ops_are_where_the_device_did_them(tmp_path, labels):
    trace = read_trace(write_job(tmp_path, labels=labels))
    for rank, program in PROGRAMS.items():
        assert ops_of(trace, rank) == [(item[0], *item[2:]) for item in program if item[0] in ("F", "B")]


@pytest.mark.parametrize("labels", LABELS)
def test_shape_schedule_and_steps_are_those_of_the_job(tmp_path, labels):
    found = diagnose(read_trace(write_job(tmp_path, labels=labels)))
    assert (found.job.pp, found.job.vpp, found.job.microbatches) == (2, 1, 2)
    assert (found.job.schedule_name, found.job.schedule_match) == ("GPipe", 1.0)
    assert found.steps.median_s == pytest.approx(0.010)


@pytest.mark.parametrize("labels", LABELS)
def test_a_receive_is_split_by_the_begin_of_the_senders_kernel(tmp_path, labels):
    """Rank 0 waits for its first gradient from 2100 to 5200 us, of which rank 1 computes until 5100."""
    trace = read_trace(write_job(tmp_path, labels=labels))
    spans, partner = trace.spans, match(trace).partner
    chosen = (spans["kind"] == Kind.RECV) & (spans["rank"] == 0) & (spans["step"] == 3)
    first = int(np.flatnonzero(chosen)[0])
    times = [int(time) // US for time in (spans["start_ns"][first], spans["end_ns"][first])]
    assert times == [2100, 5200]
    assert int(spans["post_ns"][partner[first]]) // US == 5100
    found = diagnose(trace)
    (rank0,) = [rank for rank in found.ranks if rank.rank == 0]
    assert rank0.where.late_sender == pytest.approx(3000 / 10_000, abs=1e-6)
    assert rank0.where.transfer == pytest.approx(100 / 10_000, abs=1e-6)


def test_a_receive_that_ends_while_its_rank_computes_is_no_wait(tmp_path):
    trace = read_trace(write_job(tmp_path))
    spans = trace.by_rank()[1]
    second = spans[(spans["kind"] == Kind.RECV) & (spans["step"] == 3)][1]
    assert second["start_ns"] == second["end_ns"] == 2100 * US


def test_bytes_are_those_of_the_elements_and_their_type(tmp_path):
    spans = read_trace(write_job(tmp_path)).spans
    assert set(spans["size_bytes"][spans["kind"] == Kind.SEND].tolist()) == {512}


@pytest.mark.parametrize("peers", ["global", "local", "annotation"])
def test_peers_are_ranks_of_the_job(tmp_path, peers):
    trace = read_trace(write_job(tmp_path, members=(4, 7), peers=peers))
    spans = trace.spans[np.isin(trace.spans["kind"], (Kind.SEND, Kind.RECV))]
    assert set(zip(spans["rank"].tolist(), spans["peer"].tolist(), strict=True)) == {(4, 7), (7, 4)}
    assert (match(trace).partner[np.isin(trace.spans["kind"], (Kind.SEND, Kind.RECV))] >= 0).all()


@pytest.mark.parametrize("labels", LABELS)
def test_annotations_of_messages_are_enough(tmp_path, labels):
    trace = read_trace(write_job(tmp_path, peers="annotation alone", labels=labels))
    spans = trace.spans[np.isin(trace.spans["kind"], (Kind.SEND, Kind.RECV))]
    assert set(zip(spans["rank"].tolist(), spans["peer"].tolist(), strict=True)) == {(0, 1), (1, 0)}
    assert len(spans) == 2 * 4 * 3
    assert diagnose(trace).job.schedule_name == "GPipe"


def test_rccls_kernels_of_one_name_are_told_apart_by_their_arguments(tmp_path):
    trace = read_trace(write_job(tmp_path, kernel="ncclDevKernel_Generic(ncclDevComm*)"))
    assert (trace.spans["kind"] == Kind.SEND).sum() == 2 * 2 * 3
    assert not (trace.spans["kind"] == Kind.COLLECTIVE).any()


def test_kernels_of_any_name_are_messages_where_their_call_says_so(tmp_path):
    paths = write_job(tmp_path, kernel="ncclDevKernel_Generic(ncclDevComm*)")
    for path in paths:
        trace = json.loads(path.read_text())
        for event in trace["traceEvents"]:
            if event["cat"] == "kernel":
                event["args"].pop("Collective name", None)
        path.write_text(json.dumps(trace))
    spans = read_trace(paths).spans
    assert (spans["kind"] == Kind.RECV).sum() == 2 * 2 * 3
    assert not (spans["kind"] == Kind.COLLECTIVE).any()


def test_ops_under_one_label_have_half_of_it_each(tmp_path):
    paths = write_job(tmp_path)
    text = paths[1].read_text().replace("PP:1F1", "PP:(1F1;1B7)OVERLAP_F_B")
    paths[1].write_text(text)
    trace = read_trace(paths)
    assert any("each is given half of its time" in warning for warning in trace.warnings)
    spans = trace.by_rank()[1]
    halves = spans[(spans["step"] == 3) & (spans["start_ns"] >= 2100 * US) & (spans["end_ns"] <= 3100 * US)]
    assert [
        (Kind(s["kind"]).name, int(s["end_ns"] - s["start_ns"]) // US) for s in halves if s["kind"] <= Kind.WEIGHT
    ] == [
        ("FORWARD", 500),
        ("BACKWARD", 500),
    ]


def test_a_collective_belongs_to_the_step_in_which_the_host_called_it(tmp_path):
    """The device does it when the host is in the next step already."""
    paths = write_job(tmp_path)
    for path in paths:
        trace = json.loads(path.read_text())
        call = next(event for event in trace["traceEvents"] if event["name"] == "record_param_comms")
        told = {**call["args"], "Collective name": "allreduce", "External id": 999}
        trace["traceEvents"] += [
            {**call, "ts": 9000.0, "dur": 10.0, "args": told},
            {
                **call,
                "cat": "kernel",
                "name": "ncclDevKernel_AllReduce",
                "tid": 20,
                "ts": 10_050.0,
                "dur": 50.0,
                "args": told,
            },
        ]
        path.write_text(json.dumps(trace))
    spans = read_trace(paths).spans
    assert spans["step"][spans["kind"] == Kind.COLLECTIVE].tolist() == [3, 3]


def test_steps_of_a_device_without_labels_of_the_host_are_the_devices_own(tmp_path):
    """The device is 5 ms behind the host, whose marks would put the end of a step into the next."""
    paths = write_job(tmp_path)
    for path in paths:
        trace = json.loads(path.read_text())
        events = [event for event in trace["traceEvents"] if not event["name"].startswith("PP:") or event["tid"] == 7]
        for event in events:
            if event["cat"] in ("kernel", "gpu_user_annotation"):
                event["ts"] += 5000.0
        for step in range(3):
            name, begin = f"ProfilerStep#{step + 3}", 10_000.0 * step + 5000
            twin = {
                "ph": "X",
                "cat": "gpu_user_annotation",
                "name": name,
                "pid": 0,
                "tid": 7,
                "ts": begin,
                "dur": 9700.0,
            }
            events.append(twin)
        path.write_text(json.dumps({**trace, "traceEvents": events}))
    spans = read_trace(paths).spans
    ops = spans[np.isin(spans["kind"], (Kind.FORWARD, Kind.BACKWARD))]
    assert np.bincount(ops["step"]).tolist() == [0, 0, 0, 8, 8, 8]


def test_all_to_all_on_the_same_kernels_is_a_collective(tmp_path):
    paths = write_job(tmp_path)
    for path in paths:
        trace = json.loads(path.read_text())
        kernel = next(event for event in trace["traceEvents"] if event["cat"] == "kernel" and "nccl" in event["name"])
        other = {**kernel, "ts": 9300.0, "dur": 100.0, "args": {**kernel["args"], "Collective name": "all_to_allv"}}
        del other["args"]["External id"]
        trace["traceEvents"].append(other)
        path.write_text(json.dumps(trace))
    spans = read_trace(paths).spans
    assert (spans["kind"] == Kind.COLLECTIVE).sum() == 2
    assert (spans["kind"] == Kind.RECV).sum() == 2 * 2 * 3


def test_a_batch_has_one_kernel_for_all_its_messages(tmp_path):
    """Of two messages that were posted together only the last names the kernel."""
    paths = write_job(tmp_path)
    trace = json.loads(paths[0].read_text())
    calls = [event for event in trace["traceEvents"] if event["name"] == "record_param_comms"]
    number = calls[1]["args"]["External id"]  # the second send; the receive after it shares its kernel
    follower = calls[2]["args"]["External id"]
    trace["traceEvents"] = [
        event
        for event in trace["traceEvents"]
        if not (event["cat"] == "kernel" and event["args"].get("External id") == number)
    ]
    kernel = next(
        event
        for event in trace["traceEvents"]
        if event["cat"] == "kernel" and event["args"].get("External id") == follower
    )
    paths[0].write_text(json.dumps(trace))
    spans = read_trace(paths).by_rank()[0]
    sent = spans[(spans["kind"] == Kind.SEND) & (spans["step"] == 3)]
    assert sent["post_ns"].tolist() == [1000 * US, kernel["ts"] * US]
