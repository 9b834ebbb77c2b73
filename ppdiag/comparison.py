"""What changed from one run to another: all that ``ppdiag compare`` found, and all that it may show.

It becomes a dict in one place (:meth:`Comparison.to_dict`), the public contract ``ppdiag.comparison/1``. Times are
means over the analysed steps, in seconds a step, so that parts and places sum to the change of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppdiag.diagnosis import Job

SCHEMA = "ppdiag.comparison/1"
WORK = "work"
"""The part of a step that is no idle time: the mean busy time of the ranks."""


class Outcome(str, Enum):
    """What can be said of the step time of B against that of A."""

    SLOWER = "slower"
    FASTER = "faster"
    NO_DIFFERENCE = "no difference"
    """None beyond the noise of the steps."""
    UNKNOWN = "unknown"
    """One of them has too few steps to know its noise."""


@dataclass(frozen=True, slots=True)
class Change:
    """A time in A and in B, and the 95 % interval of what it changed by; infinite where that is not known."""

    name: str
    a_s: float
    b_s: float
    low_s: float
    high_s: float

    @property
    def change_s(self) -> float:
        """B less A."""
        return self.b_s - self.a_s

    @property
    def outcome(self) -> Outcome:
        """Whether the change is larger than the noise."""
        if not math.isfinite(self.low_s) or not math.isfinite(self.high_s):
            return Outcome.UNKNOWN
        return Outcome.SLOWER if self.low_s > 0 else Outcome.FASTER if self.high_s < 0 else Outcome.NO_DIFFERENCE


class What(str, Enum):
    """What changed at a place."""

    WORK = "work"
    OPTIMIZER = "optimizer"
    HOST = "host"
    TRANSFER = "transfer"
    COLLECTIVE = "collective"
    TOGETHER = "together"
    """What several changes do only together, what no place's mean shows, and places too small to be looked at."""
    UNEXPLAINED = "unexplained"
    """What the replays of the two runs fail to reproduce."""


@dataclass(frozen=True, slots=True)
class PlaceChange:
    """What the step would change by if one place alone changed from how it is in A to how it is in B."""

    what: What
    stage: int | None
    rank: int | None
    """Of host time; of work the one rank of several at which it changed."""
    link: tuple[int, int] | None
    """(source rank, destination rank)."""
    group: str | None
    change_s: float


@dataclass(frozen=True, slots=True)
class StageChange:
    """Median seconds of one F, B and W of a stage; 0 where it has none."""

    stage: int
    a_s: tuple[float, float, float]
    b_s: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs."""

    source: str
    job: Job
    steps: int
    mean_s: float
    median_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that was found."""

    a: Side
    b: Side
    step: Change
    """The mean step time."""
    parts: tuple[Change, ...]
    """``work``, then each cause of idle time; they sum to the step."""
    places: tuple[PlaceChange, ...]
    """The largest first; they sum to the change of the step. Empty where the jobs are of different shape."""
    stages: tuple[StageChange, ...]
    same_work: bool
    """Whether a step of both does the same work as far as can be seen; else a longer step is not a slower one."""
    notes: tuple[str, ...]

    @property
    def slower(self) -> float:
        """By how much of A's step time B's is longer."""
        return self.step.change_s / self.step.a_s

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-serialisable data, schema ``ppdiag.comparison/1``."""
        return {
            "schema": SCHEMA,
            "outcome": self.step.outcome.value,
            "slower_fraction": self.slower,
            **{f.name: _plain(getattr(self, f.name)) for f in fields(self)},
        }


def _plain(value: Any) -> Any:  # noqa: ANN401  (any part of a comparison)
    if isinstance(value, Change):
        low_s, high_s = (edge if math.isfinite(edge) else None for edge in (value.low_s, value.high_s))
        times = {"a_s": value.a_s, "b_s": value.b_s, "change_s": value.change_s, "low_s": low_s, "high_s": high_s}
        return {"name": value.name, **times}
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
