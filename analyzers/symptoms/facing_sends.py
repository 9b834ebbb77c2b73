"""Stuck in sends that face each other: every rank of a cycle sends first and receives later.

What it finds: A cycle of ranks, each of which waits for its own send to be taken by the next.

Why it matters: A large send ends when its receiver takes it. Small ones are buffered, so that the same code runs with
small tensors and hangs with large ones.

What to try: Post the receives before waiting for the sends, all in one batch; or let every other rank receive first.

Source: meta-pytorch/torchrec PR#4472, NVIDIA/nccl#584, NVIDIA/nccl#784, pytorch/pytorch PR#178815.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.stuck import find_hang
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    other="batch_isend_irecv with the sends and the receives of a step; or send before receive on even ranks, receive "
    "before send on odd ones"
)
MEASURE_AFTER = "that every rank reaches the next step, with the largest messages of the job"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where all ranks of a cycle wait for their own sends."""
    hang = find_hang(evidence.trace.ranks, evidence.diagnosis.steps.median_s)
    if hang is None or not hang.cycle or not all(hang.waits[rank].is_send for rank in hang.cycle):
        return None
    numbers = tuple(
        f"rank {rank} waits for its send of {hang.waits[rank].size_bytes} bytes to rank {hang.waits[rank].peer}"
        for rank in hang.cycle[:8]
    )
    advice = Advice(
        action="Do not wait for a send before the receive is posted",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="the cycle of waits in the ranks' last state",
        measure_after=MEASURE_AFTER,
    )
    return Symptom("facing-sends", "Stuck in sends that face each other", "critical", numbers, (advice,))
