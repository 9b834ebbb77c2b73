from __future__ import annotations

import pytest

from tests.analyzers.symptoms.cases import DEEPSPEED, found
from tests.analyzers.test_hand_calculations import on_rank, pipeline


def test_fewer_microbatches_than_ranks_are_pointed_out() -> None:
    symptom = found(pipeline(ranks=4, microbatches=2).trace(), DEEPSPEED)["few-microbatches"]
    # 30 (P - 1 + M) + 1 = 151 ms, of which M 30 + 1 are work
    assert symptom.evidence == ("M=2 microbatches for P=4 ranks", "bubble 59.6 % of the step")
    assert symptom.advice[0].action == "Run at least 4 microbatches a step, or shorten the pipeline"
    assert symptom.advice[0].how == "gradient_accumulation_steps of at least P"


@pytest.mark.parametrize("microbatches", [4, 8])
def test_as_many_are_left_to_the_bubble(microbatches: int) -> None:
    symptoms = found(pipeline(ranks=4, microbatches=microbatches).trace())
    assert "bubble" in symptoms
    assert "few-microbatches" not in symptoms


def test_where_another_cause_is_larger_they_are_not_the_matter() -> None:
    assert "few-microbatches" not in found(pipeline(ranks=4, microbatches=2, between=on_rank(0, 500)).trace())
