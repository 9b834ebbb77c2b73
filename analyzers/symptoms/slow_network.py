"""Slower across machines than on one: transfers hold the pipeline up.

What it finds: Communication is the largest loss: bytes in flight, not late senders.

Why it matters: Every microbatch crosses each stage boundary twice; a slow link is paid 2 M times a step. Many such
cases end with NCCL on TCP although the machines have RDMA.

What to try: Keep the pipeline inside a machine and run data parallelism across; check which transport NCCL took; no
interleaving over a slow network, since it multiplies the messages.

Source: NCCL's user guide on NCCL_DEBUG and NCCL_IB_HCA; hpcaitech/ColossalAI#4747, NVIDIA/nccl#481.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of, is_verdict, severity
from ppdiag.diagnosis import Advice, Cause, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="--use-tp-pp-dp-mapping, which lays the ranks of a pipeline next to each other; NCCL_DEBUG=INFO shows "
    "the transport",
    other="order of the ranks: pipeline ranks adjacent within a machine; NCCL_DEBUG=INFO shows the transport: P2P or "
    "SHM inside a machine, NET/IB across, not NET/Socket",
)
MEASURE_AFTER = "bandwidth of the links table"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where communication is the verdict."""
    if not is_verdict(evidence, Cause.COMMUNICATION):
        return None
    share = evidence.diagnosis.why.communication
    return Symptom(
        id="slow-network",
        title="Transfers hold the pipeline up",
        severity=severity(share),
        evidence=(f"communication {percent(share)} of the step", *_slowest_links(evidence)),
        advice=(_advice(evidence),),
    )


def _slowest_links(evidence: Evidence) -> list[str]:
    links = sorted(evidence.diagnosis.links, key=lambda link: -link.transfer_s)[:2]
    return [
        f"stage {link.src_stage} to {link.dst_stage}: {f'{link.bytes} bytes' if link.bytes else 'a message'} in "
        f"{link.transfer_s * 1e3:.2f} ms"
        + (f" ({link.bandwidth_bytes_per_s / 1e6:.1f} MB/s)" if link.bandwidth_bytes_per_s else "")
        for link in links
        if link.transfer_s > 0
    ]


def _advice(evidence: Evidence) -> Advice:
    hosts = {rank.host for rank in evidence.diagnosis.ranks}
    if len(hosts) > 1:
        action = "Keep each pipeline inside one machine, and put data parallelism across machines"
        how = evidence.says(HOW)
    else:
        action = "Find out why transfers inside one machine are slow"
        how = "NCCL_DEBUG=INFO: the channel lines should say P2P or SHM, not NET/Socket"
    return Advice(
        action=action,
        how=how,
        gain_fraction=max(0.0, evidence.gains[Cause.COMMUNICATION]),
        source="replay of the run with free transfers: an upper bound",
        measure_after=MEASURE_AFTER,
    )
