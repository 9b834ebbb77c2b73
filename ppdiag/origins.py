"""Where idle time began: the part of a diagnosis that follows waits back, and the map of slow ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class CriticalSpan:
    """One span of a critical path; times from the step's begin."""

    rank: int
    """Where it ran; of a message its sender, of a collective its last member."""
    what: str
    """forward | backward | weight | optimizer | host | message | collective | step before."""
    stage: int | None
    microbatch: int | None
    link: tuple[int, int] | None
    """Of a message: (sending rank, receiving rank)."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The spans for which the median step took as long as it did; they follow each other and fill the step."""

    step: int
    length_s: float
    spans: tuple[CriticalSpan, ...]
    by_what_s: Mapping[str, float]
    by_rank_s: Mapping[int, float]
    by_stage_s: Mapping[int, float]
    """Seconds of the ops of each stage."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where idle time began: each wait is followed to what made it last longer than in the equal-work schedule."""

    what: str
    """schedule | work | host | message | collective | step before | unexplained."""
    stage: int | None
    """Of work."""
    op: str | None
    """Of work: forward | backward | weight | optimizer."""
    rank: int | None
    """Of host time; of work and messages the one rank (of a message its sender) that most of it began at."""
    link: tuple[int, int] | None
    """Of a message: (source stage, destination stage)."""
    group: str | None
    """Of a collective: its process group."""
    fraction: float
    """Idle time that began here, of the step time summed over ranks; the origins sum to the idle fraction."""
    own_fraction: float
    """The part in which the place itself stood idle; the rest are the waits of others."""


@dataclass(frozen=True, slots=True)
class Workers:
    """How slow each rank is, by its replica and its position along the pipeline.

    A slowdown is the step time with only these ranks' work as measured over that with all work equal: 1 is as the mean.
    """

    ranks: tuple[tuple[int, ...], ...]
    """Replicas x positions."""
    replica_slowdown: tuple[float, ...]
    position_slowdown: tuple[float, ...]
    slowdown: tuple[tuple[float, ...], ...]
    """Of each rank: the smaller one of its replica's and its position's."""


@dataclass(frozen=True, slots=True)
class RootCause:
    """Idle time by where it began, and what a step's length was made of."""

    origins: tuple[Origin, ...]
    """The largest first."""
    steps: int
    """How many steps were followed back."""
    critical_path: CriticalPath
