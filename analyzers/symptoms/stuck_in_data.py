"""Stuck while a rank loads data: the others wait, and it is in no pipeline op.

What it finds: A job that stands still, whose chain of waits ends at a rank of the first or the last stage that is in
no recorded op.

Why it matters: Only the first and the last stage load data. A loader that is slow, has run out of samples on one of
them, or waits for a lock holds up all stages, which show nothing but waits.

What to try: Look at that rank's stack: in the data loader it is the data, in the optimizer's step a collective that
not all ranks take part in.

Source: deepspeedai/DeepSpeed#5568, deepspeedai/DeepSpeed#1522, microsoft/DeepSpeed#4708, NVIDIA/Megatron-LM#225.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.stuck import NOT_FINISHED, find_hang
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    deepspeed="py-spy dump of that rank; data iterators of equal length on the first and last stage, num_workers=0 to "
    "see their error; ZeRO stage 0 where a stage has an embedding only",
    other="py-spy dump of that rank; data loaders of equal length on the first and last stage, num_workers=0 to see "
    "their error",
)
MEASURE_AFTER = "that every rank reaches the next step; host time of the first and last stage"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where the others wait for a rank that loads data and is in no op."""
    ranks = evidence.trace.ranks
    hang = find_hang(ranks, evidence.diagnosis.steps.median_s)
    if hang is None or hang.end is None or hang.end not in ranks:
        return None
    facts, stages = ranks[hang.end], evidence.shape.stages.get(hang.end, ())
    last = max((stage for own in evidence.shape.stages.values() for stage in own), default=0)
    if facts.inside or facts.status not in NOT_FINISHED or not {0, last} & set(stages):
        return None
    numbers = (
        f"ranks {', '.join(map(str, list(hang.waits)[:8]))} wait, in the end for rank {hang.end}",
        f"rank {hang.end} holds stage {', '.join(map(str, stages))} of 0 to {last} and is in no pipeline op",
    )
    advice = Advice(
        action=f"Look at what rank {hang.end} does outside of the pipeline: it loads data",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="the chain of waits in the ranks' last state",
        measure_after=MEASURE_AFTER,
    )
    return Symptom("stuck-in-data", "Stuck while a rank loads data", "critical", numbers, (advice,))
