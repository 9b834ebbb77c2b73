from __future__ import annotations

from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import MEGATRON, found
from tests.analyzers.test_hand_calculations import on_rank, pipeline


def test_host_time_before_every_op_is_met_with_larger_ops_not_with_another_schedule() -> None:
    symptoms = found(pipeline("1F1B", microbatches=8, host_gap=8 * MS).trace(), MEGATRON)
    symptom = symptoms["op-overhead"]
    assert "bubble" not in symptoms
    assert symptom.evidence[0].endswith("of the step, of no single rank")
    assert symptom.evidence[1].endswith("of it before each op; a forward takes 10.00 ms")
    assert "--cuda-graph-impl local" in symptom.advice[0].how
    assert symptom.advice[0].gain_fraction is not None


def test_one_late_rank_and_pauses_between_steps_are_no_overhead_of_ops() -> None:
    assert "op-overhead" not in found(pipeline(between=on_rank(0, 60)).trace())
    assert "op-overhead" not in found(pipeline(between=lambda _rank, _step: 60 * MS, tail=0, tail_of_all=True).trace())


def test_gaps_on_one_rank_are_that_ranks() -> None:
    def gap(_op, rank: int, _step: int) -> int:
        return 30 * MS if rank == 0 else 0

    symptoms = found(pipeline("1F1B", microbatches=8, host_gap=gap).trace())
    assert "host-stall" in symptoms
    assert "op-overhead" not in symptoms
