"""Stuck in a message whose two ends differ: another size, another tag, another place in the order.

What it finds: Two ranks that wait for each other, one to send and one to receive, with different numbers of bytes,
different tags or different messages of their pair.

Why it matters: A receive of another size or dtype never completes, or takes the bytes of two messages; one with another
tag, or from another place in the order, waits for a message that comes later or never. On a fast network nothing
complains until the time-out.

What to try: Make the receive buffer anew wherever shape or dtype may change; let both ends compute size, tag and order
from the same configuration.

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
    from ppdiag.trace import Waiting

HOW = in_words_of(
    megatron="the same --seq-length, --micro-batch-size, --hidden-size and pipeline dtype on all ranks",
    torch="input_args of each PipelineStage of the shape and dtype that the stage before it returns",
    other="shape and dtype of the receive buffer: those of the tensor that is sent; one order of messages, one tag",
)
MEASURE_AFTER = "that every rank reaches the next step"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where a sender and its receiver wait for each other, and not for the same bytes."""
    hang = find_hang(evidence.trace.ranks, evidence.diagnosis.steps.median_s)
    numbers = tuple(_mismatches(hang)) if hang is not None else ()
    if not numbers:
        return None
    advice = Advice(
        action="Give both ends of the message one size, tag and place in the order",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="tdrussell/diffusion-pipe PR#544",
        measure_after=MEASURE_AFTER,
    )
    return Symptom("message-mismatch", "Stuck in a message whose ends differ", "critical", numbers, (advice,))


def _mismatches(hang: Hang) -> Iterator[str]:
    """Senders whose receiver waits for them, and for something else."""
    for rank, sent in hang.waits.items():
        expected = hang.waits.get(sent.peer)
        if not sent.is_send or expected is None or expected.is_send or expected.peer != rank:
            continue
        if (expected.seq, expected.tag) != (sent.seq, sent.tag):
            yield f"rank {rank} sends {_words(sent)}, and rank {sent.peer} waits for {_words(expected)}"
        elif expected.size_bytes != sent.size_bytes:
            yield (
                f"message {sent.seq} from rank {rank} to rank {sent.peer}: "
                f"{sent.size_bytes} bytes sent, {expected.size_bytes} bytes expected"
            )


def _words(message: Waiting) -> str:
    return f"message {message.seq} (tag {message.tag}, {message.size_bytes} bytes)"
