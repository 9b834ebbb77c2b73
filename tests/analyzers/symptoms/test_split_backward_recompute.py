from __future__ import annotations

import pytest

from tests.analyzers.symptoms.cases import TORCH, found, told
from tests.analyzers.test_hand_calculations import pipeline

FULL = ("--activation_checkpoint.mode=full",)


def split():
    return pipeline("InterleavedZeroBubble", microbatches=4, chunks=2).trace()


def test_a_split_backward_with_recomputation_is_pointed_out() -> None:
    symptom = found(told(split(), *FULL), TORCH)["split-backward-recompute"]
    assert symptom.evidence[0] == (
        "schedule InterleavedZeroBubble, and --activation-checkpoint.mode full among the arguments"
    )
    assert symptom.evidence[1].startswith("stage 0: F 10.0 ms, B ")
    assert "ScheduleInterleaved1F1B" in symptom.advice[0].how


@pytest.mark.parametrize(
    "trace",
    [
        told(split()),
        told(split(), "--activation_checkpoint.mode=none"),
        told(pipeline("Interleaved1F1B", microbatches=4, chunks=2).trace(), *FULL),
    ],
    ids=["not said", "none", "a whole backward"],
)
def test_either_alone_is_not(trace) -> None:
    assert "split-backward-recompute" not in found(trace, TORCH)
