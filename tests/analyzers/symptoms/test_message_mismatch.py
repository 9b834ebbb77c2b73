from __future__ import annotations

import pytest

from tests.analyzers.symptoms.cases import found, hung, wait
from tests.analyzers.test_hand_calculations import pipeline


def test_both_ends_of_a_message_of_two_sizes_are_named() -> None:
    waits = {0: wait(1, is_send=True, size_bytes=4096), 1: wait(0, size_bytes=2048)}
    symptom = found(hung(pipeline().trace(), waits))["message-mismatch"]
    assert symptom.evidence == ("message 3 from rank 0 to rank 1: 4096 bytes sent, 2048 bytes expected",)


@pytest.mark.parametrize(
    "waits",
    [
        {0: wait(1, is_send=True), 1: wait(0)},
        {0: wait(1, is_send=True, size_bytes=4096), 1: wait(0, size_bytes=2048, seq=4)},
        {0: wait(1, is_send=True, size_bytes=4096), 1: wait(0, size_bytes=2048, tag=7)},
        {0: wait(1, is_send=True, size_bytes=4096), 1: wait(0, is_send=True, size_bytes=2048)},
    ],
    ids=["one size", "another message", "another tag", "two sends"],
)
def test_other_pairs_of_waits_are_no_mismatch(waits) -> None:
    assert "message-mismatch" not in found(hung(pipeline().trace(), waits))
