"""What could be changed in a job: one value says it, and several changes may be made at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """Who is repaired: a ``stage`` or a ``rank``, and its number."""

    what: str
    number: int


class LinkFactor(NamedTuple):
    """How many times as fast the messages between two stages get; ``stages`` None stands for the whole network."""

    stages: tuple[int, int] | None
    faster: float


EVEN = {
    "stage": "stages of equal length",
    "microbatch": "microbatches of equal cost",
    "rank": "ranks of one stage alike",
}


@dataclass(frozen=True, slots=True)
class Change:
    """What is different from the run as it was measured; what is None or empty stays.

    Attributes:
        microbatches: M, of the size that they have, so that the batch grows with them.
        keep_batch: the batch stays as it is, and microbatches get smaller (or larger) instead.
        schedule: a name of ``planning.orders.SCHEDULES``.
        chunks: V, where the schedule leaves it open.
        layers: layers of each stage.
        layers_now: layers of each stage in the run; None where they lie as evenly as they can.
        links: links that get faster or slower.
        overlap: no rank waits until its send is taken, and a message travels as soon as it is there.
        checkpoint: activations are not kept: each backward runs its forward again.
        repair: stages or ranks that take no longer than the others.
        even: what takes equally long: ``stage`` (all stages), ``microbatch`` (all microbatches) or ``rank`` (those
            that hold the same stage); empty for nothing.
    """

    microbatches: int | None = None
    keep_batch: bool = False
    schedule: str | None = None
    chunks: int | None = None
    layers: tuple[int, ...] | None = None
    layers_now: tuple[int, ...] | None = None
    links: tuple[LinkFactor, ...] = ()
    overlap: bool = False
    checkpoint: bool = False
    repair: tuple[Place, ...] = ()
    even: str = ""

    @property
    def reorders(self) -> bool:
        """Whether the ranks run other ops than they did, or in another order."""
        return self.microbatches is not None or self.schedule is not None

    @property
    def words(self) -> str:
        """The change in a few words.

        >>> Change(microbatches=16, repair=(Place("stage", 2),)).words
        '16 microbatches, stage 2 repaired'
        """
        smaller = " of the same batch" if self.keep_batch else ""
        found = [f"{self.microbatches} microbatches{smaller}"] if self.microbatches is not None else []
        if self.schedule is not None:
            found.append(self.schedule + (f" with {self.chunks} stages a rank" if self.chunks else ""))
        if self.layers is not None:
            found.append(f"layers {','.join(map(str, self.layers))}")
        found += [_speed(link) for link in self.links]
        found += ["overlapped transfers"] * self.overlap + ["activation checkpointing"] * self.checkpoint
        found += [f"{place.what} {place.number} repaired" for place in self.repair]
        found += [EVEN[self.even]] if self.even else []
        return ", ".join(found) or "no change"


def _speed(link: LinkFactor) -> str:
    place = "network" if link.stages is None else f"link {link.stages[0]}-{link.stages[1]}"
    return f"{place} x{link.faster:g}"
