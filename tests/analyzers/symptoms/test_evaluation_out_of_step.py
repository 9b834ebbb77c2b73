from __future__ import annotations

from ppdiag.model import Flag, Kind
from tests.analyzers.symptoms.cases import evidence, hung, messages, symptom, wait


def ops(*, evaluating: tuple[int, ...]):
    rows = []
    for rank in range(3):
        rows.append({"rank": rank, "kind": Kind.FORWARD, "stage": rank, "start_ns": 1, "end_ns": 2})
        flags = Flag.EVALUATION if rank in evaluating else 0
        rows.append({"rank": rank, "kind": Kind.FORWARD, "stage": rank, "start_ns": 3, "end_ns": 4, "flags": flags})
    return messages(rows)


def standing(*, evaluating: tuple[int, ...]):
    return hung(ops(evaluating=evaluating), {2: wait(1)})


def test_ranks_that_hang_in_different_modes_are_named() -> None:
    seen = symptom("evaluation-out-of-step", evidence(trace=standing(evaluating=(0,))))
    assert seen is not None
    assert seen.evidence == (
        "the last op of ranks 0 was an evaluation's",
        "the last op of ranks 1, 2 was a training step's",
    )


def test_a_hang_in_one_mode_is_another_symptom() -> None:
    assert symptom("evaluation-out-of-step", evidence(trace=standing(evaluating=()))) is None
    assert symptom("evaluation-out-of-step", evidence(trace=standing(evaluating=(0, 1, 2)))) is None


def test_a_job_that_runs_may_be_in_both() -> None:
    assert symptom("evaluation-out-of-step", evidence(trace=ops(evaluating=(0,)))) is None
