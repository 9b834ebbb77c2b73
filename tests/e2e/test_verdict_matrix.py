"""Planted faults and what is said of them: the rules of the matrix, and a sample of its jobs (``make faults``: all)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.matrix import verdicts
from benchmarks.matrix.cases import FAULTS, SCHEDULES, Answer, cases
from benchmarks.matrix.jobs import Forge, can_shape_links
from ppdiag.diagnosis import ImbalanceSplit, Verdict
from tests.reports.factory import make_undecided

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE = 8
SLOW_LINK = Answer("communication", link=frozenset((1, 2)))


def found(cause: str | None, *, confidence: str = "measured", **place):
    verdict = Verdict(
        cause, **{"stage": None, "link": None, "rank": None, **place}, share=0.2, confidence=confidence, text=""
    )
    return replace(make_undecided(), verdict=verdict, imbalance=ImbalanceSplit(stage=0.1, microbatch=0.2, rank=0.0))


def test_a_seed_gives_the_same_cases_each_under_a_name_of_its_own() -> None:
    once, again = list(cases(1)), list(cases(1))
    assert once == again
    assert once != list(cases(2))
    assert len({case.name for case in once}) == len(once) >= 120


def test_each_fault_is_planted_in_three_schedules() -> None:
    planted = {(case.fault, case.schedule) for case in cases(1)}
    for fault, (_, schedules, _) in FAULTS.items():
        assert len({schedule for name, schedule in planted if name == fault}) == 3
        assert set(schedules) == set(SCHEDULES) or fault == "slow chunk"


@pytest.mark.parametrize(
    ("seen", "right", "score"),
    [
        (found("imbalance", stage=2), Answer("imbalance", stage=2), verdicts.RIGHT),
        (found("imbalance", stage=1), Answer("imbalance", stage=2), verdicts.WRONG),
        (found("imbalance", rank=2), Answer("imbalance", stage=2), verdicts.WRONG),
        (found("imbalance"), Answer("imbalance", stage=2), verdicts.INCOMPLETE),
        (found("imbalance"), Answer("imbalance", part="microbatch"), verdicts.RIGHT),
        (found("imbalance"), Answer("imbalance", part="stage"), verdicts.INCOMPLETE),
        (found("bubble"), Answer("imbalance", stage=2), verdicts.WRONG),
        (found("bubble", confidence="inferred"), Answer("imbalance", stage=2), verdicts.UNSURE),
        (found("bubble", confidence="undecided"), Answer("bubble"), verdicts.UNDECIDED),
        (found("host", rank=3), Answer("host", rank=3), verdicts.RIGHT),
        (found("host", rank=3), Answer("host", rank=3, symptom="data-wait"), verdicts.INCOMPLETE),
        (found(None), Answer(None), verdicts.RIGHT),
        (found("host", rank=0), Answer(None), verdicts.WRONG),
        (found("communication", link=(2, 1)), SLOW_LINK, verdicts.RIGHT),
        (found("communication", link=(5, 6)), SLOW_LINK, verdicts.RIGHT),  # the same two of four ranks
        (found("communication", link=(2, 3)), SLOW_LINK, verdicts.WRONG),
    ],
)
def test_a_verdict_is_right_where_cause_and_place_are(seen, right: Answer, score: str) -> None:
    assert verdicts.score(seen, [right]) == score


@pytest.mark.slow
@pytest.mark.timeout(900)  # a job takes 5 s, and three times as long on a busy machine
def test_verdicts_on_a_sample_of_planted_faults(tmp_path: Path) -> None:
    able = [case for case in cases(1) if can_shape_links() or not case.job.links]
    chosen = random.Random(1).sample(able, SAMPLE)
    forge = Forge()
    try:
        scores = {case: scored for case, scored, _ in verdicts.results(chosen, tmp_path, forge)}
    finally:
        forge.close()
    told = verdicts.table(scores)
    assert len(scores) == SAMPLE, told
    assert list(scores.values()).count(verdicts.RIGHT) >= SAMPLE - 1, told  # 95 % of all: one of eight may be another
    assert verdicts.WRONG not in scores.values(), told
