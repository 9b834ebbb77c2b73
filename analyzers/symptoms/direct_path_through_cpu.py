"""GPUs talk directly, by a path through the CPU: slower than through host memory.

What it finds: The verdict is communication between two ranks of one machine, whose channels are P2P and whose
bandwidth is below what PCIe gives.

Why it matters: Direct copies between GPUs under different CPU sockets pass the link between the sockets, for which
some machines are bad; copies through host memory can be faster there.

What to try: Allow direct copies within a socket only, and measure.

Source: NVIDIA/nccl#1817.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of, is_verdict, severity
from ppdiag.diagnosis import Advice, Cause, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

SLOW_BYTES_PER_S = 8e9
"""PCIe of the third generation gives 12 GB/s in practice."""
LEAST_BYTES = 1 << 20
"""Smaller messages are bound by latency, which says nothing of the path."""
HOW = in_words_of(other="NCCL_P2P_LEVEL=NODE; nvidia-smi topo -m shows which pairs are under one socket (SYS: not)")
MEASURE_AFTER = "bandwidth and transport of the links table"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where communication is the verdict and a P2P link between large messages is slow."""
    if not is_verdict(evidence, Cause.COMMUNICATION):
        return None
    slow = [
        link
        for link in evidence.diagnosis.links
        if (link.transport or "").startswith("P2P")
        and link.bytes >= LEAST_BYTES
        and link.bandwidth_bytes_per_s is not None
        and link.bandwidth_bytes_per_s < SLOW_BYTES_PER_S
    ]
    if not slow:
        return None
    share = evidence.diagnosis.why.communication
    advice = Advice(
        action="Try the way through host memory for distant GPUs",
        how=evidence.says(HOW),
        gain_fraction=max(0.0, evidence.gains[Cause.COMMUNICATION]),
        source="replay of the run with free transfers: an upper bound",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        f"communication {percent(share)} of the step",
        *(
            f"stage {link.src_stage} to {link.dst_stage} by {link.transport}: "
            f"{(link.bandwidth_bytes_per_s or 0) / 1e9:.1f} GB/s"
            for link in slow[:4]
        ),
    )
    return Symptom("direct-path-through-cpu", "Direct copies on a slow path", severity(share), numbers, (advice,))
