"""The published results of StragglerAnalysis on its two jobs, by its own definitions (result-, ms- and mw-*.json)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.stragglers import Stragglers
from ppdiag.errors import BadRecord
from ppdiag.model import Kind, Payload
from tests.analyzers.factory import MS, Pipeline

DATA = Path(__file__).parents[1] / "data" / "straggler_analysis"
JOBS = ("ST", "SE")


@cache
def published(file, job):
    return json.loads((DATA / f"{file}-{job}.json").read_text())


@cache
def stragglers(job):
    pytest.importorskip("pyarrow")
    return Stragglers(read_trace([DATA / f"trace-{job}.parquet"]))


def as_published(numbers):
    return {str(name): value for name, value in numbers.items()}


@pytest.mark.parametrize(("job", "slowdown"), [("ST", 1.1787), ("SE", 1.5374)])
def test_the_slowdown_is_the_published_one(job, slowdown):
    assert stragglers(job).slowdown == pytest.approx(slowdown, rel=1e-4)
    assert stragglers(job).slowdown == pytest.approx(published("result", job)["blocking_slowdown"], rel=1e-4)


@pytest.mark.parametrize("job", JOBS)
def test_the_cost_of_launch_delays_is_the_published_one(job):
    assert stragglers(job).launch_slowdown == pytest.approx(published("result", job)["launch_slowdown"], rel=1e-4)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(
    ("name", "times"), [("step_t_base", "measured_S"), ("step_t_nodelay", "recorded_S"), ("step_t_noblk", "ideal_S")]
)
def test_the_time_of_every_step_is_the_published_one(job, name, times):
    found = dict(zip(map(str, stragglers(job).steps), getattr(stragglers(job), times), strict=True))
    assert found == pytest.approx(published("result", job)[name], rel=1e-4)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(("name", "factors"), [("optype", "by_type"), ("stage", "by_stage"), ("dp_rank", "by_replica")])
def test_the_slowdown_of_every_group_is_the_published_one(job, name, factors):
    found = as_published(getattr(stragglers(job), factors))
    assert found == pytest.approx(published("result", job)[f"blocking_decompose_by_{name}"], rel=1e-4)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(("name", "slowdown"), [("blocking", "slowdown_S"), ("launch", "launch_slowdown_S")])
def test_the_slowdown_of_every_step_is_the_published_one(job, name, slowdown):
    found = dict(zip(map(str, stragglers(job).steps), getattr(stragglers(job), slowdown), strict=True))
    assert found == pytest.approx(published("result", job)[f"{name}_step_slowdown"], rel=1e-4)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(
    ("name", "factors"), [("optype", "by_type_S"), ("stage", "by_stage_S"), ("dp_rank", "by_replica_S")]
)
def test_the_slowdown_of_every_group_in_every_step_is_the_published_one(job, name, factors):
    found = as_published(getattr(stragglers(job), factors))
    for number, step in enumerate(stragglers(job).steps):
        of_step = {group: slowdown_S[number] for group, slowdown_S in found.items()}
        published_of_step = published("result", job)[f"blocking_decompose_by_{name}_per_step"][str(step)]
        assert of_step == pytest.approx(published_of_step, rel=1e-4)


@pytest.mark.parametrize("job", JOBS)
def test_every_published_table_is_compared(job):
    compared = {"blocking_slowdown", "launch_slowdown", "step_t_base", "step_t_nodelay", "step_t_noblk"}
    compared |= {"blocking_step_slowdown", "launch_step_slowdown"}
    by = [f"decompose_by_{name}{per_step}" for name in ("optype", "stage", "dp_rank") for per_step in ("", "_per_step")]
    compared |= {f"blocking_{name}" for name in by}
    result = dict(published("result", job))
    assert all(result.pop(f"launch_{name}") is None for name in by)
    assert result.keys() == compared | {"job_meta"}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(("file", "repaired"), [("ms", "last_stage"), ("mw", "slowest_ranks")])
def test_what_a_repair_is_worth_is_the_published_number(job, file, repaired):
    found, expected = getattr(stragglers(job), repaired)(), published(file, job)
    assert found.by_repair == pytest.approx(expected["rem"], rel=1e-3)
    assert found.by_keeping == pytest.approx(expected["add"], rel=1e-3)
    assert found.repaired_s == pytest.approx(expected["trem"], rel=1e-4)
    assert found.kept_s == pytest.approx(expected["tadd"], rel=1e-4)
    assert found.recorded_s == pytest.approx(expected["tori"], rel=1e-4)
    assert found.ideal_s == pytest.approx(expected["tideal"], rel=1e-4)


def with_payloads(trace):
    """The factory's tag says the direction of a message; here its payload does."""
    spans = trace.spans.copy()
    message = np.isin(spans["kind"], [Kind.SEND, Kind.RECV])
    spans["op"][message] = np.where(spans["tag"] % 2, Payload.GRADIENT, Payload.ACTIVATION)[message]
    return replace(trace, spans=spans)


def two_stages(slow=10 * MS, steps=3):
    """1F1B of two ranks and two microbatches, F and B of 10 ms but for those of stage 1; no transfers, no tail."""
    orders = schedules.order("1F1B", ranks=2, chunks=1, microbatches=2)
    duration = lambda op, _rank, _step: slow if op.stage == 1 else 10 * MS  # noqa: E731
    return with_payloads(Pipeline(orders, [0, 1], duration=duration, optimizer=0, steps=steps).trace())


def test_equal_stages_are_not_slowed():
    found = Stragglers(two_stages())
    assert found.slowdown == pytest.approx(1.0, abs=1e-9)
    assert found.ideal_S.tolist() == pytest.approx([0.060] * 3)  # (P - 1 + M) x (F + B)


def test_a_stage_of_twice_the_length_is_what_slows():
    found = Stragglers(two_stages(slow=20 * MS))
    # recorded: 10 + 2 x 40 + 10 ms; ideal: every op 15 ms, (2 - 1 + 2) x 30 ms
    assert found.recorded_S.tolist() == pytest.approx([0.100] * 3)
    assert found.ideal_S.tolist() == pytest.approx([0.090] * 3)
    assert found.slowdown == pytest.approx(10 / 9)
    # the ideal with 20 ms on stage 1: 15 + 80 + 15; with 10 ms on stage 0: 10 + 60 + 10
    assert found.by_stage == pytest.approx({0: 80 / 90, 1: 110 / 90})
    # stage 1 at 15 ms: 10 + 60 + 10
    assert found.last_stage().by_repair == pytest.approx((100 - 80) / (100 - 90))


def test_steps_that_differ_in_their_ops_are_refused():
    trace = two_stages()
    first = np.flatnonzero(trace.spans["kind"] == Kind.BACKWARD)[0]
    short = replace(trace, spans=np.delete(trace.spans, first))
    with pytest.raises(BadRecord, match="do not all have the same ops"):
        Stragglers(short)


def test_several_stages_a_rank_are_refused():
    orders = schedules.order("Interleaved1F1B", ranks=2, chunks=2, microbatches=2)
    trace = with_payloads(Pipeline(orders, [0, 1, 0, 1], steps=2).trace())
    with pytest.raises(BadRecord, match="one stage a rank"):
        Stragglers(trace)


def test_messages_of_an_unknown_direction_are_refused():
    trace = two_stages()
    spans = trace.spans.copy()
    spans["op"] = Payload.UNKNOWN
    with pytest.raises(BadRecord, match="activations or gradients"):
        Stragglers(replace(trace, spans=spans))
