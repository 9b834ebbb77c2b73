"""TCP fallback: NCCL sends over sockets although the machine has RDMA.

What it finds: Links whose channel lines in NCCL's log say NET/Socket, on hosts where NCCL listed InfiniBand or RoCE
devices, or where RDMA was switched off or its plug-in failed; and communication costs enough for a word. What NCCL
loaded ("Using network IB") proves nothing and is not used.

Why it matters: TCP moved a fifth to a tenth of what the same machines moved by RDMA (5 instead of 25 GB/s, 1.25 instead
of 12, in the threads below), and NCCL says so in lines that nobody reads.

What to try: Make the devices visible and usable for the process; let NCCL_NET=IB turn a fallback into an error.

Source: NCCL's user guide on NCCL_IB_DISABLE, NCCL_IB_HCA and NCCL_NET; inclusionAI/AReaL#639, NVIDIA/nccl#1913,
vllm-project/vllm#6610.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ppdiag.analyzers.symptoms import in_words_of, severity
from ppdiag.diagnosis import WORTH_SAYING, Advice, Cause, Symptom, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    other="unset NCCL_IB_DISABLE and NCCL_NET; name the devices with NCCL_IB_HCA; give the container /dev/infiniband "
    "and the memlock limit; NCCL_NET=IB makes NCCL fail instead of falling back"
)
MEASURE_AFTER = "transport and bandwidth in the links table; ppdiag nccl on the new log"
_PROVEN = "fallback"
_SHOWN = 4


def find(evidence: Evidence) -> Symptom | None:
    """Fires where NCCL's logs prove TCP beside RDMA, and communication costs at least 5 % of the step."""
    share = evidence.diagnosis.why.communication
    rows = [row for row in evidence.diagnosis.transports if (row.get("fallback") or {}).get("status") == _PROVEN]
    if not rows or share < WORTH_SAYING:
        return None
    return Symptom(
        id="tcp-fallback",
        title="NCCL uses TCP although RDMA is there",
        severity=severity(share),
        evidence=(f"communication {percent(share)} of the step", *_links(rows), *rows[0]["fallback"]["reasons"]),
        advice=(_advice(evidence, rows[0]["fallback"]["advice"]),),
    )


def _links(rows: Sequence[dict[str, Any]]) -> list[str]:
    texts = [
        f"{_end(row['src_rank'])} to {_end(row['dst_rank'])}: {row['channels']} channels by {row['transport']}"
        for row in rows
    ]
    more = len(texts) - _SHOWN
    return texts[:_SHOWN] + ([f"and {more} more pairs of ranks"] if more > 0 else [])


def _end(rank: int | None) -> str:
    return "a rank" if rank is None else f"rank {rank}"


def _advice(evidence: Evidence, how: str) -> Advice:
    return Advice(
        action="Get NCCL onto RDMA",
        how=how,
        gain_fraction=max(0.0, evidence.gains[Cause.COMMUNICATION]),
        source="replay of the run with free transfers: an upper bound",
        measure_after=MEASURE_AFTER,
    )
