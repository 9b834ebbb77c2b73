"""What follows from several lines together, and NCCL itself does not complain about."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ppdiag.analyzers.nccl.model import Family, Message, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ppdiag.analyzers.nccl.model import Connection, Hca, Interface

_INSIDE_ONE_MACHINE = re.compile(r"(?:veth|docker|virbr|cni|flannel|cali|ip6tnl|sit|tunl|lxc)")
"""Names that Linux, Docker and Kubernetes give to interfaces which lead to no other machine."""


def find_more(
    connections: Sequence[Connection], hcas: Sequence[Hca], interfaces: Sequence[Interface]
) -> tuple[Message, ...]:
    """Findings in the form of NCCL's own messages."""
    return (*_without_gpu_direct(connections, hcas), *_odd_interfaces(interfaces))


def _without_gpu_direct(connections: Sequence[Connection], hcas: Sequence[Hca]) -> Iterator[Message]:
    """RDMA that passes through host memory. Receivers tell: sending without GPU Direct is normal on many machines.

    Source: NVIDIA/nccl#1676 (180 to 10 GB/s after an update), NVIDIA/nccl#1412 (33 instead of 93 GB/s).
    """
    disabled = {hca.host for hca in hcas if hca.gdr is False}
    received = [each for each in connections if each.family is Family.IB and each.direction == "receive"]
    slow = [each for each in received if not each.gdrdma and each.process.host in disabled]
    if slow:
        yield Message(
            slug="no-gpu-direct",
            severity=Severity.WARNING,
            text=f"{len(slow)} of {len(received)} receiving RDMA channels pass through host memory (no GDRDMA), on "
            "hosts where NCCL found GPU Direct RDMA disabled",
            where="",
            advice="Load nvidia-peermem or use a driver with DMA-BUF on these hosts; then check ACS and "
            "NCCL_NET_GDR_LEVEL.",
            count=1,
            hosts=tuple(sorted({each.process.host for each in slow})),
        )


def _odd_interfaces(interfaces: Sequence[Interface]) -> Iterator[Message]:
    """An interface that leads to no other machine, in a log of several.

    Source: pytorch/pytorch#68893 (veth), NVIDIA/nccl#529 (ip6tnl), NVIDIA/nccl#975 (link-local address).
    """
    if len({each.host for each in interfaces}) < 2:  # one machine may use any
        return
    for each in interfaces:
        if _INSIDE_ONE_MACHINE.match(each.name) or each.address.lower().startswith("fe80"):
            yield Message(
                slug="odd-interface",
                severity=Severity.WARNING,
                text=f"NCCL chose the interface {each.name} {each.address} ({each.use}), which may lead to no other "
                "machine",
                where="",
                advice="Set NCCL_SOCKET_IFNAME to the interface that all hosts share.",
                count=1,
                hosts=(each.host,),
            )
