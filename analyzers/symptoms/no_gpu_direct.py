"""RDMA without GPU Direct: messages pass through host memory on their way to the card.

What it finds: Receiving RDMA channels without GDRDMA, on hosts where NCCL found GPU Direct RDMA disabled, and
communication costs 5 % of the step or more.

Why it matters: The detour through host memory cost two thirds and more of the bandwidth in the threads below (33
instead of 93, 10 instead of 180 GB/s), mostly after an update of the system had lost a kernel module.

What to try: The module nvidia-peermem, or a driver with DMA-BUF; then PCIe's ACS.

Source: NVIDIA/nccl#1676, NVIDIA/nccl#1412, NVIDIA/nccl#1537, NVIDIA/nccl#1939.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of, severity
from ppdiag.diagnosis import WORTH_SAYING, Advice, Cause, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    other="modprobe nvidia-peermem on each host (lsmod shows it); ACS off; NCCL_NET_GDR_LEVEL=SYS to compare"
)
MEASURE_AFTER = "GDRDMA in the transport column, and bandwidth of the links table"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where NCCL's log proves it, and communication costs 5 % of the step."""
    share = evidence.diagnosis.why.communication
    rows = [row for row in evidence.trace.nccl.get("messages", ()) if row["slug"] == "no-gpu-direct"]
    if not rows or share < WORTH_SAYING:
        return None
    advice = Advice(
        action="Get GPU Direct RDMA back",
        how=evidence.says(HOW),
        gain_fraction=max(0.0, evidence.gains[Cause.COMMUNICATION]),
        source="replay of the run with free transfers: an upper bound",
        measure_after=MEASURE_AFTER,
    )
    hosts = ", ".join(rows[0]["hosts"][:4])
    numbers = (f"communication {percent(share)} of the step", f"{rows[0]['text']} ({hosts})")
    return Symptom("no-gpu-direct", "RDMA without GPU Direct", severity(share), numbers, (advice,))
