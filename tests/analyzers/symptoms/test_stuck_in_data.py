from __future__ import annotations

from dataclasses import replace

from tests.analyzers.symptoms.cases import DEEPSPEED, found, hung, wait
from tests.analyzers.test_hand_calculations import pipeline


def three(waits):
    return hung(pipeline("1F1B", ranks=3, microbatches=3).trace(), waits)


def test_a_rank_of_the_first_stage_in_no_op_holds_up_the_others() -> None:
    symptom = found(three({1: wait(0), 2: wait(1)}), DEEPSPEED)["stuck-in-data"]
    assert symptom.evidence == (
        "ranks 1, 2 wait, in the end for rank 0",
        "rank 0 holds stage 0 of 0 to 2 and is in no pipeline op",
    )
    assert "eval" not in symptom.advice[0].action
    assert "ZeRO stage 0" in symptom.advice[0].how


def test_a_stage_between_loads_no_data_and_a_rank_in_an_op_does_not_load_now() -> None:
    assert "stuck-in-data" not in found(three({0: wait(1), 2: wait(1)}), DEEPSPEED)
    trace = three({1: wait(0), 2: wait(1)})
    busy = replace(trace.ranks[0], inside="the forward of stage 0 in step 7")
    assert "stuck-in-data" not in found(replace(trace, ranks={**trace.ranks, 0: busy}), DEEPSPEED)


def test_a_job_that_runs_a_cycle_and_a_rank_that_left_no_record_are_not() -> None:
    assert "stuck-in-data" not in found(pipeline("1F1B", ranks=3, microbatches=3).trace(), DEEPSPEED)
    assert "stuck-in-data" not in found(three({0: wait(1), 1: wait(0)}), DEEPSPEED)
    assert "stuck-in-data" not in found(three({1: wait(7), 2: wait(1)}), DEEPSPEED)
    trace = three({1: wait(0), 2: wait(1)})
    ended = replace(trace.ranks[0], status="finished")
    assert "stuck-in-data" not in found(replace(trace, ranks={**trace.ranks, 0: ended}), DEEPSPEED)
