from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from ppdiag.conditions import QUANTITIES, Condition, parse_condition
from ppdiag.diagnosis import Why
from ppdiag.errors import BadCondition

if TYPE_CHECKING:
    from ppdiag.diagnosis import Diagnosis


WHY = Why(bubble=0.2, imbalance=0.15, communication=0.1, host=0.04, unexplained=0.01)
# As much of a diagnosis as conditions look at.
DIAGNOSIS = cast("Diagnosis", SimpleNamespace(idle_fraction=0.5, why=WHY, steps=SimpleNamespace(median_s=2.0)))


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("idle>0.3", Condition("idle", ">", 0.3)),
        (" bubble >= 25 % ", Condition("bubble", ">=", 0.25)),
        ("step_s<1e-1", Condition("step_s", "<", 0.1)),
        ("host<=.5", Condition("host", "<=", 0.5)),
    ],
)
def test_a_condition_is_read(text, condition):
    assert parse_condition(text) == condition


@pytest.mark.parametrize(
    "text", ["", "idle", "idle>", "idle=0.3", "idle>x", "idle>1.2.3", "idel>1", "step_s>3%", "idle>-1"]
)
def test_a_condition_that_is_none_names_the_quantities(text):
    with pytest.raises(BadCondition, match="idle, bubble, imbalance"):
        parse_condition(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("idle", 0.5),
        ("bubble", 0.2),
        ("imbalance", 0.15),
        ("communication", 0.1),
        ("host", 0.04),
        ("unexplained", 0.01),
        ("step_s", 2.0),
    ],
)
def test_each_name_means_its_quantity(name, value):
    assert Condition(name, ">", 0).value(DIAGNOSIS) == value


def test_all_names_are_tested_above():
    assert len(QUANTITIES) == 7


@pytest.mark.parametrize(
    ("comparison", "python"), [(">", operator.gt), (">=", operator.ge), ("<", operator.lt), ("<=", operator.le)]
)
@pytest.mark.parametrize("limit", [0.4, 0.5, 0.6])
def test_a_comparison_is_the_one_that_it_looks_like(comparison, python, limit):
    assert Condition("idle", comparison, limit).holds(DIAGNOSIS) == python(0.5, limit)


@pytest.mark.parametrize("text", ["idle>5", "bubble >= 1.5", "host>120%"])
def test_a_fraction_above_one_can_never_hold_and_is_refused(text):
    with pytest.raises(BadCondition, match="fraction of the step"):
        parse_condition(text)


def test_a_step_may_last_longer_than_a_second():
    assert parse_condition("step_s>5").limit == 5.0
