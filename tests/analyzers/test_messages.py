"""Who sent what to whom: the rule of pairs, and what is left unpaired."""

from __future__ import annotations

import numpy as np

from ppdiag.analyzers.messages import MISSING, match
from ppdiag.model import Kind
from tests.analyzers.factory import spans_of, trace_of


def message(kind: Kind, rank: int, peer: int, seq: int, at: int, **others: int) -> dict[str, int]:
    return {"kind": kind, "rank": rank, "peer": peer, "seq": seq, "start_ns": at, "end_ns": at, "group": 0, **others}


def partners(rows: list[dict[str, int]]) -> dict[int, int | None]:
    """Start of each message -> start of its partner."""
    trace = trace_of(spans_of(rows))
    starts, found = trace.spans["start_ns"], match(trace).partner
    return {int(starts[i]): None if p == MISSING else int(starts[p]) for i, p in enumerate(found)}


def test_the_nth_send_meets_the_nth_receive_of_its_pair_group_and_tag() -> None:
    rows = [message(Kind.SEND, 0, 1, seq, 10 + seq) for seq in (0, 1)]
    rows += [message(Kind.RECV, 1, 0, seq, 20 + seq) for seq in (0, 1)]
    rows += [message(Kind.SEND, 1, 0, 0, 30), message(Kind.RECV, 0, 1, 0, 31)]
    rows += [message(Kind.SEND, 0, 1, 0, 40, tag=7), message(Kind.RECV, 1, 0, 0, 41, tag=7)]
    rows += [message(Kind.SEND, 0, 1, 0, 50, group=1), message(Kind.RECV, 1, 0, 0, 51, group=1)]
    pairs = {10: 20, 11: 21, 30: 31, 40: 41, 50: 51}
    assert partners(rows) == {**pairs, **{b: a for a, b in pairs.items()}}


def test_a_message_without_its_other_end_has_no_partner() -> None:
    rows = [message(Kind.SEND, 0, 1, 0, 10), message(Kind.RECV, 1, 0, 1, 20), message(Kind.RECV, 2, 0, 0, 30)]
    assert partners(rows) == {10: None, 20: None, 30: None}


def test_of_two_sends_of_one_number_the_first_is_taken() -> None:
    rows = [message(Kind.SEND, 0, 1, 0, at) for at in (10, 11)] + [message(Kind.RECV, 1, 0, 0, 20)]
    assert partners(rows)[20] == 10


def test_a_collective_is_that_of_its_group_and_number() -> None:
    rows = [
        {"kind": Kind.COLLECTIVE, "rank": rank, "group": group, "seq": seq, "start_ns": seq, "end_ns": seq}
        for rank in (0, 1)
        for group in (-1, 0, 1, 2)
        for seq in (0, 1)
    ]
    trace = trace_of(spans_of(rows), [(0, 1), (0, 1)])
    number, spans = match(trace).collective, trace.spans
    known = np.isin(spans["group"], (0, 1))  # a lost line of the record leaves a group without a name
    assert (number[~known] == MISSING).all()
    assert len(np.unique(number[known])) == 4
    for one in np.unique(number[known]):
        members = spans[number == one]
        assert sorted(members["rank"].tolist()) == [0, 1]
        assert len(np.unique(members["group"])) == len(np.unique(members["seq"])) == 1
