"""Fewer microbatches than ranks along the pipeline: it is never full.

What it finds: M below P, and the bubble is the largest loss.

Why it matters: With fewer microbatches than ranks some rank is idle at every moment. 1F1B of torch refuses such a
shape; other code has hung in its warm-up, waiting for microbatches that do not exist.

What to try: At least as many microbatches as ranks along the pipeline, better 2 to 3 times as many; where the batch
cannot grow, a shorter pipeline with more data parallelism.

Source: pytorch/torchtitan#775.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of, is_verdict, severity
from ppdiag.diagnosis import Advice, Cause, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="--global-batch-size of at least P x micro batch x DP, or a smaller --micro-batch-size",
    torch="n_microbatches of at least P in the schedule's constructor",
    deepspeed="gradient_accumulation_steps of at least P",
    other="at least P microbatches a step, or a smaller P",
)
MEASURE_AFTER = "bubble of the step, and time a microbatch"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where M < P and the bubble is the verdict."""
    job = evidence.diagnosis.job
    if not is_verdict(evidence, Cause.BUBBLE) or job.microbatches >= job.pp:
        return None
    share = evidence.diagnosis.why.bubble
    advice = Advice(
        action=f"Run at least {job.pp} microbatches a step, or shorten the pipeline",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="pytorch/torchtitan#775",
        measure_after=MEASURE_AFTER,
    )
    numbers = (f"M={job.microbatches} microbatches for P={job.pp} ranks", f"bubble {percent(share)} of the step")
    return Symptom("few-microbatches", "Fewer microbatches than ranks", severity(share), numbers, (advice,))
