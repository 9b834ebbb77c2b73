from __future__ import annotations

from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import found
from tests.analyzers.test_hand_calculations import pipeline, slower


def connecting(first_ms: int, later_ms: int = 1, *, slowness: int = 1):
    seen: set[tuple[int, int]] = set()

    def transfer(source: int, destination: int) -> int:
        new = (source, destination) not in seen
        seen.add((source, destination))
        return (first_ms if new else later_ms) * MS

    return found(pipeline("1F1B", microbatches=4, transfer=transfer, duration=slower(slowness)).trace())


def test_slow_first_messages_are_pointed_out_with_the_later_ones() -> None:
    symptom = connecting(400)["first-messages"]
    assert symptom.severity == "info"
    assert symptom.evidence[0].startswith("the first message from rank ")
    assert symptom.evidence[0].endswith("took 400 ms, later ones 1.00 ms (median)")
    assert symptom.evidence[1].startswith("first messages of 2 pairs: 0.8 s in all")


def test_first_messages_like_the_others_or_short_ones_are_not() -> None:
    assert "first-messages" not in connecting(90)
    assert "first-messages" not in connecting(200, later_ms=100)


def test_those_of_a_long_recording_are_not() -> None:
    # 2 x 110 ms beside 5 steps of 5 x 300 ms
    assert "first-messages" not in connecting(110, slowness=10)
