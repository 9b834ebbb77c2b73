"""Stuck in a receive, or an NCCL time-out: who waits for whom.

What it finds: Ranks that were last seen in a wait for a message that had lasted for several steps' time.

Why it matters: The rank that waits is rarely the one at fault: the chain of waits leads to a rank that is in no wait,
or to a cycle.

What to try: Look at the rank that the others wait for. Across machines: NCCL's transport and interfaces.

Source: PyTorch's Flight Recorder documentation; public threads on RECV time-outs in pipelines.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ppdiag.analyzers.symptoms import Evidence
    from ppdiag.trace import RankFacts

_PEER = re.compile(r"(?:to|from) rank (\d+) ")
_ENDED = ("killed", "raised", "interrupted")
_NOT_FINISHED = (*_ENDED, "running")
LEAST_WAIT_S = 1.0
LEAST_WAIT_STEPS = 3.0
"""A rank is stuck that has waited for this long and this many median steps: any failure ends some rank in a wait."""


def find(evidence: Evidence) -> Symptom | None:
    """Fires where a rank was last seen in a wait for a message that was far longer than a step."""
    if any(facts.status == "raised" and not _PEER.search(facts.inside) for facts in evidence.trace.ranks.values()):
        return None  # a rank failed by itself, and its peers were left waiting
    long_s = max(LEAST_WAIT_S, LEAST_WAIT_STEPS * evidence.diagnosis.steps.median_s)
    ranks = evidence.trace.ranks
    waits_for = {
        rank: int(match[1])
        for rank, facts in sorted(ranks.items())
        if facts.status in _NOT_FINISHED
        and _waited_s(facts, ranks.values()) >= long_s
        and (match := _PEER.search(facts.inside))
    }
    if not waits_for:
        return None
    numbers = [f"rank {r} was in {ranks[r].inside} for {ranks[r].inside_s:.1f} s" for r in list(waits_for)[:8]]
    end = _end_of_chain(waits_for)
    if end is None:
        action, whose = "Break the cycle of waits", "the tags, sizes and order of the messages named; the ranks' stacks"
    else:
        action, whose = f"Look at rank {end}: the others wait for it", f"the log and stack of rank {end}"
    advice = Advice(
        action=action,
        how=f"{whose} (py-spy dump --pid ...); across machines NCCL_DEBUG=INFO: interfaces and transport",
        gain_fraction=None,
        source="the chain of waits in the ranks' last state",
        measure_after="that every rank reaches the next step",
    )
    return Symptom("stuck-in-recv", "Stuck in a wait for a message", "critical", tuple(numbers), (advice,))


def _waited_s(facts: RankFacts, all_ranks: Iterable[RankFacts]) -> float:
    """How long a rank had been in its wait when the first rank ended: what came after is that rank's doing."""
    ends = [other.last_seen_ns for other in all_ranks if other.status in _ENDED and other.clock == facts.clock]
    after_ns = max(0, facts.last_seen_ns - min(ends)) if ends else 0
    return facts.inside_s - after_ns / 1e9


def _end_of_chain(waits_for: Mapping[int, int]) -> int | None:
    """The rank that the first waiting rank waits for in the end; None where the waits form a cycle.

    >>> _end_of_chain({1: 0, 2: 1}), _end_of_chain({0: 1, 1: 0})
    (0, None)
    """
    rank, seen = next(iter(waits_for)), set()
    while rank in waits_for:
        if rank in seen:
            return None
        seen.add(rank)
        rank = waits_for[rank]
    return rank
