"""Slower across machines than on one: transfers hold the pipeline up.

What it finds: Communication is the largest loss: bytes in flight between stages, not late senders or collectives.

Why it matters: Every microbatch crosses each stage boundary twice; a slow link is paid 2 M times a step. Many such
cases end with NCCL on TCP although the machines have RDMA.

What to try: Keep the pipeline inside a machine and run data parallelism across; check which transport NCCL took; no
interleaving over a slow network, since it multiplies the messages.

Source: NCCL's user guide on NCCL_DEBUG and NCCL_IB_HCA; hpcaitech/ColossalAI#4747, NVIDIA/nccl#481.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.symptoms import in_words_of, is_verdict, severity
from ppdiag.analyzers.symptoms.slow_collectives import are_collectives
from ppdiag.diagnosis import Advice, Cause, Symptom, percent
from ppdiag.model import Flag

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="--use-tp-pp-dp-mapping, which lays the ranks of a pipeline next to each other; NCCL_DEBUG=INFO shows "
    "the transport",
    other="order of the ranks: pipeline ranks adjacent within a machine; NCCL_DEBUG=INFO shows the transport: P2P or "
    "SHM inside a machine, NET/IB across, not NET/Socket",
)
INSIDE_ON_GPUS = "NCCL_DEBUG=INFO: the channel lines should say P2P or SHM, not NET/Socket"
INSIDE_ON_CPUS = "other processes on the CPUs that carry the messages; GLOO_SOCKET_IFNAME=lo keeps gloo on the loopback"
MEASURE_AFTER = "bandwidth of the links table"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where communication is the verdict, and messages are the larger part of it."""
    if not is_verdict(evidence, Cause.COMMUNICATION) or are_collectives(evidence):
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


def _on_gpus(evidence: Evidence) -> bool:
    """Whether the record has ops or waits of a device, or NCCL has said anything."""
    on_device = (evidence.trace.spans["flags"] & np.uint16(Flag.DEVICE)) != 0
    return bool(on_device.any() or evidence.trace.transports or evidence.trace.nccl)


def _advice(evidence: Evidence) -> Advice:
    hosts = {rank.host for rank in evidence.diagnosis.ranks}
    if len(hosts) > 1:
        action = "Keep each pipeline inside one machine, and put data parallelism across machines"
        how = evidence.says(HOW)
    else:
        action = "Find out why transfers inside one machine are slow"
        how = INSIDE_ON_GPUS if _on_gpus(evidence) else INSIDE_ON_CPUS
    return Advice(
        action=action,
        how=how,
        gain_fraction=max(0.0, evidence.gains[Cause.COMMUNICATION]),
        source="replay of the run with free transfers: an upper bound",
        measure_after=MEASURE_AFTER,
    )
