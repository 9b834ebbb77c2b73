from __future__ import annotations

from dataclasses import replace

import pytest

from tests.analyzers.symptoms.cases import MEGATRON, found
from tests.analyzers.test_hand_calculations import pipeline


def holding(*gib: float | None):
    trace = pipeline("1F1B", ranks=len(gib), microbatches=8).trace()
    ranks = dict(trace.ranks)
    for rank, size in enumerate(gib):
        if size is not None:
            ranks[rank] = replace(ranks[rank], facts={"peak_memory_bytes": int(size * 2**30)})
    return found(replace(trace, ranks=ranks), MEGATRON)


def test_the_fullest_and_the_emptiest_stage_are_named() -> None:
    symptom = holding(60, 40, 30)["uneven-memory"]
    assert symptom.evidence == ("stage 0 holds up to 60.0 GiB, stage 2 30.0 GiB", "schedule 1F1B, P=3, V=1, M=8")
    assert symptom.advice[0].action == "Let stage 0 hold less"


@pytest.mark.parametrize("gib", [(40, 38, 36), (3, 2, 1), (None, None), (60, None)])
def test_even_small_or_unknown_memory_is_not_spoken_of(gib: tuple[float | None, ...]) -> None:
    assert "uneven-memory" not in holding(*gib)
