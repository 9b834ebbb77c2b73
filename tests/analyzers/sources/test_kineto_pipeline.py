"""Pipelines on gloo, profiled: shape, schedule and messages come out right, with labels and without."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.messages import MISSING, match
from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.sources.kineto.labels import Label, labels_of
from ppdiag.model import Kind, Payload

GLOO = Path(__file__).parents[2] / "data" / "kineto" / "gloo"
SCHEDULES = {"GPipe": (4, 3, 1), "1F1B": (4, 3, 1), "ZBVZeroBubble": (4, 3, 2), "DualPipeV": (8, 2, 2)}
"""Microbatches, steps, stages of a rank."""


def files(schedule):
    return [GLOO / f"{schedule}-rank{rank}.json.gz" for rank in range(4)]


@cache
def trace_of(schedule):
    return read_trace(files(schedule))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_shape_and_the_schedule_are_those_of_the_job(schedule):
    microbatches, _, chunks = SCHEDULES[schedule]
    job = diagnose(trace_of(schedule)).job
    assert (job.world_size, job.pp, job.vpp, job.microbatches) == (4, 4, chunks, microbatches)
    assert (job.schedule_name, job.schedule_match) == (schedule, 1.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_microbatch_goes_forward_and_backward_through_every_stage(schedule):
    microbatches, steps, chunks = SCHEDULES[schedule]
    for spans in trace_of(schedule).by_rank().values():
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert (spans["kind"] == kind).sum() == microbatches * steps * chunks
        assert (spans["kind"] == Kind.OPTIMIZER).sum() == steps
        assert sorted(set(spans["step"].tolist())) == list(range(steps))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_message_has_its_other_end(schedule):
    trace = trace_of(schedule)
    spans = trace.spans
    messages = np.isin(spans["kind"], (Kind.SEND, Kind.RECV))
    partner = match(trace).partner[messages]
    assert messages.sum() > 0
    assert (partner != MISSING).all()
    assert (spans["step"][partner] == spans["step"][messages]).all()
    received = np.flatnonzero(spans["kind"] == Kind.RECV)
    sent = match(trace).partner[received]
    assert (spans["end_ns"][received] >= spans["post_ns"][sent]).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_message_is_waited_for_inside_an_op(schedule):
    for spans in trace_of(schedule).by_rank().values():
        compute = spans[np.isin(spans["kind"], (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT))]
        received = spans[spans["kind"] == Kind.RECV]
        for wait in received:
            inside = (compute["start_ns"] < wait["end_ns"]) & (wait["start_ns"] < compute["end_ns"])
            assert not inside.any()


def test_labels_name_stage_chunk_and_microbatch():
    spans = trace_of("ZBVZeroBubble").by_rank()[1]
    ops = spans[np.isin(spans["kind"], (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT))]
    assert set(zip(ops["stage"].tolist(), ops["chunk"].tolist(), strict=True)) == {(1, 0), (6, 1)}
    assert set(ops["microbatch"].tolist()) == {0, 1, 2, 3}


def test_a_rank_alone_is_read_and_says_who_is_missing():
    trace = read_trace(files("ZBVZeroBubble")[1:2])
    assert "3 of 4 ranks left no trace here (rank 0, 2, 3)" in trace.warnings


def test_a_missing_rank_leaves_its_messages_without_other_end():
    trace = read_trace([file for rank, file in enumerate(files("ZBVZeroBubble")) if rank != 2])
    spans = trace.spans
    messages = np.flatnonzero(np.isin(spans["kind"], (Kind.SEND, Kind.RECV)))
    alone = match(trace).partner[messages] == MISSING
    assert alone.any()
    assert not alone.all()
    assert "1 of 4 ranks left no trace here (rank 2)" in trace.warnings


def test_peers_that_were_not_recorded_are_said_to_be_assumed():
    assert any("messages do not say their peers" in warning for warning in trace_of("1F1B").warnings)
    assert not any("messages do not say their peers" in warning for warning in trace_of("ZBVZeroBubble").warnings)


def test_bytes_that_were_not_recorded_are_said_to_be_unknown():
    said = "messages do not say their bytes (record_shapes=True of torch.profiler would)"
    assert said in trace_of("ZBVZeroBubble").warnings
    symptoms = diagnose(trace_of("ZBVZeroBubble")).symptoms
    assert not any(" 0 bytes" in line for symptom in symptoms for line in symptom.evidence)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("PP:1F0", [Label(Kind.FORWARD, 1, 0)]),
        ("PP:12I3", [Label(Kind.BACKWARD, 12, 3)]),
        ("PP:0W7", [Label(Kind.WEIGHT, 0, 7)]),
        ("PP:1SEND_F0", [Label(Kind.SEND, 1, 0, Payload.ACTIVATION)]),
        ("PP:5RECV_B2", [Label(Kind.RECV, 5, 2, Payload.GRADIENT)]),
        ("PP:(4F4;3B0)OVERLAP_F_B", [Label(Kind.FORWARD, 4, 4), Label(Kind.BACKWARD, 3, 0)]),
        ("Forward 3", [Label(Kind.FORWARD, -1, 3)]),
        ("Backward 3", [Label(Kind.BACKWARD, -1, 3)]),
        ("F stage 2 mb 5", [Label(Kind.FORWARD, 2, 5)]),
        ("megatron.core.pipeline_parallel.schedules.forward_step", [Label(Kind.FORWARD)]),
        ("backward-compute", [Label(Kind.BACKWARD)]),
        ("Optimizer.step#Adam.step", [Label(Kind.OPTIMIZER)]),
        ("PP:5UNSHARD", []),
        ("PP:999999999F0", []),
        ("DistributedDataParallel.forward", []),
        ("## forward ##", []),
    ],
)
def test_names_of_annotations(name, expected):
    assert list(labels_of(name)) == expected


def test_annotations_of_gloo_are_enough(tmp_path):
    """Before torch 2.0 the calls of messages were no ops."""
    for file in files("1F1B"):
        text = gzip.decompress(file.read_bytes()).replace(b"c10d::", b"other::")
        (tmp_path / file.name).write_bytes(gzip.compress(text))
    trace = read_trace([tmp_path])
    job = diagnose(trace).job
    assert (job.pp, job.microbatches, job.schedule_name, job.schedule_match) == (4, 4, "1F1B", 1.0)
    assert (
        len(trace.of_kind(Kind.SEND, Kind.RECV)) == 2 * 2 * 3 * 4 * 3
    )  # ends, directions, borders, microbatches, steps
