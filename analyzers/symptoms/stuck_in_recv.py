"""Stuck in a receive, or an NCCL time-out: who waits for whom.

What it finds: Ranks that were last seen in a wait for a message that had lasted for several steps' time.

Why it matters: The rank that waits is rarely the one at fault: the chain of waits leads to a rank that is in no wait,
or to a cycle.

What to try: Look at the rank that the others wait for. Across machines: NCCL's transport and interfaces.

Source: PyTorch's Flight Recorder documentation; NVIDIA/Megatron-LM#873, NVIDIA/Megatron-LM#881,
NVIDIA/Megatron-LM#1597, NVIDIA/Megatron-LM#792, NVIDIA/nccl#584.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.stuck import find_hang
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import STUCK, Advice, Symptom

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

SHOWN = 8
HOW = in_words_of(
    other="the stack of the rank named (py-spy dump --pid ...), then its log; for a cycle the order, tags and sizes "
    "of the messages named; across machines NCCL_DEBUG=INFO: interfaces and transport"
)
MEASURE_AFTER = "that every rank reaches the next step"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where a rank was last seen in a wait for a message that was far longer than a step."""
    ranks = evidence.trace.ranks
    hang = find_hang(ranks, evidence.diagnosis.steps.median_s)
    if hang is None:
        return None
    numbers = [f"rank {r} was in {ranks[r].inside} for {ranks[r].inside_s:.1f} s" for r in list(hang.waits)[:SHOWN]]
    if hang.end is not None and hang.end in ranks:
        numbers.append(f"rank {hang.end} was in {ranks[hang.end].inside or 'no recorded op'}")
    advice = Advice(
        action=hang.action,
        how=evidence.says(HOW),
        gain_fraction=None,
        source="the chain of waits in the ranks' last state",
        measure_after=MEASURE_AFTER,
    )
    return Symptom(STUCK, "Stuck in a wait for a message", "critical", tuple(numbers), (advice,))
