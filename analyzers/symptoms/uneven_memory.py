"""One stage holds far more memory than the others: activations in flight, or layers that weigh more.

What it finds: The fullest stage's peak of memory is at least 30 % over the emptiest one's.

Why it matters: The fullest stage limits the microbatch and the number of microbatches in flight for all. Under 1F1B
the first stage keeps the activations of P microbatches and the last those of one.

What to try: Recompute or offload on the early stages only; fewer layers on the full stage if its time allows.

Source: deepspeedai/DeepSpeed#4477, microsoft/DeepSpeed#5729, sail-sg/zero-bubble-pipeline-parallelism#8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

UNEVEN = 1.3
LEAST_BYTES = 4 << 30
"""A difference below this is no matter on any GPU that trains."""
HOW = in_words_of(
    megatron="--pipeline-model-parallel-layout with fewer layers on the full stage; --recompute-granularity selective",
    torch="checkpoint_wrapper on the modules of the full stages only",
    deepspeed="activation_checkpoint_interval in the full stages' layers; another partition_method",
    other="checkpoint the modules of the full stages only",
)
MEASURE_AFTER = "peak memory of each stage"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where the stages' peaks differ by 30 % and by 4 GiB."""
    peaks = {row.stage: row.peak_memory_bytes for row in evidence.diagnosis.stages if row.peak_memory_bytes is not None}
    if len(peaks) < 2:
        return None
    full, empty = max(peaks, key=lambda stage: peaks[stage]), min(peaks, key=lambda stage: peaks[stage])
    if peaks[full] < UNEVEN * peaks[empty] or peaks[full] - peaks[empty] < LEAST_BYTES:
        return None
    job = evidence.diagnosis.job
    advice = Advice(
        action=f"Let stage {full} hold less",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="peaks of torch's allocator",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        f"stage {full} holds up to {peaks[full] / 2**30:.1f} GiB, stage {empty} {peaks[empty] / 2**30:.1f} GiB",
        f"schedule {job.schedule_name}, P={job.pp}, V={job.vpp}, M={job.microbatches}",
    )
    return Symptom("uneven-memory", "One stage holds far more memory", "info", numbers, (advice,))
