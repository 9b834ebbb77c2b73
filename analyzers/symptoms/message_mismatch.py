"""Stuck in a message whose two ends differ: sizes that do not match.

What it finds: Two ranks that wait for the same message of their pair, one to send and one to receive it, with
different numbers of bytes.

Why it matters: A receive of another size or dtype never completes, or takes the bytes of two messages; on a fast
network nothing complains until the time-out.

What to try: Make the receive buffer anew wherever shape or dtype may change; let both ends compute the size from the
same configuration.

Source: tdrussell/diffusion-pipe PR#544.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.stuck import find_hang
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ppdiag.analyzers.stuck import Hang
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="the same --seq-length, --micro-batch-size, --hidden-size and pipeline dtype on all ranks",
    torch="input_args of each PipelineStage of the shape and dtype that the stage before it returns",
    other="the shape and dtype of the receive buffer: those of the tensor that is sent",
)
MEASURE_AFTER = "that every rank reaches the next step"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where a sender and its receiver wait for the same message in different sizes."""
    hang = find_hang(evidence.trace.ranks, evidence.diagnosis.steps.median_s)
    numbers = tuple(_mismatches(hang)) if hang is not None else ()
    if not numbers:
        return None
    advice = Advice(
        action="Give both ends of the message one shape and dtype",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="tdrussell/diffusion-pipe PR#544",
        measure_after=MEASURE_AFTER,
    )
    return Symptom("message-mismatch", "Stuck in a message whose ends differ", "critical", numbers, (advice,))


def _mismatches(hang: Hang) -> Iterator[str]:
    for rank, wait in hang.waits.items():
        other = hang.waits.get(wait.peer)
        same = other is not None and other.peer == rank and (other.seq, other.tag) == (wait.seq, wait.tag)
        if wait.is_send and other is not None and same and not other.is_send and other.size_bytes != wait.size_bytes:
            yield (
                f"message {wait.seq} from rank {rank} to rank {wait.peer}: "
                f"{wait.size_bytes} bytes sent, {other.size_bytes} bytes expected"
            )
