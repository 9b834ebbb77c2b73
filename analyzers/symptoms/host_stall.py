"""The host is late: inputs are there, and the next op is not started.

What it finds: Host time is the largest loss: Python, data loading, logging, checkpoints, garbage collection, or a call
that waits for the device.

Why it matters: One late rank holds up the whole pipeline; the profile of the GPUs shows only that they wait.

What to try: Move what the script does between steps and before the optimizer off the named rank's main thread, or do it
less often.

Source: NVIDIA/Megatron-LM#1625, NVIDIA/Megatron-LM#543, NVIDIA/Megatron-LM#225, pytorch/torchtitan PR#148.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of, is_verdict, severity
from ppdiag.diagnosis import Advice, Cause, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    other="a Python profile of the rank named (py-spy record --pid ...): data, logging, checkpoints, .item() calls"
)
MEASURE_AFTER = "host time of the stage table"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where host time is the verdict."""
    if not is_verdict(evidence, Cause.HOST):
        return None
    diagnosis = evidence.diagnosis
    rank = diagnosis.verdict.rank
    named = f"rank {rank}" if rank is not None else "the ranks"
    own = next((row for row in diagnosis.ranks if row.rank == rank), None)
    numbers = [f"host {percent(diagnosis.why.host)} of the step"]
    if own is not None:
        numbers.append(f"rank {rank} stood {percent(own.where.host)} of the step outside of compute and waits")
    numbers.append(
        f"phases of a step, means: pipeline {diagnosis.phases.pipeline_s * 1e3:.1f} ms, "
        f"tail {diagnosis.phases.tail_s * 1e3:.1f} ms, between steps {diagnosis.phases.between_s * 1e3:.1f} ms"
    )
    advice = Advice(
        action=f"Find what {named} {'do' if rank is None else 'does'} outside of the pipeline's ops",
        how=f"a Python profile of {named} (py-spy record --pid ...): data, logging, checkpoints, .item() calls",
        gain_fraction=max(0.0, evidence.gains[Cause.HOST]),
        source="replay of the run without host time: an upper bound",
        measure_after=MEASURE_AFTER,
    )
    return Symptom("host-stall", "The host is late", severity(diagnosis.why.host), tuple(numbers), (advice,))
