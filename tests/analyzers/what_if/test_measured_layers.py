"""Layers as recorded: their shares of the stages, where they are told, and what no recorder writes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import analyse
from ppdiag.analyzers.what_if import Change, Run, predict, run_of
from ppdiag.analyzers.what_if.measured_layers import EQUAL, MEASURED, known_layers, measured_layers
from ppdiag.analyzers.what_if.survey import best_layers, single_changes
from ppdiag.errors import BadShape
from ppdiag.model import Kind
from tests.analyzers.factory import MS, Pipeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.analyzers.schedules import Op

SLOW = ((1.0, 1.0), (3.0, 1.0), (1.0, 1.0), (1.0, 1.0))
"""Layers of four stages, in units of 1 ms F and 2 ms B: the third takes three times as long as the others."""


def row(stage: int, units: Sequence[float], *, rest: float = 0.0, **changes: Any) -> dict[str, Any]:
    """What a rank records of a stage's layers; ``rest`` is what is no layer."""
    made = {"stage": stage, "chunk": 0, "names": [f"layers.{i}" for i in range(len(units))]}
    made |= {"forward_s": [unit / 1e3 for unit in units], "forward_rest_s": rest / 1e3}
    made |= {"backward_s": [2 * unit / 1e3 for unit in units], "backward_rest_s": 2 * rest / 1e3}
    return made | changes


def run_with(rows: Sequence[Sequence[dict[str, Any]]], units: Sequence[float] = (2, 4, 2, 2)) -> Run:
    """1F1B of 8 microbatches over stages of so many units, one a rank, with these facts."""

    def duration(op: Op, _rank: int, _step: int) -> int:
        return round(units[op.stage] * (1 if op.kind is Kind.FORWARD else 2) * MS)

    orders = schedules.order("1F1B", ranks=len(units), chunks=1, microbatches=8)
    trace = Pipeline(orders, range(len(units)), duration=duration).trace()
    ranks = {rank: replace(known, facts={**known.facts, "layers": list(rows[rank])}) for rank, known in
             trace.ranks.items()}  # fmt: skip
    return run_of(analyse(replace(trace, ranks=ranks)))


def recorded() -> Run:
    return run_with([[row(stage, units)] for stage, units in enumerate(SLOW)])


def test_the_slow_layer_is_left_alone_on_its_stage() -> None:
    # 2 + 4 + 2 + 2 units: no split has a longest stage below the slow layer's 3; 2,1,3,2 has 2,3,3,2
    change = best_layers(recorded())
    assert (change.layers, change.layers_now) == ((2, 1, 3, 2), (2, 2, 2, 2))
    found = predict(recorded(), change)
    assert found.layer_times == MEASURED
    assert found.gain > 0.1


def test_where_one_stage_has_no_record_the_layers_take_equal_shares() -> None:
    rows = [[row(stage, units)] for stage, units in enumerate(SLOW)]
    run = run_with([*rows[:3], []])
    assert known_layers(run, given=(2, 2, 2, 2)).source == EQUAL
    assert predict(run, Change(layers=(2, 1, 3, 2), layers_now=(2, 2, 2, 2))).layer_times == EQUAL


def test_a_survey_has_the_split_where_the_record_has_the_layers() -> None:
    assert Change(layers=(2, 1, 3, 2), layers_now=(2, 2, 2, 2)) in single_changes(recorded())


def test_what_is_no_layer_stays_on_the_first_and_the_last_stage() -> None:
    rows = [[row(0, [1, 1], rest=1)], [row(1, [1, 1], rest=1)], [row(2, [1, 1], rest=2)]]
    known = known_layers(run_with(rows, units=(3, 3, 4)))
    stage_S = np.array([9.0, 9.0, 12.0])
    times = known.times(stage_S)
    assert (times.before, times.after) == pytest.approx((3.0, 6.0))
    assert times.layer_L == pytest.approx([3.0, 3.0, 4.5, 4.5, 3.0, 3.0])
    assert times.of((2, 2, 2)) == pytest.approx(stage_S)


def test_where_one_rank_saw_no_backward_the_forwards_tell_the_shares() -> None:
    blind = row(1, [3.0, 1.0], backward_s=None, backward_rest_s=None)
    rows = [[row(0, [1, 1])], [blind], [row(2, [1, 1])], [row(3, [1, 1])]]
    assert best_layers(run_with(rows)).layers == (2, 1, 3, 2)


def test_a_stage_without_a_label_is_found_by_its_chunk() -> None:
    rows = [[row(-1, units)] for units in SLOW]
    assert known_layers(run_with(rows)).counts == (2, 2, 2, 2)


def test_numbers_given_against_the_record_are_taken_in_equal_shares() -> None:
    known = known_layers(recorded(), given=(4, 4, 4, 4))
    assert (known.counts, known.source) == ((4, 4, 4, 4), EQUAL)


def test_a_split_of_another_number_of_layers_is_refused() -> None:
    with pytest.raises(BadShape, match="the record has layers 2,2,2,2, 8 of them, and the split 12"):
        predict(recorded(), Change(layers=(3, 3, 3, 3)))


def test_without_a_record_the_number_of_layers_must_be_given() -> None:
    with pytest.raises(BadShape, match="--layers-now"):
        best_layers(run_with([[], [], [], []]))


@pytest.mark.parametrize(
    "bad",
    [
        "layers",
        {},
        {**row(1, [3, 1]), "stage": "1"},
        row(7, [3, 1]),
        row(1, [3, 1], chunk=None),
        row(1, [3, 1], forward_s=[]),
        row(1, [3, 1], forward_s=["x", 1]),
        row(1, [3, 1], forward_s=[float("nan"), 1]),
        row(1, [3, 1], forward_s=[-1, 1]),
        row(1, [3, 1], backward_s=[1]),
        row(1, [3, 1], forward_rest_s=None),
        row(1, [1] * 5000),
    ],
    ids=lambda bad: str(bad)[:40],
)
def test_what_no_recorder_writes_is_no_record(bad: Any) -> None:
    run = run_with([[row(0, [1, 1])], [bad], [row(2, [1, 1])], [row(3, [1, 1])]])
    assert measured_layers(run.trace, run.shape) is None


def test_stages_cut_in_two_take_the_layers_that_lie_on_them() -> None:
    # eight stages of one layer: the slow one is a stage of its own, of 3 of its stage's 4 units
    measured = measured_layers(recorded().trace, recorded().shape)
    assert measured is not None
    parts = [part for own in measured.mix(8) or () for part in own]
    assert [stage for stage, _ in parts] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [share for _, share in parts] == pytest.approx([0.5, 0.5, 0.75, 0.25, 0.5, 0.5, 0.5, 0.5])
    assert measured.mix(4) == [[(stage, 1.0)] for stage in range(4)]
    assert measured.mix(9) is None
    cut = Change(schedule="interleaved", chunks=2)
    equal = predict(run_with([[], [], [], []]), cut)
    assert predict(recorded(), cut).step_s > equal.step_s


def test_equal_layers_are_cut_as_without_a_record() -> None:
    even = [[row(stage, [1.0, 1.0])] for stage in range(4)]
    for change in (Change(schedule="interleaved", chunks=2), Change(schedule="zb-v")):
        without = predict(run_with([[], [], [], []], units=(2, 2, 2, 2)), change).step_s
        assert predict(run_with(even, units=(2, 2, 2, 2)), change).step_s == pytest.approx(without)
