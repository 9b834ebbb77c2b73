"""Host time by its cause, and the diagnosis of single steps. All times in milliseconds.

Two ranks, one microbatch, F = 10, B = 20, optimizer = 1; rank 1 stalls 5 before its backward though its input is there.
The step takes 66: rank 0 F 0-10, rank 1 F 10-20, stalls 20-25, B 25-45, rank 0 B 45-65, optimizer 65-66.
"""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Flag, HostCause, Kind
from ppdiag.trace import sorted_spans
from tests.analyzers.factory import MS, Pipeline, spans_of
from tests.analyzers.strategies import pipelines


def stalled(steps=5, **settings):
    orders = schedules.order("1F1B", ranks=2, chunks=1, microbatches=1)

    def stall(op, rank, _step):
        return 5 * MS if rank == 1 and op.kind is Kind.BACKWARD else 0

    return Pipeline(orders, [0, 1], host_gap=stall, steps=steps, **settings).trace()


def with_pauses(trace, *pauses):
    """The trace with host spans of a cause: so many ms from the end of each forward of rank 1, for so many."""
    spans = trace.spans
    ends = spans["end_ns"][(spans["rank"] == 1) & (spans["kind"] == Kind.FORWARD)]
    rows = [
        {"rank": 1, "kind": Kind.HOST, "op": cause, "start_ns": end + after * MS, "end_ns": end + (after + length) * MS}
        for end in ends.tolist()
        for cause, after, length in pauses
    ]
    return replace(trace, spans=sorted_spans(np.concatenate([spans, spans_of(rows)])))


def test_without_known_causes_all_host_time_is_pythons():
    found = diagnose(stalled())
    assert found.why.host == pytest.approx(5 / 66)
    assert astuple(found.host) == pytest.approx((5 / 66, 0, 0, 0, 0))


def test_pauses_take_their_part_of_the_gap_in_which_they_lie():
    # 3 of the 5 are garbage collection; what it does inside the op after the gap (1 ms of its last 4) is no idle time
    found = diagnose(with_pauses(stalled(), (HostCause.GC, 0, 2), (HostCause.GC, 4, 2)))
    assert astuple(found.host) == pytest.approx((2 / 66, 0, 3 / 66, 0, 0))


def test_a_collection_while_data_are_waited_for_counts_once():
    found = diagnose(with_pauses(stalled(), (HostCause.DATA, 0, 4), (HostCause.GC, 1, 1)))
    assert astuple(found.host) == pytest.approx((1 / 66, 3 / 66, 1 / 66, 0, 0))


def test_a_pause_beside_a_wait_costs_nothing():
    trace = stalled()
    spans = trace.spans
    waits = spans[(spans["rank"] == 1) & (spans["kind"] == Kind.RECV)]
    rows = [
        {"rank": 1, "kind": Kind.HOST, "op": HostCause.GC, "start_ns": w["start_ns"], "end_ns": w["end_ns"]}
        for w in waits
    ]
    found = diagnose(replace(trace, spans=sorted_spans(np.concatenate([spans, spans_of(rows)]))))
    assert astuple(found.host) == pytest.approx((5 / 66, 0, 0, 0, 0))


def launched_late(trace):
    """The trace as one of a device, on which every op begins when it is launched."""
    spans = trace.spans.copy()
    compute = np.isin(spans["kind"], (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER))
    spans["flags"][compute] |= np.uint16(Flag.DEVICE)
    spans["launch_ns"] = spans["start_ns"]
    return replace(trace, spans=spans)


def test_an_op_that_a_host_launched_late_on_its_device_is_a_late_launch():
    found = diagnose(launched_late(stalled()))
    assert astuple(found.host) == pytest.approx((0, 0, 0, 5 / 66, 0))


@pytest.mark.parametrize(("waited_ms", "part_ms"), [(2, 2), (8, 5)])
def test_a_synchronising_call_takes_its_time_of_the_gap_that_follows_it(waited_ms, part_ms):
    # It returns as the device ends its forward. The next launch comes 5 later; without the call, ``waited_ms`` sooner.
    trace = with_pauses(launched_late(stalled()), (HostCause.SYNCHRONISING, -waited_ms, waited_ms))
    assert astuple(diagnose(trace).host) == pytest.approx((0, 0, 0, (5 - part_ms) / 66, part_ms / 66))


def test_each_step_has_a_diagnosis_of_its_own():
    found = diagnose(stalled(steps=6))
    assert [row.step for row in found.step_results] == [1, 2, 3, 4]
    for row in found.step_results:
        assert row.duration_s == pytest.approx(0.066)
        assert astuple(row.why) == pytest.approx((30 / 66, 0, 0, 5 / 66, 0))
    assert found.spread["host"] == pytest.approx((5 / 66, 5 / 66))


def test_the_spread_shows_what_comes_in_some_steps_only():
    orders = schedules.order("1F1B", ranks=2, chunks=1, microbatches=1)

    def stall(op, rank, step):
        return (22 if step == 3 else 0) * MS if rank == 1 and op.kind is Kind.BACKWARD else 0

    # a step takes 61, and 83 with the stall
    found = diagnose(Pipeline(orders, [0, 1], host_gap=stall, steps=7).trace())
    host = {row.step: row.why.host for row in found.step_results}
    assert host == pytest.approx({1: 0, 2: 0, 3: 22 / 83, 4: 0, 5: 0})
    assert found.spread["host"] == pytest.approx((0.0, 22 / 83))


@settings(max_examples=20)
@given(pipelines())
def test_both_partitions_of_each_step_sum_to_its_idle_time(pipeline):
    found = diagnose(pipeline.trace())
    assert sum(astuple(found.host)) == pytest.approx(found.why.host, abs=1e-9)
    for row in found.step_results:
        assert min(*astuple(row.why), *astuple(row.where)) >= 0.0
        assert row.why.total == pytest.approx(row.where.total, abs=1e-9)
