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
    from collections.abc import Mapping

    from ppdiag.analyzers.symptoms import Evidence

_PEER = re.compile(r"(?:to|from) rank (\d+) ")
_NOT_FINISHED = ("killed", "raised", "interrupted", "running")
LEAST_WAIT_S = 1.0
LEAST_WAIT_STEPS = 3.0
"""A rank is stuck that has waited for this long and this many median steps: any failure ends some rank in a wait."""


def find(evidence: Evidence) -> Symptom | None:
    """Fires where a rank was last seen in a wait for a message that was far longer than a step."""
    if any(facts.status == "raised" and not _PEER.search(facts.inside) for facts in evidence.trace.ranks.values()):
        return None  # a rank failed by itself, and its peers were left waiting
    long_s = max(LEAST_WAIT_S, LEAST_WAIT_STEPS * evidence.diagnosis.steps.median_s)
    waits_for = {
        rank: int(match[1])
        for rank, facts in sorted(evidence.trace.ranks.items())
        if facts.status in _NOT_FINISHED and facts.inside_s >= long_s and (match := _PEER.search(facts.inside))
    }
    if not waits_for:
        return None
    ranks = evidence.trace.ranks
    numbers = [f"rank {r} was in {ranks[r].inside} for {ranks[r].inside_s:.1f} s" for r in list(waits_for)[:8]]
    end = _end_of_chain(waits_for)
    action = "Break the cycle of waits" if end is None else f"Look at rank {end}: the others wait for it"
    advice = Advice(
        action=action,
        how="its log and stack (py-spy dump --pid ...); across machines NCCL_DEBUG=INFO: interfaces and transport",
        gain_fraction=None,
        source="the chain of waits in the ranks' last state",
        measure_after="that every rank reaches the next step",
    )
    return Symptom("stuck-in-recv", "Stuck in a wait for a message", "critical", tuple(numbers), (advice,))


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
