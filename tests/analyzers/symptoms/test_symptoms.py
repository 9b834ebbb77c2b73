"""Each symptom fires on its case, and not on a near miss."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.symptoms import SYMPTOMS
from ppdiag.trace import RankFacts, Waiting
from tests.analyzers.factory import MS
from tests.analyzers.test_hand_calculations import on_rank, pipeline, slower

if TYPE_CHECKING:
    from ppdiag.diagnosis import Symptom
    from ppdiag.trace import Trace

TORCH = "torch.distributed.pipelining"


def found(trace: Trace, framework: str = "") -> dict[str, Symptom]:
    trace = replace(trace, job=replace(trace.job, framework=framework))
    return {symptom.id: symptom for symptom in diagnose(trace).symptoms}


def slow_links(milliseconds: int) -> Trace:
    return pipeline("1F1B", ranks=2, microbatches=8, transfer=lambda _a, _b: milliseconds * MS).trace()


def test_every_symptom_documents_what_to_try() -> None:
    import importlib

    for name in SYMPTOMS.names():
        words = importlib.import_module(SYMPTOMS.load(name).__module__).__doc__ or ""
        for heading in ("What it finds:", "Why it matters:", "What to try:", "Source:"):
            assert heading in words, (name, heading)


def test_a_bubble_is_met_with_more_microbatches_or_another_schedule() -> None:
    symptom = found(pipeline().trace(), TORCH)["bubble"]
    assert symptom.severity == "critical"
    assert "bubble 33.0 % of the step, 33.3 % of its pipeline phase" in symptom.evidence
    assert "schedule GPipe with P=2, V=1, M=2" in symptom.evidence
    more, interleave, split = symptom.advice
    assert "Run 4 microbatches a step instead of 2" in more.action
    assert "n_microbatches=4" in more.how
    # (M + 1) x 30 + 1 ms: 91 with 2, and 151 for twice the samples; in two stages a rank (2 M + 1) x 15 + 1
    assert more.gain_fraction == pytest.approx(1 - 151 / 2 / 91)
    assert more.gain_range == pytest.approx((more.gain_fraction,) * 2)
    assert "ScheduleInterleaved1F1B" in interleave.how
    assert interleave.gain_fraction == pytest.approx(1 - 76 / 91)
    assert "ScheduleZBVZeroBubble" in split.how


@pytest.mark.parametrize(
    ("framework", "ways"),
    [
        ("megatron-core", ["--global-batch-size of 4 x", "--num-virtual-stages-per-pipeline-rank 2"]),
        ("megatron", ["--global-batch-size of 4 x", "--num-virtual-stages-per-pipeline-rank 2"]),
        ("deepspeed", ["gradient_accumulation_steps: 4"]),  # it has no interleaved schedule
        ("", ["microbatches a step: 4", "stages a rank: 2"]),
    ],
)
def test_the_change_is_said_in_the_words_of_the_users_framework(framework: str, ways: list[str]) -> None:
    advice = found(pipeline().trace(), framework)["bubble"].advice
    assert [row.how[: len(way)] for row, way in zip(advice, ways, strict=True)] == ways


@pytest.mark.parametrize(
    ("framework", "name", "way"),
    [
        ("megatron-core", "imbalance", "--decoder-last-pipeline-num-layers"),
        ("deepspeed", "uneven-partition", "partition_method"),
    ],
)
def test_layers_are_moved_by_the_users_framework(framework: str, name: str, way: str) -> None:
    symptoms = found(pipeline("1F1B", microbatches=8, duration=slower(2, stage=1)).trace(), framework)
    assert list(symptoms) == [name]
    assert way in symptoms[name].advice[0].how


def test_of_a_general_and_a_special_symptom_the_special_one_is_shown() -> None:
    heavy_end = pipeline("1F1B", ranks=4, microbatches=8, duration=slower(2, stage=3)).trace()
    assert list(found(heavy_end)) == ["heavy-ends"]
    heavy_middle = pipeline("1F1B", ranks=4, microbatches=8, duration=slower(2, stage=2)).trace()
    assert list(found(heavy_middle)) == ["imbalance"]


def test_a_bubble_with_slow_links_is_not_met_with_interleaving() -> None:
    # 4 x 7 = 28 of 119 are communication, 23.5 %; the bubble is 30
    symptom = found(pipeline(transfer=lambda _a, _b: 7 * MS).trace())["bubble"]
    assert ["microbatches" in advice.action for advice in symptom.advice] == [True]


def test_an_interleaved_bubble_is_not_met_with_interleaving() -> None:
    trace = pipeline("Interleaved1F1B", microbatches=2, chunks=2).trace()
    assert all("Interleave" not in advice.action for advice in found(trace)["bubble"].advice)


@pytest.mark.parametrize("microbatches", [16, 24])
def test_a_bubble_of_a_twentieth_is_not_spoken_of(microbatches: int) -> None:
    # P = 2: 30 of 30 (M + 1) + 1 ms: 5.9 % with 16, 4.0 % with 24
    assert ("bubble" in found(pipeline(microbatches=microbatches).trace())) == (microbatches == 16)


def test_a_slow_stage_is_met_by_moving_layers() -> None:
    symptoms = found(pipeline("1F1B", microbatches=8, duration=slower(2, stage=1)).trace(), TORCH)
    assert list(symptoms) == ["imbalance"]
    (advice,) = symptoms["imbalance"].advice
    assert "stage 1" in advice.action
    assert "PipelineStage" in advice.how
    assert advice.gain_fraction is not None
    assert 0 < advice.gain_fraction < 1


def test_unequal_microbatches_are_met_by_packing_and_slow_machines_by_looking_at_them() -> None:
    lumpy = pipeline(microbatches=8, duration=slower(9, microbatch=3)).trace()
    assert "equal cost" in found(lumpy)["sequence-lengths"].advice[0].action
    twin = pipeline("1F1B", microbatches=8, replicas=4, tail=0, duration=slower(3, rank=2)).trace()
    assert "machines" in found(twin)["imbalance"].advice[0].action


def test_slow_links_name_the_slowest_and_what_they_carry() -> None:
    symptom = found(slow_links(40))["slow-network"]
    assert any("1024 bytes in 40.00 ms" in row for row in symptom.evidence)
    assert "across machines" in symptom.advice[0].action


def test_slow_links_inside_one_machine_are_met_otherwise() -> None:
    trace = slow_links(40)
    ranks = {rank: replace(facts, host="one") for rank, facts in trace.ranks.items()}
    advice = found(replace(trace, ranks=ranks))["slow-network"].advice[0]
    assert "inside one machine" in advice.action
    assert "NCCL" not in advice.how  # nothing of it is in the record
    nccl = {"version": "2.20.5"}
    assert "NCCL_DEBUG" in found(replace(trace, ranks=ranks, nccl=nccl))["slow-network"].advice[0].how


def test_late_senders_are_no_slow_network() -> None:
    # the same waits, but the peer is late: nothing is in flight
    assert "slow-network" not in found(pipeline("1F1B", microbatches=8, duration=slower(4, stage=1)).trace())


def test_a_late_host_is_named_with_its_own_time() -> None:
    symptom = found(pipeline(between=on_rank(0, 60)).trace())["host-stall"]
    assert "host 39.7 % of the step" in symptom.evidence
    assert "rank 0 stood 39.7 % of the step outside of compute and waits" in symptom.evidence
    assert symptom.advice[0].gain_fraction == pytest.approx(60 / 151)


def test_a_host_stall_that_hides_in_the_bubble_is_none() -> None:
    assert "host-stall" not in found(pipeline(before_optimizer=on_rank(1, 30)).trace())


def with_facts(**facts: RankFacts) -> Trace:
    trace = pipeline("1F1B", ranks=3, microbatches=3).trace()
    return replace(trace, ranks={**trace.ranks, **{row.rank: row for row in facts.values()}})


@pytest.mark.parametrize(
    ("raised", "fires"),
    [("torch.OutOfMemoryError: CUDA out of memory", True), ("RuntimeError: shapes do not match", False)],
)
def test_an_out_of_memory_error_tells_how_many_microbatches_were_held(*, raised: str, fires: bool) -> None:
    symptoms = found(with_facts(a=RankFacts(1, status="raised", facts={"raised": raised})))
    assert ("activation-spike" in symptoms) == fires
    if fires:
        # 1F1B, rank 1 of 3: two in flight
        assert symptoms["activation-spike"].evidence == ("rank 1 ran out of memory; it held up to 2 microbatches",)


def waiting(rank: int, peer: int, *, seconds: float = 30.0, status: str = "killed") -> RankFacts:
    inside = f"the wait for a receive from rank {peer} (message 3, 1024 bytes) in step 7"
    message = Waiting(is_send=False, peer=peer, seq=3, tag=0, size_bytes=1024, step=7)
    return RankFacts(rank, status=status, inside=inside, inside_s=seconds, waiting=message)


def test_the_end_of_a_chain_of_waits_is_named() -> None:
    symptom = found(with_facts(a=waiting(2, 1), b=waiting(1, 0), c=RankFacts(0, status="running")))["stuck-in-recv"]
    assert symptom.advice[0].action == "Look at rank 0: the others wait for it"
    assert symptom.severity == "critical"
    assert symptom.evidence[-1] == "rank 0 was in no recorded op"


def test_what_stands_still_comes_before_what_its_steps_lost() -> None:
    trace = with_facts(a=waiting(2, 1), b=waiting(1, 0), c=RankFacts(0, status="running"))
    verdict = diagnose(trace).verdict
    assert verdict.text.startswith("the job stands still. Look at rank 0: the others wait for it. In the steps before")
    assert verdict.cause == "bubble"
    assert not diagnose(with_facts()).verdict.text.startswith("the job")


def test_a_cycle_of_waits_is_named() -> None:
    symptom = found(with_facts(a=waiting(2, 1), b=waiting(1, 2)))["stuck-in-recv"]
    assert symptom.advice[0].action == "Break the cycle of waits: rank 1 waits for rank 2 waits for rank 1"


@pytest.mark.parametrize(
    "facts",
    [
        {"a": waiting(1, 0, status="finished")},
        {"a": waiting(1, 0, seconds=0.5)},
        {"a": waiting(1, 0), "b": RankFacts(0, status="raised", inside="")},
        {"a": RankFacts(1, status="killed", inside="the forward of stage 1 in step 7", inside_s=30.0)},
    ],
    ids=["it went on", "it waited shortly", "its peer failed by itself", "it was no wait"],
)
def test_other_ends_are_no_hang(facts: dict[str, RankFacts]) -> None:
    assert "stuck-in-recv" not in found(with_facts(**facts))


def test_the_most_severe_symptom_comes_first() -> None:
    symptoms = list(found(replace(with_facts(a=waiting(2, 1)), clock_error_s=0.0)).values())
    assert [symptom.id for symptom in symptoms] == ["stuck-in-recv", "bubble"]
    assert {symptom.severity for symptom in symptoms} == {"critical"}
