"""Traces of veScale's ndtimeline, written as its handler writes them."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.sources.ndtimeline import NdTimeline
from ppdiag.errors import BadRecord
from ppdiag.model import Kind
from tests.analyzers.factory import MS, Pipeline

OPS = {Kind.FORWARD: "forward-compute", Kind.BACKWARD: "backward-compute", Kind.OPTIMIZER: "optimizer"}
MESSAGES = {
    (Kind.SEND, 1): "forward-send",
    (Kind.SEND, -1): "backward-send",
    (Kind.RECV, -1): "forward-recv",
    (Kind.RECV, 1): "backward-recv",
}


def slow_second(op, rank, step):  # noqa: ARG001
    return (30 if op.stage == 1 else 10) * MS


def job(**settings):
    orders = schedules.order("1F1B", ranks=4, chunks=1, microbatches=8)
    return Pipeline(orders, [0, 1, 2, 3], steps=4, rendezvous=True, **settings).trace()


def events_of(trace, ranks):
    """Complete events as LocalTimelineNDHandler makes them: pid is the replica, tid the rank and the kind of stream."""
    events = []
    for span in trace.spans[[span["rank"] in ranks for span in trace.spans]]:
        rank = int(span["rank"])
        if span["kind"] in OPS:
            name, start = OPS[Kind(span["kind"])], int(span["start_ns"])
        else:
            name, start = MESSAGES[Kind(span["kind"]), int(span["peer"]) - rank], int(span["post_ns"])
        args = {"rank": rank, "step": int(span["step"]), "tp": 0, "pp": rank % 4}
        times = {"ts": start / 1e3, "dur": max(int(span["end_ns"]) - start, 0) / 1e3}
        events.append({"name": name, "cat": name, "pid": rank // 4, "tid": rank * 10, "args": args, **times, "ph": "X"})
    events.append({"name": "process_name", "pid": 0, "ph": "M", "args": {"name": "dp rank[0]"}})
    return events


def write(folder, trace, hosts=((0, 1), (2, 3))):
    """A file a host, without a suffix."""
    for host, ranks in enumerate(hosts):
        (folder / f"trace_step0_3_{host}").write_text(json.dumps(events_of(trace, ranks)))
    return folder


@pytest.mark.parametrize("settings", [{}, {"duration": slow_second}], ids=["even", "slow-stage"])
def test_a_job_is_explained_as_its_own_trace_is(tmp_path, settings):
    trace = job(**settings)
    found, expected = diagnose(read_trace([write(tmp_path, trace)])), diagnose(trace)
    assert (found.job.pp, found.job.microbatches, found.job.schedule_name) == (4, 8, "1F1B")
    assert (found.verdict.cause, found.verdict.stage) == (expected.verdict.cause, expected.verdict.stage)
    for part in ("why", "where"):
        for f in fields(getattr(expected, part)):
            assert getattr(getattr(found, part), f.name) == pytest.approx(
                getattr(getattr(expected, part), f.name), abs=0.05
            )


def test_every_op_is_read_with_its_step(tmp_path):
    trace = job()
    found = read_trace([write(tmp_path, trace)])
    assert len(found.of_kind(Kind.FORWARD).spans) == 4 * 8 * 4
    assert sorted(set(found.spans["step"].tolist())) == [0, 1, 2, 3]
    assert (found.job.framework, found.job.tp, found.job.dp) == ("vescale", 1, 1)


def test_a_batch_is_a_send_and_a_receive(tmp_path):
    events = events_of(job(), (0, 1, 2, 3))
    args = {"rank": 1, "step": 0, "tp": 0, "pp": 1}
    name = "forward-send-backward-recv"
    batch = {"name": name, "cat": name, "pid": 0, "tid": 13, "args": args, "ts": 1.0, "dur": 2.0, "ph": "X"}
    (tmp_path / "trace_step0_3").write_text(json.dumps([*events, batch]))
    spans = read_trace([tmp_path]).spans
    added = spans[(spans["rank"] == 1) & (spans["post_ns"] == 1000)]
    assert sorted(added["kind"].tolist()) == [Kind.SEND, Kind.RECV]
    assert added["peer"].tolist() == [2, 2]


def test_several_stages_a_rank_are_refused(tmp_path):
    events = events_of(job(), (0, 1, 2, 3))
    args = {"rank": 0, "step": 0, "tp": 0, "pp": 0}
    name = "forward-recv"
    events.append({"name": name, "cat": name, "pid": 0, "tid": 1, "args": args, "ts": 1.0, "dur": 2.0, "ph": "X"})
    (tmp_path / "trace_step0_3").write_text(json.dumps(events))
    with pytest.raises(BadRecord, match="expected one stage a rank"):
        read_trace([tmp_path])


def test_a_file_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path):
    folder = write(tmp_path, job(), hosts=((0, 1, 2, 3),))
    path = folder / "trace_step0_3_0"
    path.write_bytes(path.read_bytes()[:-5000])
    found = read_trace([folder])
    assert len(found.of_kind(Kind.FORWARD).spans) > 100
    assert any("cut off" in warning for warning in found.warnings)
    path.write_bytes(path.read_bytes()[:120])
    with pytest.raises(BadRecord, match="expected"):
        NdTimeline().read([path], None)


EVENTS = events_of(job(), (0, 1, 2, 3))
VALUES = st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)


@given(st.dictionaries(st.sampled_from(["name", "pid", "args", "ts", "dur", "ph"]), VALUES, min_size=1))
def test_odd_events_are_left_out_and_counted(tmp_path_factory, odd):
    folder = tmp_path_factory.mktemp("odd")
    args = {"rank": 0, "step": 0, "tp": 0, "pp": 0}
    good = {"name": "x", "cat": "x", "pid": 0, "tid": 1, "args": args, "ts": 1.0, "dur": 2.0, "ph": "X"}
    (folder / "trace_step0_3").write_text(json.dumps([*EVENTS, {**good, **odd}]))
    assert len(NdTimeline().read([folder], None).of_kind(Kind.FORWARD).spans) == 4 * 8 * 4


def test_what_was_waited_for_on_machines_that_left_no_file_is_unknown(tmp_path):
    """Of a rank alone no wait may be blamed on anybody, least of all on its host."""
    write(tmp_path, job(), hosts=((0,), (1, 2, 3)))
    found = read_trace([tmp_path / "trace_step0_3_0"])
    assert any("that left no trace here (pp 1 of replica 0, tp 0)" in warning for warning in found.warnings)
    diagnosis = diagnose(found)
    assert diagnosis.verdict.confidence == "undecided"
    assert diagnosis.why.unexplained > 0.9 * diagnosis.why.total
