from __future__ import annotations

import pytest

from ppdiag.model import Kind
from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import MEGATRON, found, told
from tests.analyzers.test_hand_calculations import pipeline


def test_a_second_forward_is_worth_what_a_replay_without_it_saves() -> None:
    # P = M = 2: 3 (F + B) + 1 = 91 ms; with B = 20 - 10 it is 61
    symptom = found(told(pipeline().trace(), "--recompute-granularity", "full"), MEGATRON)["full-recompute"]
    assert symptom.evidence[0] == "--recompute-granularity full is among the arguments"
    assert symptom.evidence[1] == "F 10.0 ms, B 20.0 ms on average: a second forward is up to 50.0 % of each backward"
    assert symptom.advice[0].gain_fraction == pytest.approx(30 / 91)
    assert "selective" in symptom.advice[0].how


def test_the_fullest_stage_is_said_where_it_is_known() -> None:
    trace = told(pipeline().trace(), "--activation_checkpoint.mode", "full", peak_memory_bytes=30 << 30)
    assert found(trace)["full-recompute"].evidence[1].endswith("the fullest stage holds 30.0 GiB")


@pytest.mark.parametrize("arguments", [(), ("--recompute-granularity", "selective"), ("--recompute-granularity",)])
def test_without_the_argument_nothing_is_said(arguments: tuple[str, ...]) -> None:
    assert "full-recompute" not in found(told(pipeline().trace(), *arguments), MEGATRON)


def test_a_forward_that_costs_next_to_nothing_is_not_spoken_of() -> None:
    def duration(op, _rank: int, _step: int) -> int:
        return MS if op.kind is Kind.FORWARD else 100 * MS

    trace = told(pipeline(duration=duration).trace(), "--recompute-granularity", "full")
    assert "full-recompute" not in found(trace, MEGATRON)
