"""Two ranks; rank 0 sends messages 0 (early posted, late ready) and 1 (ready at once). Times in ms of a step of 1 s."""

from __future__ import annotations

from ppdiag.analyzers.symptoms.head_of_line import HOW
from ppdiag.model import Kind
from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import TORCH, evidence, messages, symptom


def two(*, first_ready: int, second_ends: int):
    """Rank 1 posts both receives at 0 and 10; the first's send comes at ``first_ready``, the second's at 20."""
    rows = []
    for tag, received, sent, ends in ((0, 0, first_ready, first_ready), (1, 10, 20, second_ends)):
        ids = {"tag": tag, "seq": 0, "group": 0, "stage": 1}
        post = received * MS
        rows.append(
            ids | {"rank": 1, "kind": Kind.RECV, "peer": 0, "post_ns": post, "start_ns": post, "end_ns": ends * MS}
        )
        post = sent * MS
        rows.append(ids | {"rank": 0, "kind": Kind.SEND, "peer": 1, "post_ns": post, "start_ns": post, "end_ns": post})
    return messages(rows)


def test_a_ready_receive_behind_a_late_message_is_counted_from_its_readiness() -> None:
    # ready at 20, held until 220: 200 of 2 x 1000 ms
    seen = symptom("head-of-line", evidence(trace=two(first_ready=220, second_ends=221)))
    assert seen is not None
    assert seen.evidence == (
        "1 receive that was ready waited behind another: 10.0 % of the ranks' time",
        "most of it on rank 1, receiving from rank 0",
    )
    assert "defers receives" in HOW[TORCH]


def test_messages_that_overtake_each_other_are_not_held() -> None:
    assert symptom("head-of-line", evidence(trace=two(first_ready=220, second_ends=21))) is None


def test_a_message_behind_one_that_was_ready_before_is_not_held() -> None:
    assert symptom("head-of-line", evidence(trace=two(first_ready=15, second_ends=221))) is None


def test_less_than_a_twentieth_is_not_spoken_of() -> None:
    assert symptom("head-of-line", evidence(trace=two(first_ready=100, second_ends=101))) is None
