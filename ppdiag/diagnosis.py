"""The diagnosis of a run: all that the analysis found, and all that a report may show.

It becomes a dict in one place (:meth:`Diagnosis.to_dict`), the public contract ``ppdiag.diagnosis/1``.
Fractions are of the step time summed over the ranks concerned, so ``why`` and ``where`` both sum to the idle fraction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppdiag.drawn_step import Timeline
    from ppdiag.origins import RootCause, Workers

SCHEMA = "ppdiag.diagnosis/1"
STUCK = "stuck-in-recv"
"""Id of the symptom of a hang, which comes before all that the steps lost."""
WORTH_SAYING, WORTH_A_WARNING, CRITICAL = 0.05, 0.10, 0.20
"""Bands on the share of the step time: below the first a cause is not spoken of, from the others on it is a warning, or
critical."""


MOST_STEPS = 1000
"""Steps in the JSON; of more, some are left out evenly."""


def percent(fraction: float) -> str:
    """A fraction as a percentage with one decimal, so that the parts of a table sum as they are read.

    >>> percent(0.3141), percent(float("nan"))
    ('31.4 %', '-')
    """
    return f"{100 * fraction:.1f} %" if math.isfinite(fraction) else "-"


class Cause(str, Enum):
    """Why a rank stood idle."""

    BUBBLE = "bubble"
    IMBALANCE = "imbalance"
    COMMUNICATION = "communication"
    HOST = "host"
    UNEXPLAINED = "unexplained"


class Place(str, Enum):
    """Where a rank stood while it was idle."""

    LATE_SENDER = "late_sender"
    TRANSFER = "transfer"
    SEND_WAIT = "send_wait"
    COLLECTIVE = "collective"
    HOST = "host"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Where:
    """Idle time by what the rank stood in, as fractions of its step time (measured)."""

    late_sender: float = 0.0
    transfer: float = 0.0
    send_wait: float = 0.0
    collective: float = 0.0
    host: float = 0.0
    unexplained: float = 0.0

    @property
    def total(self) -> float:
        """The idle fraction."""
        return float(sum(getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Why:
    """Idle time by cause, as fractions of the step time (replayed)."""

    bubble: float = 0.0
    imbalance: float = 0.0
    communication: float = 0.0
    host: float = 0.0
    unexplained: float = 0.0

    @property
    def total(self) -> float:
        """The idle fraction."""
        return float(sum(getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Job:
    """The job's shape, as recorded or as found in the record."""

    world_size: int
    pp: int
    vpp: int
    tp: int | None
    dp: int | None
    microbatches: int
    framework: str
    schedule_name: str
    schedule_match: float
    """Share of ops that stand where the named schedule has them, 0..1."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Step times of the steps that were analysed."""

    count: int
    dropped: int
    """Warm-up and incomplete steps left out."""
    median_s: float
    p10_s: float
    p90_s: float


@dataclass(frozen=True, slots=True)
class Phases:
    """Mean length of the three phases of a step; they sum to the mean step time."""

    pipeline_s: float
    tail_s: float
    between_s: float


@dataclass(frozen=True, slots=True)
class ImbalanceSplit:
    """Imbalance (a fraction of step time) by what is unequal; the parts sum to ``why.imbalance`` of the job."""

    stage: float = 0.0
    microbatch: float = 0.0
    rank: float = 0.0


@dataclass(frozen=True, slots=True)
class HostSplit:
    """Host time (a fraction of step time) by its cause; the parts sum to ``why.host`` of the job."""

    python: float = 0.0
    """Whatever no other part takes: Python itself, and waits for the device that C++ hides (``.item()``)."""
    data: float = 0.0
    gc: float = 0.0
    launch: float = 0.0
    """The host launched an op of the device late."""
    synchronising: float = 0.0
    """It did so since a call had made it wait for its device (``torch.cuda.synchronize``; of a stream or an event)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One analysed step: both partitions of the job's idle time in it."""

    step: int
    """Its number in the record."""
    duration_s: float
    why: Why
    where: Where


@dataclass(frozen=True, slots=True)
class StageResult:
    """One stage (all virtual stages counted)."""

    stage: int
    ranks: tuple[int, ...]
    forward_s: float
    """Median time of one F; likewise B and W. 0 where the stage has none."""
    backward_s: float
    weight_s: float
    busy_fraction: float
    """Mean over the stage's ranks of the rank's busy fraction (a rank with several stages counts for each)."""
    idle_fraction: float
    where: Where
    why: Why
    peak_memory_bytes: int | None = None
    """Of the fullest of its ranks, all stages of the rank together."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """One rank."""

    rank: int
    host: str
    stage: tuple[int, ...]
    """Its stages."""
    forward_s: float
    backward_s: float
    weight_s: float
    busy_fraction: float
    idle_fraction: float
    where: Where
    why: Why
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LinkResult:
    """Messages from one stage to another."""

    src_stage: int
    dst_stage: int
    direction: str
    """forward (activations) or backward (gradients)."""
    bytes: int
    """Median bytes of one message; 0 where the recording does not say them."""
    transfer_s: float
    """Median time of one transfer: end - max(post of send, post of receive)."""
    bandwidth_bytes_per_s: float | None
    transport: str | None = None
    by_clocks_s: float | None = None
    """Where the ends' clocks may be off by more than a transfer takes: what they say. ``transfer_s`` is then the median
    of the shorter of both ends' durations."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The one thing to know first."""

    cause: str | None
    """A :class:`Cause`; None where nothing is worth saying."""
    stage: int | None
    link: tuple[int, int] | None
    """(source stage, destination stage)."""
    rank: int | None
    share: float
    """Of the step time."""
    confidence: str
    """measured | inferred | undecided."""
    text: str


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change."""

    action: str
    how: str
    """The flag or call in the user's own framework."""
    gain_fraction: float | None
    """Of the step time, from a replay of the run with the change; None where it cannot be replayed."""
    source: str
    measure_after: str = ""
    gain_range: tuple[float, float] | None = None
    """10th and 90th percentile of the gain over the steps, where the change itself was replayed; None where
    ``gain_fraction`` is a bound."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """A known pattern that this run shows."""

    id: str
    title: str
    severity: str
    """info | warning | critical."""
    evidence: tuple[str, ...]
    advice: tuple[Advice, ...]
    replaces: str = ""
    """A more general symptom, whose advice this one's contains: it is not shown beside it."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Cost of the hooks, as a fraction of the step time, with its interval."""

    fraction: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found."""

    source: str
    job: Job
    steps: Steps
    phases: Phases
    where: Where
    why: Why
    imbalance: ImbalanceSplit
    stages: tuple[StageResult, ...]
    links: tuple[LinkResult, ...]
    ranks: tuple[RankResult, ...]
    replay_error_fraction: float
    clock_error_s: float
    verdict: Verdict
    symptoms: tuple[Symptom, ...] = ()
    overhead: Overhead | None = None
    transports: tuple[Any, ...] = ()
    warnings: tuple[str, ...] = ()
    step_times_s: tuple[float, ...] = field(default=())
    """Of the analysed steps, in order; for drawing."""
    timeline: Timeline | None = None
    root_cause: RootCause | None = None
    workers: Workers | None = None
    host: HostSplit = field(default_factory=HostSplit)
    step_results: tuple[StepResult, ...] = ()
    """Every analysed step, in order."""

    @property
    def spread(self) -> dict[str, tuple[float, float]]:
        """For each cause the 10th and the 90th percentile of its share over the steps."""
        return {cause.value: _tenths([getattr(row.why, cause.value) for row in self.step_results]) for cause in Cause}

    @property
    def idle_fraction(self) -> float:
        """Share of the step time, over all ranks, in which no compute ran."""
        return self.where.total

    @property
    def stuck(self) -> Symptom | None:
        """The symptom of a job that stands still; None where it does not."""
        return next((symptom for symptom in self.symptoms if symptom.id == STUCK), None)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON-serialisable data, schema ``ppdiag.diagnosis/1``."""
        job = _plain(self.job)
        schedule = {"name": job.pop("schedule_name"), "match": job.pop("schedule_match")}
        return {
            "schema": SCHEMA,
            "source": self.source,
            "job": {**job, "schedule": schedule},
            "steps": _plain(self.steps),
            "phases": _plain(self.phases),
            "idle": {"fraction": self.idle_fraction, "where": _plain(self.where), "why": _plain(self.why)},
            "imbalance": _plain(self.imbalance),
            "stages": _plain(self.stages),
            "links": _plain(self.links),
            "ranks": _plain(self.ranks),
            "replay": {"error_fraction": self.replay_error_fraction},
            "clock": {"error_s": self.clock_error_s},
            "overhead": _plain(self.overhead),
            "verdict": _plain(self.verdict),
            "symptoms": [_symptom(symptom) for symptom in self.symptoms],
            "transports": _plain(self.transports),
            "warnings": _plain(self.warnings),
            "root_cause": _plain(self.root_cause),
            "workers": _plain(self.workers),
            "host": _plain(self.host),
            "spread": {cause: {"p10": low, "p90": high} for cause, (low, high) in self.spread.items()},
            "step_results": _plain(_evenly(self.step_results, MOST_STEPS)),
        }


def _tenths(values: list[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile, by the nearest rank below and above."""
    if not values:
        return 0.0, 0.0
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[math.floor(0.1 * last)], ordered[math.ceil(0.9 * last)]


def _evenly(rows: tuple[Any, ...], most: int) -> tuple[Any, ...]:
    """At most so many of the rows, evenly spread."""
    return rows if len(rows) <= most else tuple(rows[i * len(rows) // most] for i in range(most))


def _symptom(symptom: Symptom) -> dict[str, Any]:
    """The contract's part of a symptom; its title and severity are for reports that speak to people."""
    names = ("action", "how", "gain_fraction", "gain_range", "source")
    advice = [{name: _plain(getattr(row, name)) for name in names} for row in symptom.advice]
    return {"id": symptom.id, "evidence": list(symptom.evidence), "advice": advice}


def _plain(value: Any) -> Any:  # noqa: ANN401  (any part of a diagnosis)
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
