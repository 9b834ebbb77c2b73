"""A batch of messages ends as a whole: one that has arrived waits for one that has not.

What it finds: Receives that were ready, and were waited for in one batch with a message to or from another rank that
was not.

Why it matters: batch_isend_irecv runs on one stream and is done when all of it is. A receive from the stage before,
batched with a send to the stage after, is held up by a neighbour that has nothing to do with it.

What to try: A batch for each neighbour, or single messages where the order is safe.

Source: pytorch/pytorch#175225, pytorch/pytorch PR#175712.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.held_messages import held_in_batch, symptom_of
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="overlapped messages: interleave, and leave --no-overlap-p2p-communication out",
    torch="torch 2.12 or later, which posts batches of one kind one by one",
    other="a batch_isend_irecv for each neighbour",
)
MEASURE_AFTER = "time in receives of the stage table, and step time"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where receives that were ready waited for their batch for 5 % of the ranks' time."""
    advice = Advice(
        action="Do not wait for two neighbours in one batch",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="the posts and ends of the messages of each batch",
        measure_after=MEASURE_AFTER,
    )
    words = Symptom("batched-messages", "A batch of messages ends as a whole", "", (), (advice,))
    return symptom_of(held_in_batch(evidence.analysis), words, "for their batch")
