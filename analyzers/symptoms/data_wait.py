"""Waiting for data: the first or the last stage has no next batch yet.

What it finds: Waits for a DataLoader that, over all ranks together, take 5 % of the step time or more.

Why it matters: Only the first and the last stage need data, so that one slow loader there holds up every stage; the
others show a late sender.

What to try: More workers and prefetching on the ranks named, and data on a faster disk; nothing on the others.

Source: NVIDIA/Megatron-LM#225, pytorch/torchtitan PR#411, deepspeedai/DeepSpeed#5568.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.host_time import symptom_of
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom
from ppdiag.model import HostCause

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="--num-workers 4 or more; the data on a local disk",
    other="DataLoader(num_workers=4 or more, prefetch_factor=4, persistent_workers=True, pin_memory=True)",
)
MEASURE_AFTER = "host time of the first and last stage"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where the waits of all ranks together cover 5 % of the time."""
    advice = Advice(
        action="Have data ready on rank {rank}",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="replay of the run without these waits",
        measure_after=MEASURE_AFTER,
    )
    words = Symptom("data-wait", "Waiting for data", "", (), (advice,))
    return symptom_of(evidence, HostCause.DATA, words, "waits for data")
