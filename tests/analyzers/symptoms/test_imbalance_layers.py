"""Where the record has the layers, the advice against imbalance names the split."""

from __future__ import annotations

from ppdiag.analyzers.diagnose import diagnose
from tests.analyzers.what_if.test_measured_layers import SLOW, recorded, row, run_with


def test_the_split_is_named_with_the_layer_that_is_moved() -> None:
    (symptom,) = [one for one in diagnose(recorded().trace).symptoms if one.id == "imbalance"]
    assert symptom.advice[0].action == "Split the layers 2,1,3,2 instead of 2,2,2,2"
    assert symptom.advice[0].gain_fraction is not None
    assert symptom.advice[0].gain_fraction > 0.1
    # 3 + 6 ms, and the median layer takes 1 + 2; it is the third of all
    assert symptom.evidence[-1] == "layer 2 (layers.0) takes 9.0 ms of each microbatch, 3.0 times the median layer"


def test_without_all_layers_the_slow_stage_is_named_and_how_to_record_them() -> None:
    rows = [[row(stage, units)] for stage, units in enumerate(SLOW)]
    (symptom,) = [one for one in diagnose(run_with([*rows[:3], []]).trace).symptoms if one.id == "imbalance"]
    assert symptom.advice[0].action == "Move layers off stage 1, by measured time"
    assert "--layer-times" in symptom.advice[0].how


def test_a_split_that_gains_nothing_is_not_advised() -> None:
    # one layer a stage: there is nothing to move
    run = run_with([[row(stage, [units])] for stage, units in enumerate((2, 4, 2, 2))])
    (symptom,) = [one for one in diagnose(run.trace).symptoms if one.id == "imbalance"]
    assert "Move layers off stage 1" in symptom.advice[0].action


def test_a_stage_of_which_all_layers_are_slow_may_have_a_slow_device() -> None:
    units = ((1.0, 1.0), (2.0, 2.0), (1.0, 1.0), (1.0, 1.0))
    run = run_with([[row(stage, own)] for stage, own in enumerate(units)])
    (symptom,) = [one for one in diagnose(run.trace).symptoms if one.id == "imbalance"]
    assert symptom.evidence[-1] == (
        "all 2 layers of stage 1 take 2.0 times the median layer or more: is its device slow, or are they heavier?"
    )
