from __future__ import annotations

import pytest

from tests.analyzers.symptoms.cases import found, hung, wait
from tests.analyzers.test_hand_calculations import pipeline


def three():
    return pipeline("1F1B", ranks=3, microbatches=3).trace()


def test_two_ranks_that_both_send_first_are_named() -> None:
    waits = {1: wait(2, is_send=True), 2: wait(1, is_send=True, size_bytes=8)}
    symptom = found(hung(three(), waits))["facing-sends"]
    assert symptom.evidence == (
        "rank 1 waits for its send of 1024 bytes to rank 2",
        "rank 2 waits for its send of 8 bytes to rank 1",
    )
    assert "batch_isend_irecv" in symptom.advice[0].how


@pytest.mark.parametrize(
    "waits",
    [{1: wait(2, is_send=True), 2: wait(1)}, {1: wait(2, is_send=True)}, {}],
    ids=["a send and a receive", "no cycle", "no hang"],
)
def test_other_waits_do_not_face_each_other(waits) -> None:
    assert "facing-sends" not in found(hung(three(), waits))
