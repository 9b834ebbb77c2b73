"""Stuck with skip connections: a batch of receives waits for a send that comes after it.

What it finds: A job that stands still and has messages between stages that are no neighbours.

Why it matters: A batch is done when all of its messages are. A receive from a distant stage and one from the neighbour
in one batch make the rank wait for both before it sends, and the distant stage may need that very send.

What to try: A batch for each source, or single receives, waited for where their op needs them.

Source: pytorch/PiPPy#969.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.stuck import find_hang
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    torch="split the model where no tensor crosses more than one boundary, or hand it on through each stage's outputs",
    other="one batch_isend_irecv for each peer, or isend and irecv on their own",
)
MEASURE_AFTER = "that every rank reaches the next step"


def find(evidence: Evidence) -> Symptom | None:
    """Fires on a hang of a job with messages that skip a stage."""
    hang = find_hang(evidence.trace.ranks, evidence.diagnosis.steps.median_s)
    skipping = [link for link in evidence.diagnosis.links if abs(link.src_stage - link.dst_stage) > 1]
    if hang is None or not skipping:
        return None
    pairs = dict.fromkeys(f"{link.src_stage} to {link.dst_stage}" for link in skipping)
    advice = Advice(
        action="Do not wait for a distant stage and the neighbour in one batch",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="pytorch/PiPPy#969",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        f"messages go from stage {', '.join(list(pairs)[:8])}",
        f"ranks {', '.join(map(str, list(hang.waits)[:8]))} wait for a message",
    )
    return Symptom("skip-connections", "Stuck, with messages that skip a stage", "critical", numbers, (advice,))
