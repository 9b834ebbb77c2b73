"""Who stands still and waits for whom, from the last state of the ranks: what all symptoms of a hang begin with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ppdiag.trace import RankFacts, Waiting

ENDED = ("killed", "raised", "interrupted")
NOT_FINISHED = (*ENDED, "running")
LEAST_WAIT_S = 1.0
LEAST_WAIT_STEPS = 3.0
"""A rank is stuck that has waited for this long and this many median steps: any failure ends some rank in a wait."""


@dataclass(frozen=True, slots=True)
class Hang:
    """The ranks that stand still.

    Attributes:
        waits: the message that each stuck rank waits for, by rank, ascending.
        end: the rank that the first of them waits for in the end, which is in no such wait; None where the waits form
            a cycle.
        cycle: the ranks of the cycle, in the order in which each waits for the next; empty where there is none.
    """

    waits: Mapping[int, Waiting]
    end: int | None
    cycle: tuple[int, ...]

    @property
    def action(self) -> str:
        """Where to look first."""
        if self.end is None:
            return f"Break the cycle of waits: rank {' waits for rank '.join(map(str, (*self.cycle, self.cycle[0])))}"
        return f"Look at rank {self.end}: the others wait for it"


def find_hang(ranks: Mapping[int, RankFacts], step_s: float) -> Hang | None:
    """The hang of a job; None where no rank waits for a message for long, or one failed by itself.

    Args:
        ranks: last known state of each rank.
        step_s: a usual step.
    """
    if any(facts.status == "raised" and facts.waiting is None for facts in ranks.values()):
        return None  # its peers were left waiting
    long_s = max(LEAST_WAIT_S, LEAST_WAIT_STEPS * step_s)
    waits = {
        rank: facts.waiting
        for rank, facts in sorted(ranks.items())
        if facts.waiting is not None and facts.status in NOT_FINISHED and waited_s(facts, ranks.values()) >= long_s
    }
    if not waits:
        return None
    end, cycle = _follow({rank: wait.peer for rank, wait in waits.items()})
    return Hang(waits, end, cycle)


def waited_s(facts: RankFacts, all_ranks: Iterable[RankFacts]) -> float:
    """How long a rank had been in its wait when the first rank ended: what came after is that rank's doing."""
    ends = [other.last_seen_ns for other in all_ranks if other.status in ENDED and other.clock == facts.clock]
    after_ns = max(0, facts.last_seen_ns - min(ends)) if ends else 0
    return facts.inside_s - after_ns / 1e9


def _follow(waits_for: Mapping[int, int]) -> tuple[int | None, tuple[int, ...]]:
    """The rank at the end of the first waiting rank's chain, or the cycle that it leads to.

    >>> _follow({1: 0, 2: 1}), _follow({0: 1, 1: 0}), _follow({0: 1, 1: 2, 2: 1})
    ((0, ()), (None, (0, 1)), (None, (1, 2)))
    """
    rank = next(iter(waits_for))
    path: list[int] = []
    while rank in waits_for:
        if rank in path:
            return None, tuple(path[path.index(rank) :])
        path.append(rank)
        rank = waits_for[rank]
    return rank, ()
