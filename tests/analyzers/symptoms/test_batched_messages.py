"""Rank 1 waits from 0 to 300 ms for a receive from rank 0 and a message with rank 2, in one batch, in a step of 1 s."""

from __future__ import annotations

from ppdiag.model import Kind
from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import evidence, messages, symptom


def batch(*, other_ready: int, other_peer: int = 2, other_ends: int = 300):
    def ends(rank: int, peer: int, kind: Kind, post: int, end: int, tag: int):
        ids = {"tag": tag, "seq": 0, "group": 0, "stage": rank}
        return ids | {"rank": rank, "kind": kind, "peer": peer, "post_ns": post, "start_ns": post, "end_ns": end}

    rows = [
        ends(1, 0, Kind.RECV, 0, 300 * MS, 0),
        ends(0, 1, Kind.SEND, 0, 0, 0),
        ends(1, other_peer, Kind.SEND, 0, other_ends * MS, 1),
        ends(other_peer, 1, Kind.RECV, other_ready * MS, other_ready * MS, 1),
    ]
    return messages([*rows, ends(2, 0, Kind.SEND, 900 * MS, 900 * MS, 9)])


def test_a_receive_that_waits_for_the_other_neighbour_is_counted() -> None:
    # ready at 0, and rank 2 takes its message at 300: 300 of 3 x 1000 ms
    seen = symptom("batched-messages", evidence(trace=batch(other_ready=300)))
    assert seen is not None
    assert seen.evidence == (
        "1 receive that was ready waited for their batch: 10.0 % of the ranks' time",
        "most of it on rank 1, receiving from rank 0",
    )


def test_another_wait_another_message_of_the_peer_or_a_neighbour_in_time_is_none() -> None:
    assert symptom("batched-messages", evidence(trace=batch(other_ready=300, other_ends=299))) is None
    assert symptom("batched-messages", evidence(trace=batch(other_ready=300, other_peer=0))) is None
    assert symptom("batched-messages", evidence(trace=batch(other_ready=100))) is None
