"""Devices, networks and clusters: the numbers of their data sheets."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU.

    Attributes:
        memory_bytes: as the driver reports it.
        flops_per_s: dense bf16 peak.
        nvlink_bytes_per_s: to all other GPUs of its node together, one direction.
        memory_bytes_per_s: of its own memory.
    """

    memory_bytes: int
    flops_per_s: float
    nvlink_bytes_per_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Network:
    """What connects nodes.

    Attributes:
        bytes_per_s: one direction.
        per_gpu: each GPU has its own port; else one port serves the whole node.
        latency_s: of one message.
    """

    bytes_per_s: float
    per_gpu: bool
    latency_s: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs in nodes."""

    gpus: int
    gpus_per_node: int
    device: Device
    network: Network

    @property
    def network_bytes_per_s(self) -> float:
        """Network bandwidth of one GPU while all GPUs of its node use it."""
        return self.network.bytes_per_s / (1 if self.network.per_gpu else self.gpus_per_node)


DEVICES = {
    # NVIDIA's data sheets (SXM parts): dense bf16, without sparsity; NVLink one way. Memory as the driver shows it.
    "a100-40": Device(40 * GIB, 312e12, 300e9, 1.555e12),
    "a100": Device(80 * GIB, 312e12, 300e9, 2.039e12),
    "h100": Device(80 * GIB, 989.4e12, 450e9, 3.35e12),
    "h200": Device(139 * GIB, 989.4e12, 450e9, 4.8e12),
    "b200": Device(178 * GIB, 2250e12, 900e9, 8.0e12),
}
NETWORKS = {
    # Line rates. Latencies: the order of what RDMA and TCP take; they matter for small messages only.
    "ndr": Network(50e9, per_gpu=True, latency_s=5e-6),
    "hdr": Network(25e9, per_gpu=True, latency_s=5e-6),
    "roce200": Network(25e9, per_gpu=True, latency_s=10e-6),
    "roce400": Network(50e9, per_gpu=True, latency_s=10e-6),
    "100gbe": Network(12.5e9, per_gpu=False, latency_s=30e-6),
    "10gbe": Network(1.25e9, per_gpu=False, latency_s=30e-6),
    "1gbe": Network(0.125e9, per_gpu=False, latency_s=30e-6),
}
