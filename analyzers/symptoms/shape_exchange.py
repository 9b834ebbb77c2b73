"""Stuck in an exchange of shapes: sequences of variable length, and messages that cross.

What it finds: A rank that stands still in a message of a few bytes, which carries the shape of the next one, in a
pipeline of four ranks or more.

Why it matters: With variable sequence lengths each activation is announced by its shape. The exchange of shapes does
not keep to the order of the messages themselves, and two ranks may each wait for the other's.

What to try: Sequences of one length (pad, do not pack), so that no shapes are sent; else a version in which the
exchange keeps the order.

Source: NVIDIA/Megatron-LM#5100.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.stuck import find_hang
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

LARGEST_SHAPE_BYTES = 64
"""A shape is a handful of 8-byte numbers; no activation is that small."""
LEAST_RANKS = 4
HOW = in_words_of(
    megatron="variable_seq_lengths=False in the model's configuration: pad every sequence to --seq-length",
    other="pad every microbatch to one shape, so that shapes need not be sent",
)
MEASURE_AFTER = "that every rank reaches the next step"


def find(evidence: Evidence) -> Symptom | None:
    """Fires on a hang in a message of a shape's size, four ranks or more along the pipeline."""
    hang = find_hang(evidence.trace.ranks, evidence.diagnosis.steps.median_s)
    if hang is None or evidence.diagnosis.job.pp < LEAST_RANKS:
        return None
    small = {rank: wait for rank, wait in hang.waits.items() if 0 < wait.size_bytes <= LARGEST_SHAPE_BYTES}
    if not small:
        return None
    numbers = [
        f"rank {rank} waits {'to send' if wait.is_send else 'to receive'} {wait.size_bytes} bytes, "
        f"{'to' if wait.is_send else 'from'} rank {wait.peer}"
        for rank, wait in list(small.items())[:8]
    ]
    advice = Advice(
        action="Let all microbatches have one shape",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="NVIDIA/Megatron-LM#5100",
        measure_after=MEASURE_AFTER,
    )
    return Symptom("shape-exchange", "Stuck in an exchange of shapes", "critical", tuple(numbers), (advice,))
