from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ppdiag.hooks.collectives import Marks, Wait, describe
from ppdiag.hooks.device import HostSpan
from ppdiag.hooks.recorder import RECORDER, compute_tail
from ppdiag.model import NONE, SPAN_FIELDS, Collective, Flag, Kind

if TYPE_CHECKING:
    import pytest

FLAGS_AT = [name for name, _, _ in SPAN_FIELDS].index("flags")
NAMES = [name for name, _, _ in SPAN_FIELDS][2:]
GROUP: Any = SimpleNamespace(index=3, collectives=itertools.count(), global_rank=lambda rank: 10 + rank)


class Tensor:
    nbytes = 64


def told(op: Collective, *args: object) -> dict[str, int]:
    return dict(zip(NAMES, describe(GROUP, op, ("the group", *args)), strict=True))


def test_the_bytes_of_a_collective_are_those_of_all_tensors_of_its_first_argument() -> None:
    found = told(Collective.ALL_GATHER, [[Tensor(), Tensor()], [Tensor()]], [Tensor()])
    assert (found["kind"], found["op"]) == (Kind.COLLECTIVE, Collective.ALL_GATHER)
    assert (found["size_bytes"], found["group"], found["peer"]) == (3 * 64, 3, NONE)


def test_the_peer_of_a_rooted_collective_is_its_root_among_all_ranks() -> None:
    assert told(Collective.BROADCAST, [Tensor()], SimpleNamespace(rootRank=1))["peer"] == 11


def test_collectives_of_a_group_are_counted_and_may_have_no_tensor() -> None:
    first, second = told(Collective.BARRIER), told(Collective.BARRIER)
    assert second["seq"] == first["seq"] + 1
    assert first["size_bytes"] == 0


class Instruments:
    """Says what it is asked to do."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def begin(self, _tail: object) -> str:
        return "begin"

    def leave(self, _tail: object) -> str:
        return "end"

    def drop(self, mark: object) -> None:
        self.said.append(mark)

    def keep(self, *marks: object) -> None:
        self.said.append(marks)

    def end(self, mark: object, span: HostSpan) -> None:
        self.said.append((mark, span.tails))


def test_moments_around_a_post_are_recorded_or_given_back() -> None:
    tail = compute_tail(Kind.COLLECTIVE, 1, (NONE, NONE, NONE), 0)
    span = HostSpan(1, 2, (tail,))
    for finish, said in (("keep", [("begin", "end", span)]), ("drop", ["begin", "end"])):
        instruments: Any = Instruments()
        marks = Marks(instruments, tail)
        marks.leave()
        getattr(marks, finish)(*([span] if finish == "keep" else []))
        assert instruments.said == said


def test_a_wait_lies_between_two_moments_of_the_device_and_of_one_that_raised_none_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tails = (compute_tail(Kind.COLLECTIVE, 1, (NONE, NONE, NONE), 0),) * 2
    for finish, said, spans in (("end", [("begin", tails)], 0), ("fail", ["begin", "end"], 2)):
        instruments: Any = Instruments()
        monkeypatch.setattr(RECORDER, "instruments", instruments)
        wait = Wait(tails)
        assert RECORDER.inside == tails[0]
        getattr(wait, finish)()
        assert RECORDER.inside is None
        assert instruments.said == said
        assert [span[FLAGS_AT] for span in RECORDER.spans] == [Flag.FAILED] * spans
    RECORDER.spans.clear()
