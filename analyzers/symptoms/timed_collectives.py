"""NCCL's own timing is on: its events hold back other streams.

What it finds: TORCH_NCCL_ENABLE_TIMING=1 in a job that loses time to communication.

Why it matters: Events that take the time are recorded on NCCL's stream around each op. With
CUDA_DEVICE_MAX_CONNECTIONS=1 they end the overlap of computation and communication; without, they still cost host time
for each op.

What to try: Switch it off for production; switch it on for one run to measure.

Source: NVIDIA/TransformerEngine#1353, pytorch/pytorch#143890, PaddlePaddle/Paddle PR#57574.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of, severity
from ppdiag.diagnosis import WORTH_SAYING, Advice, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

VARIABLE = "TORCH_NCCL_ENABLE_TIMING"
HOW = in_words_of(other=f"unset {VARIABLE}")
MEASURE_AFTER = "communication of the step"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where the variable is on and communication costs 5 % of the step."""
    share, variables = evidence.diagnosis.why.communication, evidence.variables
    if variables.get(VARIABLE, "0").lower() not in ("1", "true", "on", "yes", "y") or share < WORTH_SAYING:
        return None
    queues = variables.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
    advice = Advice(
        action="Switch NCCL's timing off",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="pytorch/pytorch#143890",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        f"{VARIABLE}={variables[VARIABLE]}, CUDA_DEVICE_MAX_CONNECTIONS {queues}",
        f"communication {percent(share)} of the step",
    )
    return Symptom("timed-collectives", "NCCL's own timing is on", severity(share), numbers, (advice,))
