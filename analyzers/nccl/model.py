"""What an NCCL log says: plain records, none of which knows how it was read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

SCHEMA = "ppdiag.nccl/1"


class Family(str, Enum):
    """Kind of a transport."""

    P2P = "P2P"
    """GPU to GPU inside a machine or an NVLink domain."""
    SHM = "SHM"
    """Through host memory of one machine."""
    IB = "IB"
    """RDMA by NCCL's own verbs transport or the vendor's plug-in (IBext)."""
    LIBFABRIC = "Libfabric"
    """A Libfabric plug-in; which provider is below it, ``NcclReport.providers`` says."""
    SOCKET = "Socket"
    """TCP."""
    OTHER_NET = "other network"
    """A network plug-in of another name."""
    COLLNET = "CollNet"
    """Reductions inside the network (SHARP)."""


@dataclass(frozen=True, slots=True)
class Process:
    """One GPU of one process; a process with several GPUs is several of these."""

    host: str
    pid: int
    device: int
    """CUDA index of the GPU inside the process, as it stands in brackets after the thread."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a connection."""

    rank: int
    """Rank inside the communicator, which is the job's rank in its world communicator only."""
    device: str
    """As printed: the bus id in hex up to NCCL 2.18.1, the NVML index in decimal from 2.18.3."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One channel between two ranks, as one side of it reported it."""

    process: Process
    """Who wrote the line."""
    communicator: str
    """Its commId; before NCCL 2.16 its address in ``process``; empty where the log does not say which it is."""
    channel: int
    index: int | None
    """NCCL's connIndex; None before 2.12.7 and for shared memory."""
    source: Endpoint | None
    """None where the other end is the network itself (CollNet)."""
    destination: Endpoint | None
    direction: str
    """send | receive: the side that wrote the line. P2P and SHM are written by the sending side."""
    transport: str
    """Without its flags: ``P2P/CUMEM``, ``P2P/MNNVL``, ``SHM/direct/direct``, ``NET/IB``, ``NET/Socket``, ..."""
    family: Family
    net_device: int | None = None
    """Index of the network device."""
    gdrdma: bool = False
    """The network card reads and writes GPU memory itself."""
    flags: tuple[str, ...] = ()
    """Further words of the line: ``read``, ``CE`` (copy engine), ``PCI``, ``Shared``."""
    proxy_rank: int | None = None
    """PXN: the rank whose network card is used."""
    source_job_rank: int | None = None
    destination_job_rank: int | None = None

    @property
    def text(self) -> str:
        """The transport with what matters for its speed, in NCCL's own words.

        >>> p, end = Process("a", 1, 0), Endpoint(0, "0")
        >>> Connection(p, "", 0, 0, end, end, "send", "NET/IB", Family.IB, gdrdma=True, proxy_rank=4).text
        'NET/IB/GDRDMA (PXN)'
        """
        parts = [self.transport, *(flag for flag in self.flags if flag in {"read", "CE"})]
        parts += ["GDRDMA"] if self.gdrdma else []
        return "/".join(parts) + (" (PXN)" if self.proxy_rank is not None else "")


@dataclass(frozen=True, slots=True)
class Communicator:
    """A communicator as one of its ranks reported it."""

    id: str
    process: Process
    rank: int
    size: int
    """Number of its ranks."""
    nvml_device: int | None = None
    bus_id: str = ""
    parent: str = ""
    """Address of the communicator that it was split from."""
    nodes: int | None = None
    mnnvl: bool = False
    """Its ranks share one NVLink domain over several machines."""
    nvls: bool = False
    """NVLink SHARP was set up for it (collectives inside the NVSwitch)."""
    channels: int | None = None
    """For collectives."""
    p2p_channels: int | None = None
    rings: int = 0
    trees: int = 0
    collnet: bool = False
    ended: str = ""
    """Destroy | Abort | Revoke, where the log shows its end."""


@dataclass(frozen=True, slots=True)
class Hca:
    """An RDMA device that NCCL saw on a host."""

    host: str
    name: str
    port: int | None
    link: str
    """IB, RoCE, or as printed."""
    speed_mbps: int | None = None
    provider: str = ""
    gdr: bool | None = None
    """Whether NCCL found GPU Direct RDMA usable with it."""


@dataclass(frozen=True, slots=True)
class Interface:
    """An IP interface, or for the bootstrap a network device, that NCCL chose."""

    host: str
    use: str
    """bootstrap | socket | oob (set-up messages of NET/IB)."""
    name: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plug-in that NCCL looked for."""

    kind: str
    """net | collnet | tuner | profiler | gin | rma | env."""
    name: str
    status: str
    """loaded | missing | failed | requested | assigned."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GdrDecision:
    """NCCL's choice about GPU Direct RDMA between a GPU and a network card."""

    host: str
    enabled: bool
    subject: str
    reason: str = ""


class Severity(str, Enum):
    """How much a message matters."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    HARMLESS = "harmless"


@dataclass(frozen=True, slots=True)
class Message:
    """A complaint of NCCL, once however often it was printed."""

    slug: str
    """Name of the known message; ``other`` where it is none of them."""
    severity: Severity
    text: str
    """As first printed."""
    where: str
    """Source file and line in NCCL, where printed."""
    advice: str
    count: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WatchdogReport:
    """What ProcessGroupNCCL's watchdog said about one rank; its repeats are folded together."""

    rank: int
    group: str
    """Name of the process group; empty where not printed."""
    op: str
    """Type of the op that timed out (ALLREDUCE, RECV, ...); empty where the rank was only told of the time-out."""
    seq: int | None
    """Its sequence number in the group. Ranks that stop at different numbers are the finding."""
    timeout_ms: int | None
    ran_ms: int | None
    last_enqueued: int | None
    """None where not printed, or garbage."""
    last_completed: int | None
    told_by: int | None
    """The rank that signalled the time-out, where this one did not find it itself."""
    times_printed: int


class FallbackStatus(str, Enum):
    """Whether TCP carries what RDMA could."""

    FALLBACK = "fallback"
    """NET/Socket is used by a channel, and the host has RDMA devices or RDMA was switched off or its plug-in failed."""
    POSSIBLE = "possible"
    """NET/Socket is used, and NCCL saw no RDMA device: there is none, or it is hidden (container, driver, library)."""
    SOCKET = "socket"
    """NET/Socket is used, and the log says nothing about RDMA."""
    NONE = "none"
    """Channels were connected, and none of them by NET/Socket."""
    UNKNOWN = "unknown"
    """No line of the log proves any transport."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """The verdict on TCP."""

    status: FallbackStatus
    hosts: tuple[str, ...] = ()
    """Hosts whose channels use NET/Socket and to which the status applies."""
    connections: int = 0
    reasons: tuple[str, ...] = ()
    """Why RDMA is not used, as far as the log says."""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Counts:
    """What was read and what could not be used."""

    lines: int = 0
    nccl_lines: int = 0
    torn: int = 0
    """Entries of NCCL cut off by another writer or the end of the file; nothing is taken from them."""
    unknown_connections: int = 0
    """Lines that look like a channel's but are torn or of no known form: their transport is unknown."""
    overlong: int = 0
    dropped: int = 0
    """Records beyond the limits on memory."""


@dataclass(frozen=True, slots=True)
class NcclReport:
    """All that the logs say."""

    sources: tuple[str, ...]
    versions: tuple[str, ...]
    """NCCL or RCCL, as printed; more than one is a finding."""
    networks_loaded: tuple[str, ...]
    """Names of networks that NCCL chose. No proof that any byte goes through them."""
    providers: tuple[str, ...]
    """Libfabric providers."""
    environment: tuple[tuple[str, str], ...]
    """NCCL's variables, as it read them."""
    hcas: tuple[Hca, ...]
    interfaces: tuple[Interface, ...]
    plugins: tuple[Plugin, ...]
    gdr: tuple[GdrDecision, ...]
    communicators: tuple[Communicator, ...]
    connections: tuple[Connection, ...]
    messages: tuple[Message, ...]
    watchdog: tuple[WatchdogReport, ...]
    fallback: Fallback
    counts: Counts

    def complaints(self, *severities: Severity) -> tuple[Message, ...]:
        """The messages of these severities."""
        return tuple(message for message in self.messages if message.severity in severities)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-serialisable data, schema ``ppdiag.nccl/1``."""
        return {"schema": SCHEMA, **_plain(self)}


def _plain(value: Any) -> Any:  # noqa: ANN401  (any part of a report)
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
