"""No symptom of a cause speaks where the verdict is undecided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppdiag.diagnosis import ImbalanceSplit, Verdict, Why
from tests.analyzers.symptoms.cases import DEEPSPEED, evidence, symptom, told
from tests.analyzers.test_hand_calculations import pipeline
from tests.reports.factory import make_diagnosis


@pytest.mark.parametrize(
    ("name", "cause", "framework"),
    [
        ("heavy-ends", "imbalance", ""),
        ("mtp-on-last-stage", "imbalance", ""),
        ("uneven-partition", "imbalance", DEEPSPEED),
        ("sequence-lengths", "imbalance", ""),
        ("few-microbatches", "bubble", ""),
        ("op-overhead", "host", ""),
        ("bubble", "bubble", ""),
        ("imbalance", "imbalance", ""),
        ("host-stall", "host", ""),
        ("slow-network", "communication", ""),
        ("direct-path-through-cpu", "communication", ""),
    ],
)
def test_an_undecided_verdict_is_no_ground_for_advice(name: str, cause: str, framework: str) -> None:
    diagnosis = make_diagnosis(heavy={3: 2.0})
    verdict = Verdict(cause, 3 if cause == "imbalance" else None, None, None, 0.3, "undecided", "")
    split = ImbalanceSplit(microbatch=0.3) if name == "sequence-lengths" else ImbalanceSplit(stage=0.3)
    diagnosis = replace(diagnosis, verdict=verdict, why=Why(**{cause: 0.3}), imbalance=split)
    diagnosis = replace(diagnosis, job=replace(diagnosis.job, framework=framework, microbatches=2))
    trace = told(pipeline().trace(), "--mtp-num-layers", "1" if name.startswith("mtp") else "0")
    assert symptom(name, evidence(diagnosis, trace)) is None
