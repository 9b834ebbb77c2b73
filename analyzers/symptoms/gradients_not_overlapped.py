"""Gradient reduction does not overlap: one hardware queue, and no tensor parallelism that would need it.

What it finds: CUDA_DEVICE_MAX_CONNECTIONS=1 in a job without tensor parallelism that stands in collectives for a part
of the step.

Why it matters: With one queue, kernels run in the order of their launches: the reduction of gradients waits behind the
backward instead of running beside it. The setting is meant for tensor and context parallelism.

What to try: Leave it unset where TP and CP are 1.

Source: NVIDIA/Megatron-LM#1468, NVIDIA/Megatron-LM#636, NVIDIA/Megatron-LM#533, NVIDIA/nccl#2238.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of, severity
from ppdiag.diagnosis import WORTH_SAYING, Advice, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
HOW = in_words_of(
    megatron=f"unset {VARIABLE} where --tensor-model-parallel-size and --context-parallel-size are 1; "
    "--overlap-grad-reduce",
    other=f"unset {VARIABLE}; FSDP2 with tensor parallelism of the framework's own: 16 to 32",
)
MEASURE_AFTER = "collective wait of the stage table, and the tail of the step"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where the variable is 1, TP is 1, and collectives take 5 % of the step."""
    job, share = evidence.diagnosis.job, evidence.diagnosis.where.collective
    context = evidence.options.get("context-parallel-size", "1")
    if evidence.variables.get(VARIABLE) != "1" or job.tp != 1 or context != "1" or share < WORTH_SAYING:
        return None
    advice = Advice(
        action=f"Unset {VARIABLE}",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="NVIDIA/Megatron-LM#1468",
        measure_after=MEASURE_AFTER,
    )
    tail = evidence.diagnosis.phases.tail_s
    numbers = (
        f"{VARIABLE}=1, TP=1, DP={job.dp}",
        f"the ranks stand in collectives for {percent(share)} of the step; the tail takes {tail * 1e3:.1f} ms",
    )
    return Symptom("gradients-not-overlapped", "Gradients reduced without overlap", severity(share), numbers, (advice,))
