"""Conditions on a diagnosis, for use as a gate: ``idle>0.3``."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppdiag.errors import BadCondition

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ppdiag.diagnosis import Diagnosis

QUANTITIES: dict[str, Callable[[Diagnosis], float]] = {
    "idle": lambda diagnosis: diagnosis.idle_fraction,
    "bubble": lambda diagnosis: diagnosis.why.bubble,
    "imbalance": lambda diagnosis: diagnosis.why.imbalance,
    "communication": lambda diagnosis: diagnosis.why.communication,
    "host": lambda diagnosis: diagnosis.why.host,
    "unexplained": lambda diagnosis: diagnosis.why.unexplained,
    "step_s": lambda diagnosis: diagnosis.steps.median_s,
}
"""What can be asked: fractions of the step time (0..1), and the median step in seconds."""

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_FORM = re.compile(r"\s*([a-z_]+)\s*(>=|<=|>|<)\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(%?)\s*\Z")


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of one quantity of a diagnosis with a number."""

    name: str
    comparison: str
    limit: float

    def value(self, diagnosis: Diagnosis) -> float:
        """The quantity in this diagnosis."""
        return QUANTITIES[self.name](diagnosis)

    def holds(self, diagnosis: Diagnosis) -> bool:
        """Whether the comparison is true of this diagnosis."""
        return self.is_true_of(self.value(diagnosis))

    def is_true_of(self, value: float) -> bool:
        """Whether the comparison is true of a number."""
        return _OPERATORS[self.comparison](value, self.limit)

    def __str__(self) -> str:
        return f"{self.name}{self.comparison}{self.limit:g}"


def parse_condition(text: str, names: Collection[str] = tuple(QUANTITIES)) -> Condition:
    """Read a condition on one of these quantities; all but ``step_s`` are fractions of the step.

    Raises:
        BadCondition: it is not ``NAME OPERATOR NUMBER``.

    >>> parse_condition("idle > 30%")
    Condition(name='idle', comparison='>', limit=0.3)
    """
    match = _FORM.match(text)
    if match is None or match[1] not in names or (match[4] and match[1] == "step_s"):
        raise _bad(text, names)
    try:
        limit = float(match[3])
    except ValueError:
        raise _bad(text, names) from None
    limit = limit / 100 if match[4] else limit
    if limit > 1 and match[1] != "step_s":
        raise BadCondition(f"{text!r}: {match[1]} is a fraction of the step, 0 to 1; for 5 per cent write 0.05 or 5%")
    return Condition(match[1], match[2], limit)


def _bad(text: str, names: Collection[str]) -> BadCondition:
    listed = ", ".join(names)
    return BadCondition(f"cannot read the condition {text!r}; write NAME>NUMBER (or >=, <, <=), NAME one of {listed}")
