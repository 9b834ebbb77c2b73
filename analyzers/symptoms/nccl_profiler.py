"""A profiler plug-in is loaded into NCCL: small messages pay for it.

What it finds: NCCL's log or environment names a profiler plug-in, and communication costs 5 % of the step or more.

Why it matters: Events at the kernel's level are written by the GPU, with a fence, for each message: small ones were 4
to 13 % slower in the thread below.

What to try: Fewer kinds of events, or no plug-in but to measure.

Source: NVIDIA/nccl#2355, NVIDIA/nccl PR#2357, NVIDIA/nccl#1809.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of, severity
from ppdiag.diagnosis import WORTH_SAYING, Advice, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

VARIABLE = "NCCL_PROFILER_PLUGIN"
HOW = in_words_of(other=f"unset {VARIABLE}, or NCCL_PROFILE_EVENT_MASK without the events of kernels")
MEASURE_AFTER = "communication of the step"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where such a plug-in is there and communication costs something."""
    share, variables = evidence.diagnosis.why.communication, evidence.variables
    loaded = [name for kind, name in evidence.trace.nccl.get("plugins", ()) if kind == "profiler"]
    named = variables.get(VARIABLE, "")
    if share < WORTH_SAYING or not (loaded or named) or named == "none":
        return None
    advice = Advice(
        action="Run without the profiler plug-in",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="NVIDIA/nccl#2355",
        measure_after=MEASURE_AFTER,
    )
    mask = variables.get("NCCL_PROFILE_EVENT_MASK", "not set")
    numbers = (
        f"communication {percent(share)} of the step",
        f"profiler plug-in {', '.join(loaded) or named}; NCCL_PROFILE_EVENT_MASK {mask}",
    )
    return Symptom("nccl-profiler", "A profiler inside NCCL", severity(share), numbers, (advice,))
