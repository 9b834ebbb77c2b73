from __future__ import annotations

import pytest

from tests.analyzers.symptoms.cases import found, hung, wait
from tests.analyzers.test_hand_calculations import pipeline


def test_both_ends_of_a_message_of_two_sizes_are_named() -> None:
    waits = {0: wait(1, is_send=True, size_bytes=4096), 1: wait(0, size_bytes=2048)}
    symptom = found(hung(pipeline().trace(), waits))["message-mismatch"]
    assert symptom.evidence == ("message 3 from rank 0 to rank 1: 4096 bytes sent, 2048 bytes expected",)


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        (wait(0, size_bytes=28, seq=0), "message 0 (tag 0, 28 bytes)"),
        (wait(0, tag=7), "message 3 (tag 7, 1024 bytes)"),
    ],
    ids=["another message", "another tag"],
)
def test_a_receiver_that_expects_another_message_is_named(expected, words: str) -> None:
    symptom = found(hung(pipeline().trace(), {0: wait(1, is_send=True), 1: expected}))["message-mismatch"]
    assert symptom.evidence == (f"rank 0 sends message 3 (tag 0, 1024 bytes), and rank 1 waits for {words}",)


@pytest.mark.parametrize(
    "waits",
    [
        {0: wait(1, is_send=True), 1: wait(0)},
        {0: wait(1, is_send=True, size_bytes=4096), 1: wait(0, is_send=True, size_bytes=2048)},
    ],
    ids=["one size", "two sends"],
)
def test_other_pairs_of_waits_are_no_mismatch(waits) -> None:
    assert "message-mismatch" not in found(hung(pipeline().trace(), waits))
