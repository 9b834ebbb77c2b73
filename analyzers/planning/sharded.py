"""Training without a pipeline by ZeRO-3 or FSDP, alone or with tensor parallelism: does it fit, and in what time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppdiag.analyzers.planning import memory, rules
from ppdiag.analyzers.planning.models import VALUE_BYTES

if TYPE_CHECKING:
    from ppdiag.analyzers.planning.layout import Job

MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A way without pipeline parallelism: does it fit, and in what time."""

    name: str
    fits: bool
    memory_bytes: float
    step_s: float | None
    words: str


def ways(job: Job) -> list[Alternative]:
    """ZeRO-3 or FSDP alone, and with the tensor parallelism that makes it fastest, where some is possible."""
    cluster, model = job.cluster, job.model
    sizes = [
        size
        for size in range(2, cluster.gpus_per_node + 1)
        if cluster.gpus_per_node % size == 0 and cluster.gpus % size == 0 and model.heads % size == 0
    ]
    found = [_way(job, 1)]
    if sizes:
        found.append(min((_way(job, size) for size in sizes), key=_rank))
    return found


def _rank(way: Alternative) -> tuple[bool, float]:
    """The fastest that fits; of none that does, the smallest."""
    return not way.fits, way.step_s if way.fits and way.step_s is not None else way.memory_bytes


def _way(job: Job, tensor: int) -> Alternative:
    """Every layer computed again, with the largest microbatch that fits."""
    replicas = job.cluster.gpus // tensor
    name = "ZeRO-3 or FSDP alone" if tensor == 1 else f"ZeRO-3 or FSDP with TP = {tensor}"
    share, left_over = divmod(job.global_batch, replicas)
    micros = [micro for micro in MICRO_BATCHES if share and share % micro == 0] or [1]
    sizes = {micro: _bytes(job, tensor, micro) for micro in micros}
    fitting = [micro for micro in micros if sizes[micro] <= rules.usable_bytes(job)]
    micro = max(fitting, default=1)
    if left_over or not share:
        words = f"a global batch of {job.global_batch} is no multiple of {replicas} replicas"
        return Alternative(name, fits=False, memory_bytes=sizes[micro], step_s=None, words=words)
    compute, traffic = _compute_s(job, tensor, share), share // micro * _traffic_s(job, tensor)
    words = f"fits with a micro batch of {micro}" if fitting else "does not fit"
    words += (
        "; its traffic can hide behind its compute"
        if traffic <= compute
        else "; its traffic takes longer than its compute"
    )
    return Alternative(name, fits=bool(fitting), memory_bytes=sizes[micro], step_s=max(compute, traffic), words=words)


def _bytes(job: Job, tensor: int, micro_batch: int) -> float:
    return memory.sharded_bytes(
        job.model, ranks=job.cluster.gpus, micro_batch=micro_batch, tensor=tensor, flash=job.flash
    )


def _compute_s(job: Job, tensor: int, sequences: int) -> float:
    """Of one replica's sequences: each layer twice forward and once backward, and six sums over TP."""
    model, device = job.model, job.cluster.device
    flops = model.step_flops * 4 / 3 / tensor
    summed = 6 * model.layers * model.boundary_bytes * 2 * (tensor - 1) / tensor
    return sequences * (flops / (device.flops_per_s * job.efficiency) + summed / device.nvlink_bytes_per_s)


def _traffic_s(job: Job, tensor: int) -> float:
    """Of one microbatch: bf16 weights gathered twice, fp32 gradients reduce-scattered."""
    cluster, replicas = job.cluster, job.cluster.gpus // tensor
    inside = cluster.gpus <= cluster.gpus_per_node
    bandwidth = cluster.device.nvlink_bytes_per_s if inside else cluster.network_bytes_per_s
    return job.model.parameters / tensor * (2 * VALUE_BYTES + 4) * (replicas - 1) / replicas / bandwidth
