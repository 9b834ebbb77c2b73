from __future__ import annotations

from ppdiag.model import Kind
from tests.analyzers.factory import MS, ten_and_twenty
from tests.analyzers.symptoms.cases import found
from tests.analyzers.test_hand_calculations import pipeline


def compiling(seconds: int, stages: tuple[int, ...] = (0, 1), *, backward: int = 1):
    def duration(op, rank: int, step: int) -> int:
        first = step == 0 and op.microbatch == 0 and op.kind is Kind.FORWARD and op.stage in stages
        if first:
            return seconds * 1000 * MS
        return ten_and_twenty(op, rank, step) * (backward if op.kind is Kind.BACKWARD else 1)

    return found(pipeline("1F1B", microbatches=4, duration=duration).trace())


def test_first_forwards_that_add_up_along_the_pipeline_are_pointed_out() -> None:
    symptom = compiling(3)["serial-compilation"]
    # each of 3 s instead of 10 ms
    assert symptom.evidence[0] == (
        "first forwards of 2 stages took 6.0 s longer than later ones, one after the other; 3.0 s of it on stage 0"
    )


def test_one_stage_alone_or_no_such_forward_is_not() -> None:
    assert "serial-compilation" not in compiling(3, stages=(1,))
    assert "serial-compilation" not in compiling(3, stages=())


def test_those_of_a_long_recording_are_not() -> None:
    # 2 s beside 5 steps of 5 backwards of 2 s
    assert "serial-compilation" not in compiling(1, backward=100)
