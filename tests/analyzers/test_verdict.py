"""The verdict: when nothing is said, when it is undecided, and when a place is named."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Flag, Kind
from ppdiag.trace import sorted_spans
from tests.analyzers.factory import MS, Pipeline, ten_and_twenty
from tests.analyzers.test_hand_calculations import job, on_rank, pipeline, slower

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppdiag.diagnosis import Diagnosis
    from ppdiag.trace import Trace


def single(**settings) -> Pipeline:
    """One stage on one rank: no bubble, no messages; only the host can be late. A step of 2 x 30 + 1 = 61 ms."""
    return Pipeline(schedules.order("GPipe", ranks=1, chunks=1, microbatches=2), [0], steps=6, **settings)


@pytest.mark.parametrize(("stall_ms", "said"), [(3, False), (4, True)])
def test_below_five_percent_nothing_is_said(stall_ms: int, said: bool) -> None:  # noqa: FBT001
    # 3 of 64 are 4.7 %, 4 of 65 are 6.2 %
    found = diagnose(single(between=on_rank(0, stall_ms)).trace())
    assert found.why.host == pytest.approx(stall_ms / (61 + stall_ms))
    assert found.verdict.cause == ("host" if said else None)
    assert bool(found.symptoms) == said
    assert found.verdict.confidence == "measured"


@pytest.mark.parametrize(("stall_ms", "severity"), [(5, "info"), (8, "warning"), (20, "critical")])
def test_bands_of_severity(stall_ms: int, severity: str) -> None:
    # 5 of 66 are 7.6 %, 8 of 69 are 11.6 %, 20 of 81 are 24.7 %
    assert [s.severity for s in diagnose(single(between=on_rank(0, stall_ms)).trace()).symptoms] == [severity]


def verdict_of(found: Diagnosis) -> tuple[str | None, int | None, tuple[int, int] | None, int | None, str]:
    verdict = found.verdict
    return (verdict.cause, verdict.stage, verdict.link, verdict.rank, verdict.confidence)


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_twice_as_slow_is_named(stage: int) -> None:
    found = diagnose(pipeline("1F1B", ranks=4, microbatches=8, duration=slower(2, stage=stage)).trace())
    assert verdict_of(found) == ("imbalance", stage, None, None, "measured")
    assert f"stage {stage}" in found.verdict.text


@pytest.mark.parametrize("stage", range(4))
def test_one_heavy_chunk_of_an_interleaved_pipeline_is_named(stage: int) -> None:
    found = diagnose(pipeline("Interleaved1F1B", microbatches=8, chunks=2, duration=slower(3, stage=stage)).trace())
    assert verdict_of(found) == ("imbalance", stage, None, None, "measured")


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_is_slower_than_its_twin_is_named(rank: int) -> None:
    settings = {"ranks": 2, "microbatches": 8, "replicas": 2, "tail": MS}
    found = diagnose(pipeline("1F1B", duration=slower(2, rank=rank), **settings).trace())
    assert verdict_of(found) == ("imbalance", None, None, rank, "measured")
    assert f"rank {rank} computes 2.00 times as long as the others" in found.verdict.text


def test_a_stage_that_is_slow_on_all_twins_is_named_as_a_stage() -> None:
    settings = {"ranks": 2, "microbatches": 8, "replicas": 2, "tail": MS}
    found = diagnose(pipeline("1F1B", duration=slower(2, stage=1), **settings).trace())
    assert verdict_of(found) == ("imbalance", 1, None, None, "measured")


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_is_slow_in_all_stages_that_it_holds_is_named_as_a_rank(rank: int) -> None:
    settings = {"ranks": 4, "microbatches": 8, "chunks": 2}
    found = diagnose(pipeline("Interleaved1F1B", duration=slower(2, rank=rank), **settings).trace())
    assert verdict_of(found) == ("imbalance", None, None, rank, "measured")


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("place", ["between", "before_optimizer"])
def test_a_rank_that_stalls_is_named(rank: int, place: str) -> None:
    settings = {place: on_rank(rank, 300)}
    found = diagnose(pipeline("1F1B", ranks=4, microbatches=8, **settings).trace())
    assert verdict_of(found) == ("host", None, None, rank, "measured")


def test_a_few_microbatches_are_a_bubble() -> None:
    assert verdict_of(diagnose(pipeline(ranks=4).trace())) == ("bubble", None, None, None, "measured")


@pytest.mark.parametrize("slow", [(0, 1), (1, 2), (2, 3)])
def test_one_slow_link_is_named_by_its_stages(slow: tuple[int, int]) -> None:
    # both directions of the one cable; the forward one is the slower
    def transfer(src: int, dst: int) -> int:
        return {slow: 60 * MS, slow[::-1]: 40 * MS}.get((src, dst), 0)

    found = diagnose(pipeline("1F1B", ranks=4, microbatches=8, transfer=transfer, rendezvous=True).trace())
    assert found.verdict.cause == "communication"
    assert found.verdict.link is not None
    assert set(found.verdict.link) == set(slow)


def test_links_that_are_all_slow_have_no_place() -> None:
    found = diagnose(pipeline("1F1B", ranks=4, microbatches=8, transfer=lambda _a, _b: 60 * MS).trace())
    assert verdict_of(found)[:4] == ("communication", None, None, None)
    assert "several links" in found.verdict.text


def test_a_slow_tail_collective_names_its_process_group() -> None:
    found = diagnose(pipeline(tail=200 * MS, tail_of_all=True).trace())
    assert verdict_of(found)[:4] == ("communication", None, None, None)
    assert "process group 'group3'" in found.verdict.text  # of one replica, one a position each, of all


def test_slow_collectives_of_several_groups_are_no_slow_links() -> None:
    # each position of the two replicas has a group of its own, and reduces its gradients for 200 ms
    found = diagnose(pipeline(tail=200 * MS, replicas=2).trace())
    assert verdict_of(found)[:4] == ("communication", None, None, None)
    assert "lost to collectives, of several process groups" in found.verdict.text


def test_a_collective_of_an_unknown_group_is_named_by_nobody() -> None:
    trace = pipeline(tail=200 * MS, tail_of_all=True).trace()
    spans = trace.spans.copy()
    spans["group"] = -1
    found = diagnose(replace(trace, spans=spans, groups=()))
    assert found.verdict.confidence == "undecided"
    assert found.where.collective > 0.5


def test_unequal_microbatches_name_no_stage() -> None:
    orders = schedules.order("GPipe", ranks=2, chunks=1, microbatches=8)
    lumpy = Pipeline(orders, [0, 1], duration=slower(9, microbatch=3), steps=5)
    found = diagnose(lumpy.trace())
    assert verdict_of(found)[:4] == ("imbalance", None, None, None)
    assert "between microbatches" in found.verdict.text
    assert found.imbalance.microbatch > 0.8 * found.why.imbalance


def test_a_slow_twin_is_no_slow_stage() -> None:
    settings = {"replicas": 4, "tail": 0, "duration": slower(3, rank=2)}
    found = diagnose(pipeline("1F1B", microbatches=8, **settings).trace())
    assert found.imbalance.rank > found.imbalance.stage
    assert found.verdict.cause == "imbalance"
    assert found.verdict.stage is None


def test_a_clock_error_of_more_than_a_twentieth_of_the_step_leaves_it_undecided() -> None:
    trace = pipeline().trace()
    sure, unsure = (diagnose(replace(trace, clock_error_s=error)) for error in (0.004, 0.005))
    assert sure.verdict.confidence == "measured"
    assert unsure.verdict.confidence == "undecided"
    assert "clocks may be off by 5.0 ms" in unsure.verdict.text
    assert [symptom.id for symptom in unsure.symptoms] == ["clocks-apart"]


def test_more_than_five_percent_unexplained_leaves_it_undecided() -> None:
    trace = pipeline().trace()
    kept = (trace.spans["kind"] != Kind.SEND) | (trace.spans["rank"] != 1)
    found = diagnose(replace(trace, spans=trace.spans[kept]))
    assert found.why.unexplained > 0.05
    assert verdict_of(found) == (None, None, None, None, "undecided")
    assert "the replay leaves 33.0 % of the step unexplained" in found.verdict.text


def one_after_another(pipelines: list[Pipeline]) -> Trace:
    """A run whose steps are those of these pipelines, one each."""
    parts, at = [], 1_000 * MS
    for step, one in enumerate(pipelines):
        spans = replace(one, steps=1, origin=at).trace().spans.copy()
        spans["step"] = step
        spans["seq"] += 1_000 * step
        parts.append(spans)
        at = int(spans["end_ns"].max())
    return replace(pipelines[0].trace(), spans=sorted_spans(np.concatenate(parts)))


def test_a_heavy_stage_is_named_also_where_steps_differ_in_their_microbatches() -> None:
    # what repairing it gains in a step of few microbatches is small beside what it costs in one of many
    few, many = (
        pipeline("1F1B", ranks=4, microbatches=m, duration=slower(2, stage=2), tail=0, tail_of_all=True)
        for m in (4, 24)
    )
    found = diagnose(one_after_another([few, many] * 5))
    assert verdict_of(found) == ("imbalance", 2, None, None, "measured")


def never_waited(spans: np.ndarray) -> np.ndarray:
    """As where the job asks its works for a future, or polls them: no wait is seen."""
    spans = spans.copy()
    message = np.isin(spans["kind"], (Kind.SEND, Kind.RECV))
    spans["flags"][message] |= np.uint16(Flag.NEVER_WAITED)
    for name in ("start_ns", "end_ns"):
        spans[name][message] = spans["post_ns"][message]
    return sorted_spans(spans)


def without_messages(spans: np.ndarray) -> np.ndarray:
    """As where the job sends them by other means than torch.distributed."""
    return spans[~np.isin(spans["kind"], (Kind.SEND, Kind.RECV))]


@pytest.mark.parametrize("lose", [never_waited, without_messages])
def test_a_record_without_the_waits_of_its_pipeline_leaves_it_undecided(
    lose: Callable[[np.ndarray], np.ndarray],
) -> None:
    # 3 ranks, 4 microbatches: 2 x 4 forwards and 2 x 4 backwards need what another rank made
    trace = pipeline("1F1B", ranks=3, microbatches=4).trace()
    found = diagnose(replace(trace, spans=lose(trace.spans)))
    assert found.verdict.confidence == "undecided"
    assert "0 waits" in found.verdict.text
    assert "need 16 inputs from other ranks" in found.verdict.text


def test_a_cause_that_lies_in_one_step_of_many_says_so() -> None:
    # 8 analysed steps of 61; one stands still for another 61
    once = single(between=lambda _rank, step: 61 * MS * (step == 4))
    found = diagnose(replace(once, steps=10).trace())
    assert found.why.host == pytest.approx(1 / 9)
    assert "; 100.0 % of it in 1 of 8 steps" in found.verdict.text
    every = diagnose(replace(once, steps=10, between=on_rank(0, 10)).trace())
    assert "of it in" not in every.verdict.text


def test_two_causes_that_take_turns_are_not_told_apart() -> None:
    # the host stalls 0 and 60 ms in turns beside a bubble of 30
    found = diagnose(replace(pipeline(between=lambda rank, step: 70 * MS * (step % 2) * (rank == 0)), steps=12).trace())
    assert found.why.bubble > 0.05
    assert found.why.host > 0.05
    assert found.verdict.confidence == "undecided"
    assert found.symptoms == ()


def test_stages_that_were_inferred_say_so() -> None:
    trace = job()
    spans = trace.spans.copy()
    for name in ("stage", "microbatch"):
        spans[name] = -1
    found = diagnose(replace(trace, spans=spans))
    assert found.verdict.confidence == "inferred"
    assert [row.stage for row in found.ranks] == [(0,), (1,)]
    assert found.job.schedule_name == "GPipe"
    assert found.why.bubble == pytest.approx(30 / 91)


def test_the_gain_of_repairing_the_named_stage_covers_four_fifths_of_the_cause() -> None:
    # two stages of four are slow, one more than the other: neither alone covers it
    def duration(op, rank: int, step: int) -> int:
        return ten_and_twenty(op, rank, step) * {1: 3, 2: 3}.get(op.stage, 1)

    found = diagnose(pipeline("1F1B", ranks=4, microbatches=8, duration=duration).trace())
    assert found.verdict.cause == "imbalance"
    assert found.verdict.stage is None
    assert np.isclose(found.imbalance.stage, found.why.imbalance)
