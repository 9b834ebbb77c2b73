"""Kernels, ranges and messages of a rank, calculated by hand. Times in ns."""

from __future__ import annotations

import numpy as np

from ppdiag.analyzers.sources.device_ops import Kernels, Message, Op, Range, RankOps, project, spans_of
from ppdiag.analyzers.sources.kineto.labels import Label
from ppdiag.model import NONE, Flag, Kind, Payload

F0 = Label(Kind.FORWARD, 0, 0)
B0 = Label(Kind.BACKWARD, 0, 0)


def kernels(*rows):
    """Rows of start, end, launch, and whether it communicates."""
    start, end, launch, communicates = np.array(rows).T
    return Kernels(start, end, launch, communicates.astype(bool))


def message(kind, start, end, **changes):
    fields = {"op": 0, "group": 0, "peer": 1, "seq": 0, "size_bytes": 8, "launch_ns": start - 1}
    return Message(kind=kind, start_ns=start, end_ns=end, **{**fields, **changes})


def rows_of(spans, kind):
    return spans[spans["kind"] == kind]


def test_an_op_lasts_from_the_first_to_the_last_kernel_launched_in_its_range():
    device = kernels((100, 110, 10, 0), (115, 120, 11, 0), (130, 140, 12, 1), (150, 160, 30, 0))
    ops, empty = project([Range(F0, 5, 20), Range(B0, 25, 40), Range(F0, 50, 60)], device)
    assert ops == [Op(Kind.FORWARD, 0, 0, 100, 120, 10), Op(Kind.BACKWARD, 0, 0, 150, 160, 30)]
    assert empty == 1


def test_of_nested_ranges_of_one_kind_the_inner_counts():
    device = kernels((100, 110, 10, 0), (200, 210, 20, 0))
    ops, _ = project([Range(F0, 0, 50), Range(Label(Kind.FORWARD, 3, 4), 15, 25)], device)
    assert [(op.stage, op.start_ns) for op in ops] == [(3, 200)]


def test_busy_time_is_the_union_and_nccl_counts_where_it_is_alone():
    device = kernels((0, 100, 0, 0), (50, 150, 0, 0), (100, 250, 0, 1), (300, 400, 0, 1))
    busy, alone, total = device.busy_s()
    assert [round(value * 1e9) for value in (busy, alone, total)] == [150, 200, 400]


def test_a_message_is_waited_for_where_compute_stands_still_until_its_end():
    ops = [Op(Kind.FORWARD, 0, 0, 0, 100, 0), Op(Kind.BACKWARD, 0, 0, 180, 300, 90)]
    device = kernels((0, 100, 0, 0), (180, 300, 90, 0))
    spans = spans_of([RankOps(0, device, ops, [message(Kind.RECV, 60, 170)])])
    (row,) = rows_of(spans, Kind.RECV)
    assert (row["post_ns"], row["start_ns"], row["end_ns"], row["op"]) == (60, 100, 170, Payload.GRADIENT)


def test_a_receive_that_ended_under_compute_is_waited_for_in_no_time_by_the_next_op():
    ops = [Op(Kind.FORWARD, 0, 0, 0, 100, 0), Op(Kind.BACKWARD, 0, 0, 180, 300, 90)]
    device = kernels((0, 100, 0, 0), (180, 300, 90, 0))
    spans = spans_of([RankOps(0, device, ops, [message(Kind.RECV, 60, 95)])])
    (row,) = rows_of(spans, Kind.RECV)
    assert (row["start_ns"], row["end_ns"], row["launch_ns"]) == (180, 180, 90)
    assert not row["flags"] & Flag.NEVER_WAITED


def test_a_send_that_ended_under_compute_was_never_waited_for():
    ops = [Op(Kind.FORWARD, 0, 0, 0, 100, 0), Op(Kind.FORWARD, 0, 1, 100, 200, 0)]
    device = kernels((0, 100, 0, 0), (100, 200, 0, 0))
    spans = spans_of([RankOps(0, device, ops, [message(Kind.SEND, 100, 150)])])
    (row,) = rows_of(spans, Kind.SEND)
    assert row["flags"] & Flag.NEVER_WAITED


def test_a_collective_may_be_waited_for_inside_an_op():
    ops = [Op(Kind.FORWARD, 0, 0, 0, 300, 0)]
    device = kernels((0, 100, 0, 0), (100, 180, 0, 1), (180, 300, 0, 0))
    spans = spans_of([RankOps(0, device, ops, [message(Kind.COLLECTIVE, 90, 180, peer=NONE)])])
    (row,) = rows_of(spans, Kind.COLLECTIVE)
    assert (row["start_ns"], row["end_ns"]) == (100, 180)


def test_steps_are_counted_by_the_optimizer_unless_they_are_recorded():
    ops = [
        Op(Kind.FORWARD, 0, 0, 0, 1, 0),
        Op(Kind.OPTIMIZER, NONE, NONE, 2, 3, 2),
        Op(Kind.OPTIMIZER, NONE, NONE, 3, 4, 3),
        Op(Kind.FORWARD, 0, 0, 5, 6, 5),
    ]
    device = kernels((0, 1, 0, 0))
    assert spans_of([RankOps(0, device, ops)])["step"].tolist() == [0, 0, 0, 1]
    recorded = [op._replace(step=7) for op in ops]
    assert set(spans_of([RankOps(0, device, recorded)])["step"].tolist()) == {7}


def test_messages_that_no_recording_has_are_inferred_from_the_gaps_before_ops():
    """Rank 0 sends F0's output when it has ended at 100; rank 1 has idled from its last op's end to 150."""
    first = RankOps(0, kernels((0, 100, 0, 0)), [Op(Kind.FORWARD, 0, 0, 0, 100, 0)])
    second_ops = [Op(Kind.FORWARD, 1, 0, 0, 20, 0), Op(Kind.FORWARD, 1, 1, 160, 200, 30)]
    second = RankOps(1, kernels((0, 20, 0, 0), (90, 150, 25, 1), (160, 200, 30, 0)), second_ops)
    spans = spans_of([first, second])
    (sent,) = rows_of(spans, Kind.SEND)
    assert (sent["rank"], sent["peer"], sent["post_ns"]) == (0, 1, 100)
    received = rows_of(spans, Kind.RECV)
    assert received[["start_ns", "end_ns"]].tolist() == [(0, 0), (20, 150)]
    assert set(received["peer"].tolist()) == {0}
    assert all(row["flags"] & Flag.INFERRED for row in (*received, sent))
