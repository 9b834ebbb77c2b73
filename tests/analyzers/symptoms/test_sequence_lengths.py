from __future__ import annotations

from ppdiag.model import Kind
from tests.analyzers.factory import ten_and_twenty
from tests.analyzers.symptoms.cases import MEGATRON, found
from tests.analyzers.test_hand_calculations import pipeline, slower


def test_microbatches_that_are_slow_on_all_stages_are_the_datas() -> None:
    symptom = found(pipeline(microbatches=8, duration=slower(9, microbatch=3)).trace(), MEGATRON)["sequence-lengths"]
    # forwards of 10 ms, one of 90: the mean is 20
    assert symptom.evidence[1] == (
        "forwards take 0.50 to 4.50 times their stage's mean; correlation between stages at least 1.00"
    )
    assert "squared lengths" in symptom.advice[0].how


def test_each_stage_with_a_slow_microbatch_of_its_own_is_not() -> None:
    def own(op, rank: int, step: int) -> int:
        return ten_and_twenty(op, rank, step) * (9 if op.microbatch == (3 + 2 * rank + step) % 24 else 1)

    symptoms = found(pipeline("1F1B", microbatches=24, duration=own).trace())
    assert "equal cost" in symptoms["imbalance"].advice[0].action
    assert "sequence-lengths" not in symptoms


def test_a_slow_stage_few_microbatches_and_equal_forwards_are_not() -> None:
    assert "sequence-lengths" not in found(pipeline("1F1B", microbatches=8, duration=slower(2, stage=1)).trace())

    def backward(op, rank: int, step: int) -> int:
        slow = op.kind is Kind.BACKWARD and op.microbatch == 3
        return ten_and_twenty(op, rank, step) * (9 if slow else 1)

    symptoms = found(pipeline(microbatches=8, duration=backward).trace())
    assert "equal cost" in symptoms["imbalance"].advice[0].action
    assert "sequence-lengths" not in symptoms


def test_a_heavy_stage_with_some_uneven_microbatches_is_the_stages() -> None:
    def both(op, rank: int, step: int) -> int:
        return ten_and_twenty(op, rank, step) * (3 if op.stage == 1 else 1) * (2 if op.microbatch == 3 else 1)

    symptoms = found(pipeline("1F1B", microbatches=16, duration=both).trace())
    assert "Move layers" in symptoms["imbalance"].advice[0].action
    assert "sequence-lengths" not in symptoms
