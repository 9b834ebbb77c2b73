"""The table of complaints: what NCCL's warnings mean and what to do, and which lines mean nothing.

The first row that matches names a message. A warning that no row matches is still reported, as ``other``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ppdiag.analyzers.nccl.model import Severity

GUIDE = "NCCL user guide, environment variables"


@dataclass(frozen=True, slots=True)
class Known:
    """A known complaint."""

    slug: str
    severity: Severity
    pattern: re.Pattern[str]
    advice: str
    versions: tuple[str, str]
    source: str


def _row(  # noqa: PLR0913, PLR0917  (the columns of the table)
    slug: str, severity: Severity, pattern: str, advice: str, versions: tuple[str, str], source: str
) -> Known:
    return Known(slug, severity, re.compile(pattern), advice, versions, source)


_ERROR, _WARNING, _NOTE, _HARMLESS = Severity.ERROR, Severity.WARNING, Severity.NOTE, Severity.HARMLESS
_FIRST, _LAST = "v2.8.3-1", "v2.30.7-1"
_COMPLETION = r"NET/IB(?:/GIN)? ?: Got completion .{0,300}?(?:error |status=)(?:IBV_WC_\w+\()?"

KNOWN: tuple[Known, ...] = (
    _row(
        "ib-retry-exceeded",
        _ERROR,
        _COMPLETION + r"12\b",
        "The other card never answered: with RoCE check NCCL_IB_GID_INDEX (3 is often right), that every card reaches "
        "every other one, and that the peer process was still alive.",
        (_FIRST, _LAST),
        "NVIDIA/nccl#426, pytorch/pytorch#81628, NVIDIA/nccl#2397",
    ),
    _row(
        "ib-flushed",
        _NOTE,
        _COMPLETION + r"(?:5|249)\b",
        "A consequence: the queue was flushed after an earlier error. Look at the first completion error.",
        (_FIRST, _LAST),
        "NVIDIA/nccl#1405",
    ),
    _row(
        "ib-protection",
        _ERROR,
        _COMPLETION + r"4\b",
        "Local protection error, mostly GPU memory registration: try NCCL_NET_GDR_LEVEL=0, then check nvidia-peermem "
        "or DMA-BUF.",
        (_FIRST, _LAST),
        "NVIDIA/nccl#707",
    ),
    _row(
        "ib-access",
        _ERROR,
        _COMPLETION + r"(?:8|9|10)\b",
        "The remote side refused the access: different NCCL versions or network plug-ins on the hosts; try NCCL's own "
        "(NCCL_NET_PLUGIN=none).",
        (_FIRST, _LAST),
        "NVIDIA/nccl#1710",
    ),
    _row(
        "ib-completion",
        _ERROR,
        r"NET/IB(?:/GIN)? ?: Got completion |Call to ibv_poll_cq\(\) returned|Unsupported completion status"
        r"|Got CQE with error",
        "A transfer failed on the card; the status says how (ibv_wc_status). Look at the first such line of any rank.",
        (_FIRST, _LAST),
        GUIDE,
    ),
    _row(
        "ib-port-event",
        _WARNING,
        r"NET/IB : (?:\S{1,64}:\d{1,4} )?(?:Got (?:non-fatal )?async (?:error )?event|GID table changed)",
        "The link of this card changed state: check the cable, the port's counters and the switch.",
        (_FIRST, _LAST),
        "NVIDIA/nccl#905",
    ),
    _row(
        "ib-fatal-event",
        _ERROR,
        r"NET/IB : \S{1,64}:\d{1,4} (?:async fatal event|unknown event type)|local catastrophic error",
        "The card reported a fault: check its firmware and dmesg on that host.",
        ("v2.23.4-1", _LAST),
        "NVIDIA/nccl#230",
    ),
    _row(
        "ib-connect",
        _ERROR,
        r"Call to ibv_modify_qp failed",
        "The queue pair could not be connected: 'Network is unreachable' and 'Connection timed out' mean a wrong GID "
        "(NCCL_IB_GID_INDEX) or cards on networks that are not routed to each other (NCCL_IB_HCA).",
        ("v2.24.3-1", _LAST),
        "NVIDIA/nccl-tests#185, eugr/spark-vllm-docker#252",
    ),
    _row(
        "ib-open",
        _ERROR,
        r"NET/IB : Unable to (?:open device|query device|query port)|IB device \S+ not found",
        "The process may not use this card: give the container /dev/infiniband and the memlock limit, or name the "
        "cards that work with NCCL_IB_HCA, the same on all ranks.",
        (_FIRST, _LAST),
        "NVIDIA/nccl#2428, inclusionAI/AReaL#639",
    ),
    _row(
        "ib-mixed-links",
        _ERROR,
        r"NET/IB : (?:Attempted to (?:connect|merge) incompatible devices|Remote \S+ device is incompatible"
        r"|Can't (?:connect|merge) net devices|Trying to merge multiple devices together with different link_layer)",
        "InfiniBand and RoCE cards are mixed: choose one kind with NCCL_IB_HCA.",
        ("v2.20.3-1", _LAST),
        GUIDE,
    ),
    _row(
        "ib-rails",
        _WARNING,
        r"NET/IB : (?:Local mergedDev|There are mismatched physical devices)|Detected mixed local (?:Net|CollNet) dev"
        r"|Unexpected number of remote rails",
        "Hosts differ in the number or order of their cards: set NCCL_IB_HCA so that they match.",
        ("v2.20.3-1", _LAST),
        "NVIDIA/nccl#1913, NVIDIA/nccl#2428",
    ),
    _row(
        "collective-mismatch",
        _ERROR,
        r"collective mismatch error|posted incorrect receive info",
        "Ranks are in different ops, or sizes differ: the order of the collectives is not the same on all ranks.",
        (_FIRST, _LAST),
        GUIDE,
    ),
    _row(
        "no-network-plugin",
        _ERROR,
        r"Failed to initialize any NET plugin|Error: network \S+ not found|Failed to initialize NET plugin",
        "The network that NCCL_NET or NCCL_NET_PLUGIN asks for cannot be used: unset them, or install the plug-in "
        "where the loader finds it (LD_LIBRARY_PATH) on every host.",
        ("v2.10.3-1", _LAST),
        GUIDE,
    ),
    _row(
        "no-interface",
        _ERROR,
        r"(?:Bootstrap|NET/Socket|NET/IB) : [Nn]o (?:socket |IP )?interface found",
        "No usable network interface: check NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY.",
        (_FIRST, _LAST),
        GUIDE,
    ),
    _row(
        "ib-other",
        _WARNING,
        r"NET/IB(?:/GIN)? ?:|ibv_\w+\(\) failed|Failed to open libibverbs",
        "NCCL's RDMA transport complains; if channels then use NET/Socket, this is why.",
        (_FIRST, _LAST),
        GUIDE,
    ),
    _row(
        "peer-closed",
        _ERROR,
        r"Connection closed by remote peer|[Cc]losed by remote|Socket recv failed while polling",
        "The other rank went away: its own log has the first error.",
        ("v2.16.2-1", _LAST),
        "NVIDIA/nccl-tests#166",
    ),
    _row(
        "bind-failed",
        _ERROR,
        r"Call to bind failed|Address already in use",
        "The address is taken by another process.",
        (_FIRST, _LAST),
        GUIDE,
    ),
    _row(
        "connect-failed",
        _ERROR,
        r"[Cc]onnect to \S+ (?:failed|returned)|PollConnect|StartConnect|Call to connect failed|Connection refused"
        r"|(?:exceeded (?:error )?retr|exceeded timeouts)|No route to host|Network is unreachable",
        "A rank could not be reached by TCP, often for the wrong interface (veth, docker0, a tunnel, a link-local "
        "address): set NCCL_SOCKET_IFNAME to the one that all hosts share; check firewalls.",
        (_FIRST, _LAST),
        "pytorch/pytorch#68893, Oneflow-Inc/oneflow#3586, NVIDIA/nccl#975, NVIDIA/nccl#529",
    ),
    _row(
        "socket",
        _ERROR,
        r"(?:nccl(?:Os)?S|\bs)ocket[A-Z]\w+|Net : Call to recv|Call to recv|neither AF_INET",
        "A TCP connection between ranks broke or was misused: look at the peer's log, then at the network.",
        (_FIRST, _LAST),
        GUIDE,
    ),
    _row(
        "duplicate-gpu",
        _ERROR,
        r"Duplicate GPU detected",
        "Two ranks use one GPU: set the device from LOCAL_RANK, or check CUDA_VISIBLE_DEVICES.",
        (_FIRST, "v2.29.7-1"),
        GUIDE,
    ),
    _row(
        "version-mismatch",
        _ERROR,
        r"Mismatched NCCL version|NCCL version mismatch|NCCL library (?:is not backwards|is too old|version is too old)"
        r"|compiled with too old version",
        "Ranks or the application use different NCCL versions: make the environments equal.",
        ("v2.23.4-1", _LAST),
        GUIDE,
    ),
    _row(
        "shared-memory",
        _ERROR,
        r"shared memory|Could not map |failed to extend|shm (?:unlink|close) failed",
        "Shared memory ran out or is not shared: give the container --shm-size or --ipc=host.",
        (_FIRST, _LAST),
        GUIDE,
    ),
    _row(
        "cuda",
        _ERROR,
        r"Cuda failure|CUDA [Dd]river version found|Failed to CUDA|cuDriverGetVersion|CUDA some PFN"
        r"|Failed to (?:find|load) CUDA",
        "A CUDA call failed; NCCL may only be where it was noticed. Run with CUDA_LAUNCH_BLOCKING=1 to find where.",
        (_FIRST, _LAST),
        GUIDE,
    ),
    _row(
        "p2p-disabled",
        _WARNING,
        r"P2P is disabled between|failed to peer with device",
        "GPUs that could talk directly do not: check nvidia-smi topo -p2p, ACS, the IOMMU and NVLink.",
        ("v2.12.7-1", _LAST),
        GUIDE,
    ),
    _row(
        "nvls",
        _WARNING,
        r"NVLS|NVLink SHARP",
        "NVLink SHARP cannot be used: check the Fabric Manager and NVSwitches, or set NCCL_NVLS_ENABLE=0.",
        ("v2.18.1-1", _LAST),
        GUIDE,
    ),
    _row(
        "mnnvl",
        _WARNING,
        r"MNNVL",
        "Several hosts share one NVLink domain, but it cannot be used: check IMEX (nvidia-imex-ctl -N).",
        ("v2.20.3-1", _LAST),
        GUIDE,
    ),
    _row(
        "no-transport",
        _ERROR,
        r"no transport for",
        "No transport connects these ranks: P2P, SHM and NET are all disabled or unusable between them.",
        (_FIRST, _LAST),
        GUIDE,
    ),
    _row(
        "nvml",
        _WARNING,
        r"nvml\w*\(|libnvidia-ml|NVML",
        "The NVIDIA management library is missing or too old in this environment; NCCL cannot see the topology.",
        (_FIRST, _LAST),
        GUIDE,
    ),
    _row(
        "abort",
        _WARNING,
        r"abort state|in abort|ncclCommSetAsyncError|ncclAsyncJobComplete|commReclaim",
        "The communicator was aborted: the cause stands before it.",
        ("v2.14.3-1", _LAST),
        GUIDE,
    ),
    _row(
        "bootstrap",
        _ERROR,
        r"Bootstrap Root :|NCCL_COMM_ID",
        "Ranks disagree on their number, or the address in NCCL_COMM_ID is wrong.",
        (_FIRST, _LAST),
        GUIDE,
    ),
    _row(
        "invalid-argument",
        _ERROR,
        r"Invalid (?:argument|config|rank|device|handle|key|client)|Invalig config|argument not initialized",
        "NCCL was called with an argument that it refuses.",
        (_FIRST, _LAST),
        GUIDE,
    ),
    _row(
        "symbol-missing",
        _HARMLESS,
        r"dlv?sym failed on|ncclOsDlsym failed",
        "An optional function of a library is not there.",
        (_FIRST, _LAST),
        GUIDE,
    ),
)
"""Warnings, in the order in which they are tried."""

HARMLESS_INFO = re.compile(
    r"/Plugin ?: |dlv?sym failed|ncclOsDl(?:open|sym)|\bretrying\b|Trying a different method|Failed to open libmlx5"
    r"|Failed to open mlx5dv symbols|cuMem host allocations do not appear|fallocate:|mkstemp:|Could not get speed"
    r"|Topology detection|P2P not supported between|not supported in this communicator|Abort COMPLETE|Destroy COMPLETE"
    r"|NVLS multicast support is not available|abort called|RAS "
)
"""INFO lines with words like 'failed' that mean nothing for the job; RAS is NCCL's own status service."""

COMPLAINT_INFO = re.compile(
    r"\b(?:fail(?:ed|ure)?|error|timeout|cannot|could not|unable|invalid|mismatch(?:ed)?|fatal)\b", re.IGNORECASE
)
"""INFO lines that complain; kept as notes."""

RESULTS = {
    1: "ncclUnhandledCudaError",
    2: "ncclSystemError",
    3: "ncclInternalError",
    4: "ncclInvalidArgument",
    5: "ncclInvalidUsage",
    6: "ncclRemoteError",
    7: "ncclInProgress",
}
"""ncclResult_t, as the numbers after '->' in a trace of returns."""

RESULT_ADVICE = {
    1: "A CUDA call failed: see the warning before it.",
    2: "A system call or library failed: see the warning before it.",
    3: "NCCL's own consistency check failed: see the warning before it.",
    4: "NCCL was called with a wrong argument.",
    5: "NCCL was used in a wrong way, such as two ranks on one GPU: see the warning before it.",
    6: "Another rank failed or left: see that rank's log.",
}


def classify(text: str) -> Known | None:
    """The known message that a warning is; None where it is none of them."""
    return next((known for known in KNOWN if known.pattern.search(text)), None)
