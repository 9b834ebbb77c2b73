"""Memory not full on average, yet out of memory: an activation spike.

What it finds: A rank ended with an out-of-memory error, in a schedule that holds many microbatches' activations.

Why it matters: Average memory says nothing of the peak: GPipe holds the activations of all M microbatches, 1F1B up to P
on the first stage, interleaved more.

What to try: A smaller microbatch, activation checkpointing, fewer virtual stages, 1F1B instead of GPipe.

Source: Huang et al., GPipe (2019); Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (2021).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.steps import pipeline_work
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom
from ppdiag.model import Kind

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="a smaller --micro-batch-size, --recompute-granularity selective (then full), or fewer virtual stages",
    torch="more n_microbatches for the same batch, checkpoint_wrapper on the stage's blocks, or fewer stages a rank",
    deepspeed="a smaller train_micro_batch_size_per_gpu with as many more gradient_accumulation_steps, or "
    "activation_checkpoint_interval of PipelineModule",
    other="a smaller microbatch, activation checkpointing, or fewer virtual stages",
)
MEASURE_AFTER = "peak memory of each stage"
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory")


def find(evidence: Evidence) -> Symptom | None:
    """Fires where a rank's uncaught exception says that memory ran out."""
    failed = [
        rank
        for rank, facts in sorted(evidence.trace.ranks.items())
        if any(words in str(facts.facts.get("raised", "")) for words in OUT_OF_MEMORY)
    ]
    if not failed:
        return None
    job = evidence.diagnosis.job
    numbers = [
        f"rank {rank} ran out of memory; it held up to {_in_flight(evidence, rank)} microbatches" for rank in failed
    ]
    schedule = "1F1B instead of GPipe, " if job.schedule_name == "GPipe" else ""
    advice = [
        Advice(
            action="Hold fewer or smaller activations",
            how=f"{schedule}{evidence.says(HOW)}",
            gain_fraction=None,
            source="GPipe holds M microbatches, 1F1B at most P",
            measure_after=MEASURE_AFTER,
        )
    ]
    return Symptom(
        "activation-spike", "Out of memory at a peak of activations", "critical", tuple(numbers), tuple(advice)
    )


def _in_flight(evidence: Evidence, rank: int) -> int:
    """Most forwards of the rank whose backward was still to come."""
    spans = evidence.trace.spans
    own = spans[(spans["rank"] == rank) & pipeline_work(spans)]
    change = np.where(own["kind"] == Kind.FORWARD, 1, np.where(own["kind"] == Kind.BACKWARD, -1, 0))
    return int(np.cumsum(change).max(initial=0))
