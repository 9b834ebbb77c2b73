"""Stuck with unbatched messages: communicators of two ranks are made in different orders.

What it finds: An interleaved Megatron job that stands still, with overlapped (unbatched) messages: each pair of ranks
makes its communicator at its first message.

Why it matters: Making a communicator waits for the other rank. Where two ranks come to their pairs in different orders
each waits for the other; which ranks are stuck changes from run to run, and the loss was healthy before.

What to try: Send the messages of a step in batches over the group's own communicator.

Source: NVIDIA/Megatron-LM PR#5240, modelscope/ms-swift#9451.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.stuck import find_hang
from ppdiag.analyzers.symptoms import MEGATRON, in_words_of
from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

BATCHED = "no-overlap-p2p-communication"
HOW = in_words_of(
    megatron=f"--{BATCHED}",
    other="batch_isend_irecv over the pipeline's group instead of single isend and irecv",
)
MEASURE_AFTER = "that every rank reaches the next step; the step time, since batched messages overlap less"


def find(evidence: Evidence) -> Symptom | None:
    """Fires on a hang of an interleaved Megatron job that was not told to batch its messages."""
    job = evidence.diagnosis.job
    hang = find_hang(evidence.trace.ranks, evidence.diagnosis.steps.median_s)
    if hang is None or evidence.framework not in MEGATRON or job.vpp < 2 or BATCHED in evidence.options:
        return None
    numbers = (
        (
            f"ranks {', '.join(map(str, list(hang.waits)[:8]))} wait for a message, "
            f"{sum(wait.is_send for wait in hang.waits.values())} of them for their own send"
        ),
        f"interleaved with V={job.vpp}, and --{BATCHED} is not among the arguments",
    )
    advice = Advice(
        action="Batch the messages between stages",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="NVIDIA/Megatron-LM PR#5240",
        measure_after=MEASURE_AFTER,
    )
    return Symptom("unbatched-messages", "Stuck, with unbatched messages", "critical", numbers, (advice,))
