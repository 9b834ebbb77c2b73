"""What must hold of every diagnosis, whatever the durations."""

from __future__ import annotations

from dataclasses import astuple, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.trace import ProcessGroup, sorted_spans
from tests.analyzers.strategies import TICK, OfOp, OfPair, equal_stages, pipelines

if TYPE_CHECKING:
    from ppdiag.diagnosis import Diagnosis, RankResult, StageResult
    from ppdiag.trace import Trace
    from tests.analyzers.factory import Pipeline

EXACT = 1e-9
SETTLED = 1e-5
"""The replay repeats until starts move by less than 1e-6 of the step, so that a sum may err by a few of these."""


def rows(diagnosis: Diagnosis) -> list[Diagnosis | StageResult | RankResult]:
    return [diagnosis, *diagnosis.stages, *diagnosis.ranks]


def numbers(diagnosis: Diagnosis) -> list[float]:
    """All that may not depend on units, origins or names."""
    imbalance = astuple(diagnosis.imbalance)
    return [*(value for row in rows(diagnosis) for value in (*astuple(row.why), *astuple(row.where))), *imbalance]


def check_sums(diagnosis: Diagnosis) -> None:
    """No part is negative, and all parts sum to what they are parts of."""
    for row in rows(diagnosis):
        assert min(*astuple(row.why), *astuple(row.where)) >= 0.0
        assert row.why.total == pytest.approx(row.idle_fraction, abs=EXACT)
        assert row.where.total == pytest.approx(row.idle_fraction, abs=EXACT)
    parts: list[StageResult | RankResult] = [*diagnosis.stages, *diagnosis.ranks]
    for part in parts:
        assert part.busy_fraction + part.idle_fraction == pytest.approx(1.0, abs=EXACT)
    assert sum(astuple(diagnosis.imbalance)) == pytest.approx(diagnosis.why.imbalance, abs=EXACT)
    assert sum(astuple(diagnosis.host)) == pytest.approx(diagnosis.why.host, abs=EXACT)
    phases = diagnosis.phases
    assert phases.pipeline_s + phases.tail_s + phases.between_s == pytest.approx(np.mean(diagnosis.step_times_s))


@given(pipelines())
def test_both_partitions_are_not_negative_and_sum_to_the_idle_time(pipeline: Pipeline) -> None:
    check_sums(diagnose(pipeline.trace()))


@given(pipelines())
def test_the_replay_of_a_run_that_obeys_its_graph_leaves_nothing_unexplained(pipeline: Pipeline) -> None:
    diagnosis = diagnose(pipeline.trace())
    assert diagnosis.why.unexplained == pytest.approx(0.0, abs=SETTLED)
    assert diagnosis.where.unexplained == 0.0


@given(pipelines(), st.integers(-(10**9), 10**15))
def test_a_shift_of_all_times_changes_nothing(pipeline: Pipeline, shift_ns: int) -> None:
    before = diagnose(pipeline.trace())
    after = diagnose(replace(pipeline, origin=pipeline.origin + shift_ns).trace())
    assert numbers(after) == pytest.approx(numbers(before), abs=EXACT)
    assert after.verdict == before.verdict


@given(pipelines(), st.integers(2, 1000) | st.sampled_from([Fraction(1, n) for n in (2, 10, 1000, TICK)]))
def test_a_change_of_the_unit_changes_no_fraction(pipeline: Pipeline, factor: Fraction) -> None:
    trace = pipeline.trace()
    spans = trace.spans.copy()
    for name in ("start_ns", "end_ns", "post_ns"):
        spans[name] = spans[name] * Fraction(factor).numerator // Fraction(factor).denominator
    before, after = diagnose(trace), diagnose(replace(trace, spans=spans))
    assert numbers(after) == pytest.approx(numbers(before), abs=SETTLED)
    assert after.steps.median_s == pytest.approx(float(factor) * before.steps.median_s)
    assert (after.verdict.cause, after.verdict.stage) == (before.verdict.cause, before.verdict.stage)


@given(pipelines(), st.randoms(use_true_random=False))
def test_new_numbers_for_the_ranks_change_names_only(pipeline: Pipeline, random: object) -> None:
    trace = pipeline.trace()
    number = list(range(3, 3 + 2 * len(trace.ranks), 2))
    random.shuffle(number)  # type: ignore[attr-defined]
    before, after = diagnose(trace), diagnose(renumbered(trace, np.array(number)))
    assert astuple(after.why) == pytest.approx(astuple(before.why), abs=SETTLED)
    assert astuple(after.where) == pytest.approx(astuple(before.where), abs=EXACT)
    assert astuple(after.imbalance) == pytest.approx(astuple(before.imbalance), abs=SETTLED)
    new = {row.rank: row for row in after.ranks}
    for row in before.ranks:
        assert astuple(new[number[row.rank]].why) == pytest.approx(astuple(row.why), abs=SETTLED)
        assert astuple(new[number[row.rank]].where) == pytest.approx(astuple(row.where), abs=EXACT)
        assert new[number[row.rank]].stage == row.stage


def renumbered(trace: Trace, number: np.ndarray) -> Trace:
    """The same run with rank r called ``number[r]``."""
    spans = trace.spans.copy()
    spans["rank"] = number[spans["rank"]]
    spans["peer"] = np.where(spans["peer"] >= 0, number[spans["peer"]], -1)
    groups = tuple(ProcessGroup(group.name, tuple(int(number[r]) for r in group.ranks)) for group in trace.groups)
    ranks = {int(number[r]): replace(facts, rank=int(number[r])) for r, facts in trace.ranks.items()}
    return replace(trace, spans=sorted_spans(spans), groups=groups, ranks=ranks)


@given(pipelines(), st.integers(1, 50))
def test_equal_work_leaves_no_imbalance(pipeline: Pipeline, ticks: int) -> None:
    diagnosis = diagnose(replace(pipeline, duration=equal_stages(pipeline, ticks * TICK)).trace())
    assert diagnosis.why.imbalance == pytest.approx(0.0, abs=SETTLED)


@given(pipelines())
def test_free_transfers_and_collectives_leave_no_communication(pipeline: Pipeline) -> None:
    free = replace(pipeline, transfer=lambda src, dst: 0, tail=pipeline.tail and 0, rendezvous=False)  # noqa: ARG005
    diagnosis = diagnose(free.trace())
    assert diagnosis.why.communication == pytest.approx(0.0, abs=SETTLED)
    assert diagnosis.where.transfer == 0.0


@given(pipelines())
def test_a_host_that_is_never_late_is_never_blamed(pipeline: Pipeline) -> None:
    nothing = OfPair([0])
    prompt = replace(pipeline, host_gap=OfOp([0]), before_optimizer=nothing, between=nothing)
    diagnosis = diagnose(prompt.trace())
    assert diagnosis.why.host == pytest.approx(0.0, abs=SETTLED)
    assert diagnosis.where.host == pytest.approx(0.0, abs=EXACT)
