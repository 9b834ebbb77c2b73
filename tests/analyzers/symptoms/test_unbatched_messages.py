from __future__ import annotations

import pytest

from tests.analyzers.symptoms.cases import MEGATRON, TORCH, found, hung, told, wait
from tests.analyzers.test_hand_calculations import pipeline

CYCLE = {0: wait(1, is_send=True), 1: wait(0)}


def interleaved():
    return pipeline("Interleaved1F1B", microbatches=2, chunks=2).trace()


def test_a_hang_of_an_interleaved_megatron_job_is_met_with_batched_messages() -> None:
    symptom = found(hung(told(interleaved()), CYCLE), MEGATRON)["unbatched-messages"]
    assert symptom.severity == "critical"
    assert symptom.evidence[0] == "ranks 0, 1 wait for a message, 1 of them for their own send"
    assert symptom.evidence[1].startswith("interleaved with V=2")
    assert symptom.advice[0].how == "--no-overlap-p2p-communication"


@pytest.mark.parametrize(
    ("trace", "framework"),
    [
        (hung(told(interleaved(), "--no-overlap-p2p-communication"), CYCLE), MEGATRON),
        (hung(told(interleaved()), CYCLE), TORCH),
        (hung(told(pipeline("1F1B").trace()), CYCLE), MEGATRON),
        (told(interleaved()), MEGATRON),
    ],
    ids=["batched", "another framework", "not interleaved", "no hang"],
)
def test_other_jobs_are_not(trace, framework) -> None:
    assert "unbatched-messages" not in found(trace, framework)
