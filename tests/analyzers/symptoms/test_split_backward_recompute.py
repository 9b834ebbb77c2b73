from __future__ import annotations

import pytest

from ppdiag.model import Kind
from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import TORCH, found, told
from tests.analyzers.test_hand_calculations import pipeline

FULL = ("--activation_checkpoint.mode=full",)


def split(backward_ms: int = 10):
    """F of 10 ms, and B and W of this time each."""

    def duration(op, _rank: int, _step: int) -> int:
        return (10 if op.kind is Kind.FORWARD else backward_ms) * MS

    return pipeline("InterleavedZeroBubble", microbatches=4, chunks=2, duration=duration).trace()


def test_a_split_backward_with_recomputation_is_pointed_out() -> None:
    symptom = found(told(split(), *FULL), TORCH)["split-backward-recompute"]
    assert symptom.evidence[0] == (
        "schedule InterleavedZeroBubble, and --activation-checkpoint.mode full among the arguments"
    )
    assert symptom.evidence[1].startswith("stage 0: F 10.0 ms, B ")
    assert "ScheduleInterleaved1F1B" in symptom.advice[0].how


def test_times_say_it_where_the_arguments_do_not() -> None:
    symptom = found(split(20), TORCH)["split-backward-recompute"]
    assert symptom.evidence[0] == "schedule InterleavedZeroBubble, and B and W take 4.0 forwards or more"


@pytest.mark.parametrize(
    "trace",
    [
        told(split()),
        split(15),
        told(split(), "--activation_checkpoint.mode=none"),
        told(pipeline("Interleaved1F1B", microbatches=4, chunks=2).trace(), *FULL),
    ],
    ids=["not said", "one forward again", "none", "a whole backward"],
)
def test_either_alone_is_not(trace) -> None:
    assert "split-backward-recompute" not in found(trace, TORCH)
