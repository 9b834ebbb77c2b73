"""No symptom of a cause speaks where the verdict is undecided, or is another one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ppdiag.analyzers.diagnose import analyse, explain
from ppdiag.analyzers.symptoms import Evidence
from ppdiag.diagnosis import Cause
from tests.analyzers.factory import MS
from tests.analyzers.symptoms.cases import DEEPSPEED, symptom, told
from tests.analyzers.test_hand_calculations import on_rank, pipeline, slower

if TYPE_CHECKING:
    from tests.analyzers.factory import Pipeline


def heavy(stage: int = 3) -> Pipeline:
    return pipeline("1F1B", ranks=4, microbatches=16, duration=slower(2, stage=stage))


RUNS = {
    "bubble": pipeline(),
    "few-microbatches": pipeline(ranks=4, microbatches=2),
    "imbalance": heavy(),
    "heavy-ends": heavy(),
    "mtp-on-last-stage": heavy(),
    "uneven-partition": heavy(1),
    "sequence-lengths": pipeline(microbatches=8, duration=slower(9, microbatch=3)),
    "host-stall": pipeline(between=on_rank(0, 60)),
    "op-overhead": pipeline("1F1B", microbatches=8, host_gap=8 * MS),
    "slow-network": pipeline("1F1B", microbatches=8, transfer=lambda _a, _b: 40 * MS),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_undecided_or_other_verdict_is_no_ground_for_advice(name: str) -> None:
    trace = told(RUNS[name].trace(), "--mtp-num-layers", "1" if name.startswith("mtp") else "0")
    framework = DEEPSPEED if name == "uneven-partition" else ""
    analysis = analyse(replace(trace, job=replace(trace.job, framework=framework)))
    diagnosis = explain(analysis)
    verdict = diagnosis.verdict
    other = Cause.HOST if verdict.cause == Cause.BUBBLE else Cause.BUBBLE

    def seen(**changes: object) -> bool:
        changed = replace(diagnosis, verdict=replace(verdict, **changes))  # type: ignore[arg-type]
        return symptom(name, Evidence(changed, analysis, gains=dict.fromkeys(Cause, 0.2))) is not None

    assert seen()
    assert not seen(confidence="undecided")
    assert not seen(cause=other.value)
