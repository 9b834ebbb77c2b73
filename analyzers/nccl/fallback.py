"""Does TCP carry what RDMA could? Judged by channel lines alone; what was loaded only gives the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppdiag.analyzers.nccl.model import Fallback, FallbackStatus, Family

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.analyzers.nccl.model import Connection, Hca

SWITCHED_OFF, PLUGIN_FAILED, NO_DEVICE, TCP_PROVIDER = "switched off", "plug-in failed", "no device", "TCP provider"

_ADVICE = {
    FallbackStatus.FALLBACK: (
        "Let NCCL use the RDMA devices: unset NCCL_IB_DISABLE and NCCL_NET, name the devices with NCCL_IB_HCA, give "
        "the container /dev/infiniband and the memlock limit. NCCL_NET=IB makes NCCL fail instead of falling back."
    ),
    FallbackStatus.POSSIBLE: (
        "If these hosts have InfiniBand, RoCE or EFA, the process cannot see it: run ibv_devices (fi_info) where the "
        "job runs; give the container the devices, libibverbs and the vendor's provider."
    ),
    FallbackStatus.SOCKET: "Run once with NCCL_DEBUG=INFO from the start: the log lacks the lines on RDMA devices.",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why RDMA is not used on a host, as far as a line says."""

    host: str
    kind: str
    """``SWITCHED_OFF``, ``PLUGIN_FAILED``, ``NO_DEVICE`` or ``TCP_PROVIDER``."""
    text: str


def find_fallback(connections: Sequence[Connection], hcas: Sequence[Hca], reasons: Sequence[Reason]) -> Fallback:
    """The verdict on all connections that the logs prove.

    Args:
        connections: of all hosts.
        hcas: RDMA devices that NCCL listed.
        reasons: from lines of any host.
    """
    tcp = [connection for connection in connections if _is_tcp(connection, reasons)]
    if not tcp:
        return Fallback(FallbackStatus.NONE if connections else FallbackStatus.UNKNOWN)
    hosts = {connection.process.host for connection in tcp}
    proven = {hca.host for hca in hcas} | {r.host for r in reasons if r.kind in {SWITCHED_OFF, PLUGIN_FAILED}}
    hidden = {reason.host for reason in reasons if reason.kind in {NO_DEVICE, TCP_PROVIDER}}
    if hosts & proven:
        status, where = FallbackStatus.FALLBACK, hosts & proven
    elif hosts & hidden:
        status, where = FallbackStatus.POSSIBLE, hosts & hidden
    else:
        status, where = FallbackStatus.SOCKET, hosts
    return Fallback(
        status=status,
        hosts=tuple(sorted(where)),
        connections=sum(connection.process.host in where for connection in tcp),
        reasons=_reasons(where, hcas, reasons),
        advice=_ADVICE[status],
    )


def _is_tcp(connection: Connection, reasons: Sequence[Reason]) -> bool:
    if connection.family is not Family.LIBFABRIC:
        return connection.family is Family.SOCKET
    return any(reason.kind == TCP_PROVIDER and reason.host == connection.process.host for reason in reasons)


def _reasons(hosts: set[str], hcas: Sequence[Hca], reasons: Sequence[Reason]) -> tuple[str, ...]:
    texts = [reason.text for reason in reasons if reason.host in hosts]
    names = sorted({hca.name for hca in hcas if hca.host in hosts})
    if names:
        texts.append(f"NCCL listed RDMA devices on these hosts: {', '.join(names[:8])}")
    return tuple(dict.fromkeys(texts))
