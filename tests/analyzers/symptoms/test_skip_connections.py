from __future__ import annotations

from dataclasses import replace

import pytest

from ppdiag.diagnosis import LinkResult
from tests.analyzers.symptoms.cases import evidence, hung, symptom, wait
from tests.analyzers.test_hand_calculations import pipeline
from tests.reports.factory import make_diagnosis


def links(*pairs: tuple[int, int]):
    return replace(make_diagnosis(), links=tuple(LinkResult(a, b, "forward", 1024, 0.001, None) for a, b in pairs))


def standing():
    return hung(pipeline("1F1B", ranks=3, microbatches=3).trace(), {2: wait(0)})


def test_a_hang_with_messages_that_skip_a_stage_is_known() -> None:
    seen = symptom("skip-connections", evidence(links((0, 1), (0, 2)), standing()))
    assert seen is not None
    assert seen.evidence == ("messages go from stage 0 to 2", "ranks 2 wait for a message")


@pytest.mark.parametrize(
    "of",
    [
        lambda: evidence(links((0, 1), (1, 0)), standing()),
        lambda: evidence(links((0, 1), (0, 2)), pipeline("1F1B", ranks=3, microbatches=3).trace()),
    ],
    ids=["neighbours", "no hang"],
)
def test_neighbours_and_jobs_that_run_are_not(of) -> None:
    assert symptom("skip-connections", of()) is None
