"""Stuck with very large batches of messages: NCCL splits them differently on each rank.

What it finds: A job that stands still and had posted more than 256 messages in one batch.

Why it matters: NCCL cuts a large group of sends and receives into several launches, and each rank cuts by its own
list. Where the cuts differ, a send waits in one launch for a receive that is in a later one.

What to try: Smaller batches.

Source: pytorch/pytorch#174288, pytorch/pytorch PR#174942.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.held_messages import largest_batch
from ppdiag.analyzers.stuck import find_hang
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

MOST_IN_ONE_LAUNCH = 256
"""Batches above this have hung, in the thread below."""
HOW = in_words_of(
    other="TORCH_NCCL_BATCH_P2P_CHUNK_SIZE=128 where torch has it, else several calls of batch_isend_irecv in the same "
    "order on all ranks"
)
MEASURE_AFTER = "that every rank reaches the next step"


def find(evidence: Evidence) -> Symptom | None:
    """Fires on a hang of a job whose batches are that large."""
    hang = find_hang(evidence.trace.ranks, evidence.diagnosis.steps.median_s)
    if hang is None:
        return None
    rank, size = largest_batch(evidence.trace.spans)
    if size <= MOST_IN_ONE_LAUNCH:
        return None
    advice = Advice(
        action="Cut the batches of messages",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="pytorch/pytorch PR#174942",
        measure_after=MEASURE_AFTER,
    )
    numbers = (f"rank {rank} posted {size} messages in one batch",)
    return Symptom("large-batch-of-messages", "Stuck, with very large batches", "critical", numbers, (advice,))
