"""Steps: warm-up, holes, and records without a whole step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.steps import find_steps
from ppdiag.errors import NoPipelineFound
from ppdiag.model import Flag, Kind
from ppdiag.trace import Trace, Waiting, make_spans
from tests.analyzers.factory import MS, spans_of, trace_of
from tests.analyzers.test_hand_calculations import on_rank, pipeline


def test_long_leading_steps_are_warm_up_and_a_long_one_later_is_not() -> None:
    # steps of 91; the first three take 200 more, the seventh too
    slow = {0, 1, 2, 6}
    run = replace(pipeline(between=lambda rank, step: 200 * MS * (rank == 0 and step in slow)), steps=12)
    found = find_steps(run.trace())
    assert found.kept.tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert found.dropped == 4  # and the last, which has no end
    assert found.duration_s.tolist() == pytest.approx([0.291 if step == 6 else 0.091 for step in range(3, 11)])


def test_a_single_whole_step_ends_with_its_last_op_and_says_so() -> None:
    found = diagnose(replace(pipeline(), steps=1).trace())
    assert found.step_times_s == pytest.approx([0.091])
    assert any("only one complete step" in warning for warning in found.warnings)


def test_a_step_before_a_sleep_of_the_probes_has_no_end() -> None:
    # recorded: steps 5, 6, 7, then 1,000,000 to 1,000,002, an hour later
    trace = replace(pipeline(), steps=6).trace()
    spans = trace.spans.copy()
    late = spans["step"] >= 3
    spans["step"] += 5
    spans["step"][late] += 1_000_000 - 8
    for name in ("start_ns", "end_ns", "post_ns"):
        spans[name][late] += 3_600_000 * MS
    found = find_steps(replace(trace, spans=spans))
    assert found.recorded[found.kept].tolist() == [6, 1_000_000, 1_000_001]
    assert found.duration_s.tolist() == pytest.approx([0.091] * 3)
    assert diagnose(replace(trace, spans=spans)).step_times_s == pytest.approx([0.091] * 3)


def test_a_step_that_one_rank_never_began_is_no_whole_step() -> None:
    trace = pipeline().trace()
    lost = (trace.spans["rank"] == 1) & (trace.spans["step"] == 2)
    found = find_steps(replace(trace, spans=trace.spans[~lost]))
    assert found.kept.tolist() == [1, 3]


def test_a_record_without_ops_has_no_pipeline() -> None:
    trace = pipeline().trace()
    messages = ~np.isin(trace.spans["kind"], (Kind.FORWARD, Kind.BACKWARD))
    with pytest.raises(NoPipelineFound, match="no pipeline stage"):
        diagnose(replace(trace, spans=trace.spans[messages]))


def test_initialisation_alone_is_no_pipeline() -> None:
    trace = pipeline().trace()
    spans = trace.spans.copy()
    spans["flags"] |= np.uint16(Flag.INIT)
    with pytest.raises(NoPipelineFound):
        diagnose(replace(trace, spans=spans))


def never_together() -> Trace:
    """Two ranks, each with a forward of a step of its own."""
    rows = [
        {"kind": Kind.FORWARD, "rank": rank, "step": rank, "stage": rank, "start_ns": 0, "end_ns": MS}
        for rank in (0, 1)
    ]
    rows.append({"kind": Kind.OPTIMIZER, "rank": 0, "step": 0, "start_ns": MS, "end_ns": MS})
    return trace_of(spans_of(rows))


def test_ranks_that_never_share_a_step_are_told_what_each_did() -> None:
    trace = never_together()
    ranks = {1: replace(trace.ranks[1], inside="the wait for a receive from rank 0")}
    with pytest.raises(NoPipelineFound, match=r"rank 1 was in the wait for a receive from rank 0\Z"):
        diagnose(replace(trace, ranks=ranks))


def test_ranks_that_stand_still_in_their_first_step_are_told_who_waits_for_whom() -> None:
    trace = never_together()
    waiting = Waiting(is_send=False, peer=0, seq=0, tag=0, size_bytes=8, step=0)
    inside = "the wait for a receive from rank 0"
    ranks = {**trace.ranks, 1: replace(trace.ranks[1], status="killed", inside=inside, inside_s=9.0, waiting=waiting)}
    with pytest.raises(NoPipelineFound, match=r"the job stands still\. Look at rank 0: the others wait for it"):
        diagnose(replace(trace, ranks=ranks))


def test_a_run_of_inference_is_explained_too() -> None:
    # forwards only, flagged as evaluation: that is what the job does
    trace = pipeline(between=on_rank(0, 20)).trace()
    spans = trace.spans[(trace.spans["kind"] != Kind.BACKWARD) & (trace.spans["tag"] % 2 == 0)].copy()
    spans["flags"][spans["kind"] == Kind.FORWARD] |= np.uint16(Flag.EVALUATION)
    found = diagnose(replace(trace, spans=spans))
    assert found.steps.count == 3
    assert found.job.schedule_name == "forward-only"


def test_choosing_steps_counts_the_others_as_dropped() -> None:
    found = find_steps(replace(pipeline(), steps=8).trace())
    chosen = found.only(np.array([2, 4]))
    assert chosen.kept.tolist() == [2, 4]
    assert chosen.dropped == found.dropped + len(found.kept) - 2


def test_work_that_was_only_inferred_without_any_message_is_no_pipeline() -> None:
    rows = [
        {"kind": kind, "rank": rank, "flags": Flag.INFERRED, "step": step, "start_ns": at, "end_ns": at + 5}
        for rank in (0, 1)
        for step in (0, 1, 2)
        for kind, at in ((Kind.FORWARD, 20 * step), (Kind.BACKWARD, 20 * step + 10))
    ]
    with pytest.raises(NoPipelineFound):
        find_steps(Trace(make_spans(rows)))


def test_without_an_optimizer_the_last_rank_of_1f1b_does_not_begin_a_step_with_each_microbatch() -> None:
    # the last rank runs F B F B ...: it has nothing in flight before any of its microbatches
    trace = replace(pipeline("1F1B", ranks=3, microbatches=4), steps=5, tail=0, tail_of_all=True).trace()
    found = find_steps(replace(trace, spans=trace.spans[trace.spans["kind"] != Kind.OPTIMIZER]))
    assert found.recorded.tolist() == [0, 1, 2, 3, 4]
    assert found.dropped == 2  # the first, and the last, which has no end
