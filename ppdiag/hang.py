"""What dumps of a job that stood still say: who waits for whom, and where the waiting begins.

It becomes a dict in one place (:meth:`Hang.to_dict`), the public contract ``ppdiag.hang/1``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

SCHEMA = "ppdiag.hang/1"


class Absence(str, Enum):
    """Why a rank is not in an op that others wait in."""

    MISSING = "missing"
    """It has not called it."""
    BEHIND = "behind"
    """It has called it, and its device has another op to finish first."""
    NO_DUMP = "no_dump"
    """Nothing is known of it."""


class RootKind(str, Enum):
    """What holds a job up where the waiting begins."""

    HOST = "host"
    """The rank has nothing pending: its host does not come to the op that others wait in."""
    DEVICE = "device"
    """Its device does not finish an op that other ranks have finished."""
    NO_DUMP = "no_dump"
    """It left no dump: it has died, or could not write one."""
    TRANSPORT = "transport"
    """All ranks of an op are in it, and it does not end."""
    CYCLE = "cycle"
    """Ranks wait for each other."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective or message, as its group counts it."""

    group: str
    """The group's name."""
    description: str
    """What the framework calls the group."""
    name: str
    """all_reduce, send, ... as recorded, without the backend."""
    sequence: int
    """Number of the collective, or of the message, in its group."""
    source: int | None = None
    """Of a message: the rank that sends it."""
    destination: int | None = None
    sizes: str = ""
    """Shapes and types of its inputs, as the first rank in it has them."""

    @property
    def words(self) -> str:
        """In a few words.

        >>> Operation("7", "PIPELINE", "send", 3, 0, 4).words
        'send 3 from rank 0 to rank 4 (group 7 PIPELINE)'
        """
        return f"{self.short} (group {self.group_words})"

    @property
    def short(self) -> str:
        """Without its group."""
        ends = f" from rank {self.source} to rank {self.destination}" if self.source is not None else ""
        return f"{self.name} {self.sequence}{ends}"

    @property
    def group_words(self) -> str:
        """Its group by number and by the framework's word."""
        return " ".join(part for part in (self.group, self.description) if part)


@dataclass(frozen=True, slots=True)
class Absent:
    """A rank that others wait for in an op."""

    rank: int
    why: Absence
    detail: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """An op that ranks wait in: the first that each of them has not finished."""

    operation: Operation
    waiting: tuple[int, ...]
    absent: tuple[Absent, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not called it, as far as is known."""
        return tuple(one.rank for one in self.absent if one.why is not Absence.BEHIND)


@dataclass(frozen=True, slots=True)
class Root:
    """Where waiting begins."""

    kind: RootKind
    ranks: tuple[int, ...]
    """In a cycle, each waits for the next."""
    held_up: int
    """How many other ranks wait for them, directly or through others."""
    text: str
    look_at: str


@dataclass(frozen=True, slots=True)
class RankAtHang:
    """The last that is known of one rank."""

    rank: int
    dump: bool
    pending: int
    """Ops that it has called and not finished."""
    first_pending: Operation | None
    last_finished: str
    """In words; empty where nothing is known."""
    waits_for: tuple[int, ...] = ()
    """Ranks that are not in its first pending op."""
    called_at: str = ""
    """File, line and function that called the first pending op, where the dump has Python stacks."""


@dataclass(frozen=True, slots=True)
class Hang:
    """All that was found."""

    source: str
    world_size: int
    text: str
    """The one thing to know first."""
    roots: tuple[Root, ...]
    stuck: tuple[Stuck, ...]
    """Most ranks waiting first."""
    ranks: tuple[RankAtHang, ...]
    mismatches: tuple[str, ...] = ()
    """Ranks that call different collectives at the same place."""
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON-serialisable data, schema ``ppdiag.hang/1``."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "world_size": self.world_size,
            "text": self.text,
            "roots": _plain(self.roots),
            "stuck": [{**_plain(row), "missing": list(row.missing)} for row in self.stuck],
            "ranks": _plain(self.ranks),
            "mismatches": list(self.mismatches),
            "warnings": list(self.warnings),
        }


def _plain(value: Any) -> Any:  # noqa: ANN401  (any part of the above)
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
