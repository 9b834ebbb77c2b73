"""The table of facts: which line of which NCCL gives which field.

Each rule has the regular expression for the text after the header, and the format strings of NCCL that it reads, with
the first and last release in which each stands. A format with ``GLUED`` words has the choices of a ``?:`` behind it,
as extracted from the source. What other writers print (RCCL, plug-ins, NCCL before 2.8) has its origin instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """A format string and the releases that have it."""

    first: str
    last: str
    text: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of line."""

    field: str
    """What the parser does with it."""
    starts: tuple[str, ...]
    """The text begins with one of these: most lines are told apart without a regular expression."""
    pattern: re.Pattern[str]
    formats: tuple[Format, ...]
    other: str = ""
    """Origin of further forms, which are not among NCCL's format strings."""


_END = r"(?: comm (?P<comm>0x[0-9a-f]{1,16}) nRanks (?P<nranks>\d{1,9}))?\s*\Z"  # RCCL adds its communicator
_CHANNEL = r"Channel (?P<channel>\d{1,5})(?:/(?P<index>\d{1,5}))? : "
_ENDS = (
    r"(?P<source>\d{1,9})\[(?P<source_device>[0-9a-f]{1,16})\] -> "
    r"(?P<destination>\d{1,9})\[(?P<destination_device>[0-9a-f]{1,16})\] "
)
_NET = (
    r"\[(?P<side>send|receive)\] via (?P<transport>NET/[\w .+-]{1,64})/(?P<net_device>-?\d{1,5})"
    r"(?:\((?P<proxy>\d{1,9})\))?(?P<gdr>/GDRDMA)?(?P<pci>\(PCI\))?(?P<shared>/Shared)?"
)
_P2P = (
    r"via (?P<transport>P2P/(?:direct pointer|IPC|CUMEM|MNNVL|indirect/\d{1,9}\[[0-9a-f]{1,16}\]))"
    r"(?P<read>/read)?(?P<copy>/CE)?"
)
_SHM = r"via (?P<transport>SHM/(?:direct|CE)/(?:direct|CE)|SHM/direct|direct shared memory)"

_IB_USING = (
    r"NET/IB : Using(?P<devices>.{0,8000}?)\s*(?P<order>\[RO\])?\s*"
    r"(?:;? OOB (?P<interface>[^\s:]{1,64}):(?P<address>\S{1,128}))?\s*\Z"
)
_ADDRESSES = r"(?P<interfaces>(?: ?(?:\[\d{1,4}\])?[^\s:\[\]]{1,64}:[0-9a-fA-F.:%\w]{1,128}<\d{1,5}>){1,64})\s*\Z"

RULES: tuple[Rule, ...] = (
    Rule(
        "connection",
        ("Channel ",),
        re.compile(_CHANNEL + _ENDS + _NET + _END),
        (
            Format("v2.8.3-1", "v2.11.4-1", "Channel %02d : %d[%lx] -> %d[%lx] [receive] via NET/%s/%d%s%s"),
            Format("v2.8.3-1", "v2.11.4-1", "Channel %02d : %d[%lx] -> %d[%lx] [send] via NET/%s/%d%s%s"),
            Format("v2.12.7-1", "v2.18.1-1", "Channel %02d/%d : %d[%lx] -> %d[%lx] [receive] via NET/%s/%d%s%s"),
            Format("v2.12.7-1", "v2.18.1-1", "Channel %02d/%d : %d[%lx] -> %d[%lx] [send] via NET/%s/%d%s%s"),
            Format("v2.12.7-1", "v2.18.1-1", "Channel %02d/%d : %d[%lx] -> %d[%lx] [send] via NET/%s/%d(%d)%s%s"),
            Format("v2.18.3-1", "v2.25.1-1", "Channel %02d/%d : %d[%d] -> %d[%d] [receive] via NET/%s/%d%s%s"),
            Format("v2.18.3-1", "v2.25.1-1", "Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d%s%s"),
            Format("v2.18.3-1", "v2.25.1-1", "Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d(%d)%s%s"),
            Format("v2.26.2-1", "v2.30.7-1", "Channel %02d/%d : %d[%d] -> %d[%d] [receive] via NET/%s/%d%s%s%s"),
            Format("v2.26.2-1", "v2.30.7-1", "Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d%s%s%s"),
            Format("v2.26.2-1", "v2.30.7-1", "Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d(%d)%s%s%s"),
        ),
        other="RCCL: the same, then ' comm %p nRanks %02d'",
    ),
    Rule(
        "connection",
        ("Channel ",),
        re.compile(_CHANNEL + _ENDS + _P2P + _END),
        (
            Format("v2.8.3-1", "v2.12.12-1", "Channel %02d : %d[%lx] -> %d[%lx] via P2P/IPC%s"),
            Format("v2.13.4-1", "v2.13.4-1", "Channel %02d : %d[%lx] -> %d[%lx] via P2P/IPC%s%s"),
            Format("v2.8.3-1", "v2.13.4-1", "Channel %02d : %d[%lx] -> %d[%lx] via P2P/direct pointer%s"),
            Format("v2.8.3-1", "v2.13.4-1", "Channel %02d : %d[%lx] -> %d[%lx] via P2P/indirect/%d[%lx]%s"),
            Format("v2.14.3-1", "v2.18.1-1", "Channel %02d/%01d : %d[%lx] -> %d[%lx] via P2P/IPC%s%s"),
            Format("v2.14.3-1", "v2.18.1-1", "Channel %02d/%01d : %d[%lx] -> %d[%lx] via P2P/direct pointer%s"),
            Format("v2.14.3-1", "v2.18.1-1", "Channel %02d/%01d : %d[%lx] -> %d[%lx] via P2P/indirect/%d[%lx]%s"),
            Format("v2.18.1-1", "v2.18.1-1", "Channel %02d/%01d : %d[%x] -> %d[%x] via P2P/CUMEM%s%s"),
            Format("v2.18.3-1", "v2.19.4-1", "Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/CUMEM%s%s"),
            Format("v2.18.3-1", "v2.30.7-1", "Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/IPC%s%s"),
            Format("v2.18.3-1", "v2.30.7-1", "Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/direct pointer%s"),
            Format("v2.18.3-1", "v2.30.7-1", "Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/indirect/%d[%d]%s"),
            Format("v2.20.3-1", "v2.30.7-1", "Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/%s%s%s"),
        ),
        other="RCCL: the same, then ' comm %p nRanks %02d'",
    ),
    Rule(
        "connection",
        ("Channel ",),
        re.compile(_CHANNEL + _ENDS + _SHM + _END),
        (
            Format("v2.8.3-1", "v2.12.12-1", "Channel %02d : %d[%lx] -> %d[%lx] via direct shared memory"),
            Format("v2.13.4-1", "v2.18.1-1", "Channel %02d : %d[%lx] -> %d[%lx] via SHM/%s/%sCEdirectCEdirect"),
            Format("v2.18.3-1", "v2.30.4-1", "Channel %02d : %d[%d] -> %d[%d] via SHM/%s/%sCEdirectCEdirect"),
            Format("v2.30.7-1", "v2.30.7-1", "Channel %02d : %d[%d] -> %d[%d] via SHM/direct"),
        ),
        other="RCCL: the same, then ' comm %p nRanks %02d'",
    ),
    Rule(
        "collnet_connection",
        ("CollNet ", "Coll "),
        re.compile(
            r"Coll(?:Net)? (?P<channel>\d{1,5})(?:/(?P<index>\d{1,5}))? : (?P<rank>\d{1,9}) \[(?P<side>send|receive)\] "
            r"via (?P<transport>COLLNET/[\w .+-]{1,64})/(?P<net_device>-?\d{1,5})(?P<gdr>/GDRDMA)?(?P<pci>\(PCI\))?"
            + _END
        ),
        (
            Format("v2.8.3-1", "v2.8.4-1", "Coll %02d : %d [receive] via COLLNET/%s/%d%s"),
            Format("v2.8.3-1", "v2.8.4-1", "Coll %02d : %d [send] via COLLNET/%s/%d%s"),
            Format("v2.9.6-1", "v2.13.4-1", "CollNet %02d : %d [receive] via COLLNET/%s/%d%s"),
            Format("v2.9.6-1", "v2.13.4-1", "CollNet %02d : %d [send] via COLLNET/%s/%d%s"),
            Format("v2.14.3-1", "v2.25.1-1", "CollNet %02d/%1d : %d [receive] via COLLNET/%s/%d%s"),
            Format("v2.14.3-1", "v2.25.1-1", "CollNet %02d/%1d : %d [send] via COLLNET/%s/%d%s"),
            Format("v2.26.2-1", "v2.30.7-1", "CollNet %02d/%1d : %d [receive] via COLLNET/%s/%d%s%s"),
            Format("v2.26.2-1", "v2.30.7-1", "CollNet %02d/%1d : %d [send] via COLLNET/%s/%d%s%s"),
        ),
    ),
    Rule(
        "old_connection",
        ("Ring ",),
        re.compile(
            r"Ring (?P<channel>\d{1,5}) : (?P<source>\d{1,9})(?:\[(?P<source_device>[0-9a-f]{1,16})\])? -> "
            r"(?P<destination>\d{1,9})(?:\[(?P<destination_device>[0-9a-f]{1,16})\])? (?:"
            + _NET
            + "|"
            + _P2P.replace("<transport>", "<transport_p2p>")
            + r"|via (?P<transport_shm>direct shared memory))\s*\Z"
        ),
        (),
        other="NCCL 2.4 to 2.7 (NVIDIA/nccl#278)",
    ),
    Rule(
        "communicator",
        ("comm ", "ncclComm", "[Rank "),
        re.compile(
            r"(?:\[Rank \d{1,9}\] )?(?:\w{1,60} )?comm (?P<comm>0x[0-9a-f]{1,16}|\(nil\)) rank (?P<rank>\d{1,9}) "
            r"nranks (?P<size>\d{1,9}) cudaDev (?P<cuda>-?\d{1,5})(?: nvmlDev (?P<nvml>-?\d{1,5}))? "
            r"busId (?P<bus>[0-9a-f]{1,16})(?P<more>.{0,300}?) ?- Init (?P<event>START|COMPLETE)\s*\Z"
        ),
        (
            Format("v2.8.3-1", "v2.8.3-1", "comm %p rank %d nranks %d cudaDev %d busId %x - Init COMPLETE"),
            Format("v2.8.4-1", "v2.15.5-1", "comm %p rank %d nranks %d cudaDev %d busId %lx - Init COMPLETE"),
            Format(
                "v2.16.2-1", "v2.18.1-1", "comm %p rank %d nranks %d cudaDev %d busId %lx commId 0x%llx - Init COMPLETE"
            ),
            Format(
                "v2.18.3-1",
                "v2.20.5-1",
                "comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %lx commId 0x%llx - Init START",
            ),
            Format(
                "v2.21.5-1",
                "v2.22.3-1",
                "ncclCommInitRank comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %lx commId 0x%llx - Init START",
            ),
            Format(
                "v2.23.4-1",
                "v2.28.9-1",
                "%s comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %lx commId 0x%llx - Init START",
            ),
            Format(
                "v2.24.3-1",
                "v2.28.9-1",
                "%s comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %lx parent %p splitCount %d color %d key %d"
                "- Init START",
            ),
            Format(
                "v2.29.2-1",
                "v2.30.7-1",
                "[Rank %d] %s comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %lx commId 0x%llx - Init START",
            ),
        ),
    ),
    Rule(
        "communicator_size",
        ("comm ",),
        re.compile(
            r"comm (?P<comm>0x[0-9a-f]{1,16}) rank \d{1,9} nRanks \d{1,9} nNodes (?P<nodes>\d{1,9}) "
            r"localRanks \d{1,9} localRank \d{1,9} MNNVL (?P<mnnvl>\d{1,3})\s*\Z"
        ),
        (Format("v2.20.3-1", "v2.30.7-1", "comm %p rank %d nRanks %d nNodes %d localRanks %d localRank %d MNNVL %d"),),
    ),
    Rule(
        "communicator_end",
        ("comm ",),
        re.compile(
            r"comm (?P<comm>0x[0-9a-f]{1,16}) rank \d{1,9} n[rR]anks \d{1,9} cudaDev -?\d{1,5} busId [0-9a-f]{1,16} - "
            r"(?P<end>Destroy|Abort|Revoke) (?:START|COMPLETE)(?:, result -?\d{1,5})?\s*\Z"
        ),
        (
            Format("v2.12.7-1", "v2.21.5-1", "comm %p rank %d nranks %d cudaDev %d busId %lx - Abort COMPLETE"),
            Format("v2.12.7-1", "v2.21.5-1", "comm %p rank %d nranks %d cudaDev %d busId %lx - Destroy COMPLETE"),
            Format(
                "v2.22.3-1", "v2.30.4-1", "comm %p rank %d nranks %d cudaDev %d busId %lx - %s COMPLETEAbortDestroy"
            ),
            Format("v2.28.3-1", "v2.30.7-1", "comm %p rank %d nRanks %d cudaDev %d busId %lx - Abort START"),
            Format("v2.28.7-1", "v2.30.7-1", "comm %p rank %d nRanks %d cudaDev %d busId %lx - Revoke START"),
        ),
    ),
    Rule(
        "nvls",
        ("NVLS comm ",),
        re.compile(r"NVLS comm (?P<comm>0x[0-9a-f]{1,16}) (?:headRank|rank) .{1,300}\Z"),
        (
            Format(
                "v2.17.1-1",
                "v2.17.1-1",
                "NVLS comm %p rank %d nranks %d buffSize %zi memSize %zi nvlsPerRankSize %zi nvlsTotalSize %zi",
            ),
            Format(
                "v2.18.1-1",
                "v2.21.5-1",
                "NVLS comm %p headRank %d nHeads %d buffSize %zi memSize %zi nvlsPerRankSize %zi nvlsTotalSize %zi",
            ),
            Format(
                "v2.22.3-1",
                "v2.26.6-1",
                "NVLS comm %p headRank %d nHeads %d buffSize %zu nvlsPerRankSize %zu nvlsTotalSize %zu",
            ),
            Format(
                "v2.27.3-1",
                "v2.30.4-1",
                "NVLS comm %p headRank %d nHeads %d nvlsRanks %d buffSize %zu nvlsPerRankSize %zu nvlsTotalSize %zu",
            ),
        ),
    ),
    Rule(
        "nvls",
        ("Connected NVLS tree",),
        re.compile(r"Connected NVLS tree\s*\Z"),
        (Format("v2.18.1-1", "v2.30.7-1", "Connected NVLS tree"),),
    ),
    Rule(
        "collnet",
        ("rank ",),
        re.compile(r"rank \d{1,9} Connected CollNet\s*\Z"),
        (Format("v2.9.6-1", "v2.30.7-1", "rank %d Connected CollNet"),),
    ),
    Rule(
        "channels",
        tuple("0123456789"),
        re.compile(
            r"(?P<coll>\d{1,5}) coll channels, (?:\d{1,5} collnet channels, )?(?:\d{1,5} nvls channels, )?"
            r"(?P<p2p>\d{1,5}) p2p channels, \d{1,5} p2p channels per peer\s*\Z"
        ),
        (
            Format("v2.8.3-1", "v2.16.5-1", "%d coll channels, %d p2p channels, %d p2p channels per peer"),
            Format(
                "v2.17.1-1",
                "v2.19.4-1",
                "%d coll channels, %d nvls channels, %d p2p channels, %d p2p channels per peer",
            ),
            Format(
                "v2.20.3-1",
                "v2.30.7-1",
                "%d coll channels, %d collnet channels, %d nvls channels, %d p2p channels, %d p2p channels per peer",
            ),
        ),
    ),
    Rule(
        "ring",
        ("Ring ",),
        re.compile(r"Ring \d{1,5} : \d{1,9} -> \d{1,9} -> \d{1,9}\s*\Z"),
        (Format("v2.10.3-1", "v2.30.7-1", "Ring %02d : %d -> %d -> %d"),),
    ),
    Rule(
        "tree",
        ("Tree ",),
        re.compile(r"Tree \d{1,5} : -?\d{1,9} -> -?\d{1,9} -> -?\d{1,9}/-?\d{1,9}/-?\d{1,9}\s*\Z"),
        (Format("v2.8.3-1", "v2.30.7-1", "Tree %d : %d -> %d -> %d/%d/%d"),),
    ),
    Rule(
        "version",
        ("NCCL version ", "RCCL version "),
        re.compile(r"(?P<version>[NR]CCL version \d{1,3}\.\d{1,3}\.\d{1,3}\S{0,80})(?: .{0,200})?\Z"),
        (),
        other="printed, not logged, up to about NCCL 2.21; INFO later; RCCL",
    ),
    Rule(
        "network",
        ("Using network ", "Initialized NET plugin ", "Assigned NET plugin "),
        re.compile(
            r"(?:Using network|(?:Initialized|Assigned) NET plugin) (?P<network>[\w .+/-]{1,64}?)(?: to comm)?\s*\Z"
        ),
        (
            Format("v2.8.3-1", "v2.30.7-1", "Using network %s"),
            Format("v2.27.3-1", "v2.30.7-1", "Initialized NET plugin %s"),
            Format("v2.27.3-1", "v2.30.7-1", "Assigned NET plugin %s to comm"),
        ),
    ),
    Rule(
        "provider",
        ("NET/OFI ",),
        re.compile(r"NET/OFI Selected [Pp]rovider is (?P<provider>[\w.;-]{1,64}?)(?:[, ].{0,200})?\Z"),
        (),
        other="the Libfabric plug-in aws-ofi-nccl",
    ),
    Rule(
        "hcas",
        ("NET/IB : Using",),
        re.compile(_IB_USING),
        (
            Format("v2.8.3-1", "v2.11.4-1", "NET/IB : Using%s ; OOB %s:%s"),
            Format("v2.12.7-1", "v2.30.7-1", "NET/IB : Using%s %s; OOB %s:%s[RO]"),
        ),
    ),
    Rule(
        "hca",
        ("NET/IB: [",),
        re.compile(
            r"NET/IB: \[\d{1,5}\] (?P<name>[\w.+-]{1,64}):[\w.-]{1,64}:(?P<port>\d{1,4})/(?P<link>[\w /]{1,32}) "
            r"provider=(?P<provider>\S{0,32}) speed=(?P<speed>\d{1,9}) .{0,500}\Z"
        ),
        (
            Format(
                "v2.27.3-1",
                "v2.29.7-1",
                "NET/IB: [%d] %s:%s:%d/%s provider=%s speed=%d context=%p pciPath=%s ar=%d",
            ),
            Format(
                "v2.30.3-1",
                "v2.30.7-1",
                "NET/IB: [%d] %s:%s:%d/%s provider=%s speed=%d context=%p pciPath=%s ar=%d oooRqSize=%d",
            ),
        ),
    ),
    Rule(
        "hca_gdr",
        ("NET/",),
        re.compile(
            r"NET/[\w .+-]{1,64} : GPU Direct RDMA (?P<state>Enabled|Disabled) for HCA \d{1,5} '(?P<name>[^']{1,200})'"
            r"(?: \(no module\))?\s*\Z"
        ),
        (
            Format("v2.8.3-1", "v2.12.12-1", "NET/IB : GPU Direct RDMA Disabled for HCA %d '%s' (no module)"),
            Format("v2.13.4-1", "v2.30.7-1", "NET/%s : GPU Direct RDMA %s for HCA %d '%s'EnabledDisabled"),
        ),
    ),
    Rule(
        "gdr",
        ("GPU Direct RDMA ",),
        re.compile(
            r"GPU Direct RDMA (?P<state>Enabled|Disabled) for (?P<subject>[^(]{1,200}?)"
            r"(?: \((?P<reason>distance [^)]{1,60})\))?"
            r"(?:, read \d{1,3})?(?: mode \w{1,32})?\s*\Z"
        ),
        (
            Format("v2.8.3-1", "v2.20.5-1", "GPU Direct RDMA Disabled for GPU %lx / HCA %d (distance %d > %d)"),
            Format("v2.21.5-1", "v2.23.4-1", "GPU Direct RDMA Disabled for GPU %lx / HCA %lx (distance %d > %d)"),
            Format("v2.24.3-1", "v2.28.9-1", "GPU Direct RDMA Disabled for GPU %d / HCA %lx (distance %d > %d)"),
            Format("v2.29.2-1", "v2.29.7-1", "GPU Direct RDMA Disabled for %s"),
            Format(
                "v2.8.3-1", "v2.20.5-1", "GPU Direct RDMA Enabled for GPU %lx / HCA %d (distance %d <= %d), read %d"
            ),
            Format(
                "v2.21.5-1", "v2.23.4-1", "GPU Direct RDMA Enabled for GPU %lx / HCA %lx (distance %d <= %d), read %d"
            ),
            Format(
                "v2.24.3-1", "v2.25.1-1", "GPU Direct RDMA Enabled for GPU %d / HCA %lx (distance %d <= %d), read %d"
            ),
            Format(
                "v2.26.2-1",
                "v2.28.9-1",
                "GPU Direct RDMA Enabled for GPU %d / HCA %lx (distance %d <= %d), read %d mode %s",
            ),
            Format("v2.29.2-1", "v2.29.7-1", "GPU Direct RDMA Enabled for %s"),
        ),
    ),
    Rule(
        "no_hca",
        ("NET/IB : No device found",),
        re.compile(r"NET/IB : No device found\.\s*\Z"),
        (Format("v2.8.3-1", "v2.30.7-1", "NET/IB : No device found."),),
    ),
    Rule(
        "no_verbs",
        ("Failed to open libibverbs",),
        re.compile(r"Failed to open libibverbs\.so\[\.1\]\s*\Z"),
        (Format("v2.11.4-1", "v2.29.7-1", "Failed to open libibverbs.so[.1]"),),
    ),
    Rule(
        "bootstrap",
        ("Bootstrap : Using", "Bootstrap: Using"),
        re.compile(r"Bootstrap ?: Using" + _ADDRESSES),
        (
            Format("v2.8.3-1", "v2.23.4-1", "Bootstrap : Using%s"),
            Format("v2.24.3-1", "v2.30.7-1", "Bootstrap: Using%s"),
        ),
    ),
    Rule(
        "bootstrap_device",
        ("Bootstrap: Using ",),
        re.compile(r"Bootstrap: Using (?P<device>[\w./+-]{1,64}):\d{1,5}\s*\Z"),
        (Format("v2.24.3-1", "v2.30.7-1", "Bootstrap: Using %s:%dN/A"),),
    ),
    Rule(
        "socket_interfaces",
        ("NET/Socket : Using",),
        re.compile(r"NET/Socket : Using" + _ADDRESSES),
        (Format("v2.8.3-1", "v2.30.7-1", "NET/Socket : Using%s"),),
    ),
    Rule(
        "interface",
        ("Found network interface ",),
        re.compile(r"Found network interface (?P<name>\S{1,64}) with speed -?\d{1,9} Mbps\s*\Z"),
        (Format("v2.30.3-1", "v2.30.7-1", "Found network interface %s with speed %d Mbps"),),
    ),
    Rule(
        "environment",
        ("NCCL_", "RCCL_", "HSA_"),
        re.compile(r"(?P<name>[A-Z][A-Z0-9_]{1,80}) (?:set by environment to|set to) (?P<value>.{0,500}?)\.?\s*\Z"),
        (
            Format("v2.8.3-1", "v2.30.7-1", "%s set by environment to %s"),
            Format("v2.8.3-1", "v2.12.7-1", "%s set by environment to %lu.NCCL_"),
            Format("v2.12.10-1", "v2.30.7-1", "%s set by environment to %lld."),
            Format("v2.23.4-1", "v2.30.7-1", "%s set by environment to %d"),
            Format("v2.8.3-1", "v2.30.7-1", "NCCL_IB_HCA set to %s"),
            Format("v2.8.3-1", "v2.30.7-1", "NCCL_SOCKET_IFNAME set to %s"),
            Format("v2.23.4-1", "v2.30.7-1", "NCCL_OOB_NET_IFNAME set to %s"),
            Format("v2.19.1-1", "v2.20.5-1", "NCCL_TUNER_PLUGIN set to %s"),
        ),
    ),
    Rule(
        "plugin_loaded",
        ("NET/Plugin: Loaded ", "GIN/Plugin: Loaded ", "RMA/Plugin: Loaded "),
        re.compile(
            r"(?:NET|GIN|RMA)/Plugin: Loaded (?P<kind>net|coll|collnet|gin|rma) plugin (?P<name>.{1,100}?) "
            r"\((?P<detail>v\d{1,3})\)\s*\Z"
        ),
        (
            Format("v2.13.4-1", "v2.18.6-1", "NET/Plugin: Loaded net plugin %s (v4)"),
            Format("v2.13.4-1", "v2.25.1-1", "NET/Plugin: Loaded net plugin %s (v5)"),
            Format("v2.24.3-1", "v2.30.7-1", "NET/Plugin: Loaded net plugin %s (v9)"),
            Format("v2.30.3-1", "v2.30.7-1", "NET/Plugin: Loaded net plugin %s (v12)"),
            Format("v2.13.4-1", "v2.18.6-1", "NET/Plugin: Loaded coll plugin %s (v4)"),
            Format("v2.26.2-1", "v2.30.7-1", "NET/Plugin: Loaded collnet plugin %s (v10)"),
            Format("v2.28.7-1", "v2.30.4-1", "NET/Plugin: Loaded gin plugin %s (v11)"),
            Format("v2.30.3-1", "v2.30.4-1", "NET/Plugin: Loaded rma plugin %s (v13)"),
            Format("v2.30.7-1", "v2.30.7-1", "GIN/Plugin: Loaded gin plugin %s (v14)"),
            Format("v2.30.7-1", "v2.30.7-1", "RMA/Plugin: Loaded rma plugin %s (v14)"),
        ),
    ),
    Rule(
        "plugin_missing",
        ("NET/Plugin", "TUNER/Plugin", "PROFILER/Plugin", "ENV/Plugin", "GIN/Plugin", "RMA/Plugin"),
        re.compile(
            r"(?P<kind>NET|TUNER|PROFILER|ENV|GIN|RMA)/Plugin ?: (?:.{0,400} )?"
            r"(?:No plugin found(?: \((?P<name>[^)]{1,300})\))?"
            r"|Could not find:(?P<names>.{0,400}))(?:,.{0,100})?\s*\Z"
        ),
        (
            Format(
                "v2.8.3-1",
                "v2.10.3-1",
                "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation",
            ),
            Format("v2.11.4-1", "v2.16.5-1", "NET/Plugin : No plugin found (%s), using internal implementation"),
            Format("v2.17.1-1", "v2.18.6-1", "NET/Plugin : No plugin found, using internal implementation"),
            Format(
                "v2.19.1-1",
                "v2.20.5-1",
                "NET/Plugin : dlerror=%s No plugin found (%s), using internal implementation",
            ),
            Format("v2.21.5-1", "v2.21.5-1", "NET/Plugin: No plugin found (%s)"),
            Format("v2.21.5-1", "v2.21.5-1", "TUNER/Plugin: No plugin found (%s)"),
            Format("v2.22.3-1", "v2.25.1-1", "NET/Plugin: Could not find:%s. Using internal network plugin."),
            Format("v2.22.3-1", "v2.25.1-1", "TUNER/Plugin: Could not find:%s. Using internal tuner plugin."),
            Format("v2.23.4-1", "v2.25.1-1", "PROFILER/Plugin: Could not find:%s."),
            Format("v2.26.2-1", "v2.27.7-1", "%s/Plugin: Could not find:%s. %s"),
            Format("v2.28.3-1", "v2.30.7-1", "%s/Plugin: Could not find:%s%s%s"),
        ),
    ),
    Rule(
        "plugin_requested",
        ("NET/Plugin: Plugin name", "TUNER/Plugin: Plugin name", "PROFILER/Plugin: Plugin name", "Plugin name"),
        re.compile(r"(?:(?P<kind>NET|TUNER|PROFILER|ENV)/Plugin: )?Plugin name set by env to (?P<name>.{1,300}?)\s*\Z"),
        (
            Format("v2.11.4-1", "v2.12.10-1", r"Plugin name set by env to %s\n"),
            Format("v2.12.12-1", "v2.20.5-1", "Plugin name set by env to %s"),
            Format("v2.21.5-1", "v2.25.1-1", "NET/Plugin: Plugin name set by env to %s"),
            Format("v2.21.5-1", "v2.25.1-1", "TUNER/Plugin: Plugin name set by env to %s"),
            Format("v2.23.4-1", "v2.25.1-1", "PROFILER/Plugin: Plugin name set by env to %s"),
            Format("v2.26.2-1", "v2.27.7-1", "%s/Plugin: Plugin name set by env to %s"),
        ),
    ),
    Rule(
        "plugin_failed",
        ("Failed to initialize NET plugin ", "External "),
        re.compile(
            r"(?:Failed to initialize NET plugin (?P<name>.{1,200}?)"
            r"|External (?P<kind>network|env|profiler|tuner) plugin (?P<other>.{1,200}?) is unsupported)\s*\Z"
        ),
        (
            Format("v2.28.3-1", "v2.30.7-1", "Failed to initialize NET plugin %s"),
            Format("v2.28.3-1", "v2.30.7-1", "External network plugin %s is unsupported"),
            Format("v2.28.7-1", "v2.30.7-1", "External env plugin %s is unsupported"),
            Format("v2.28.3-1", "v2.30.7-1", "External profiler plugin %s is unsupported"),
            Format("v2.28.3-1", "v2.30.7-1", "External tuner plugin %s is unsupported"),
        ),
    ),
    Rule(
        "plugin_loaded_external",
        ("Successfully loaded external ",),
        re.compile(
            r"Successfully loaded external (?:(?P<kind>network|env|gin|profiler|tuner) )?plugin "
            r"(?P<name>.{1,300}?)\s*\Z"
        ),
        (
            Format("v2.27.3-1", "v2.27.7-1", "Successfully loaded external plugin %s"),
            Format("v2.28.3-1", "v2.30.7-1", "Successfully loaded external network plugin %s"),
            Format("v2.28.7-1", "v2.30.7-1", "Successfully loaded external env plugin %s"),
            Format("v2.29.7-1", "v2.30.4-1", "Successfully loaded external gin plugin %s"),
            Format("v2.28.3-1", "v2.30.7-1", "Successfully loaded external profiler plugin %s"),
            Format("v2.28.3-1", "v2.30.7-1", "Successfully loaded external tuner plugin %s"),
        ),
    ),
    Rule(
        "trace",
        (),
        re.compile(
            r"(?P<file>[\w./+-]{1,200}\.(?:cc|h|cu|cpp)):(?P<line>\d{1,7}) -> (?P<code>\d{1,3})(?: .{0,60})?\s*\Z"
        ),
        (),
        other="NCCLCHECK: '%s:%d -> %d', from __FILE__ and __LINE__",
    ),
)

LOOKS_LIKE_A_CONNECTION = re.compile(
    r"\bvia (?:NET|P2P|SHM|COLLNET|direct shared)"
    r"|\A(?:Channel|Ring|Coll|CollNet) \d{1,5}(?:/\d{1,5})? : \d{1,9} ?(?:\[|\Z)"
)
"""An entry that names a channel's transport, or would have done so, had it not been cut: unknown, never used."""

NAMES_A_TRANSPORT = re.compile(r"\bvia (?:NET/|P2P/|SHM/|COLLNET/)")
"""The same in a line without a header, where only the end of an entry is left."""

DEVICE = re.compile(r"(?<![\w.])(?P<name>[A-Za-z][\w.-]{0,63}):(?P<port>\d{1,4})/(?P<link>[A-Za-z]{1,16}(?:/SHARP)?)")
"""A device of ``NET/IB : Using``: ``[0]mlx5_0:1/RoCE``, merged ``[0]={[0] mlx5_0:1/IB, ...}``, or ``.../SHARP``."""

ADDRESS = re.compile(r"(?:\[\d{1,4}\])?(?P<name>[^\s:\[\]]{1,64}):(?P<address>[0-9a-fA-F.:%\w]{1,128})<\d{1,5}>")
"""An interface with its address: ``[0]eth0:10.0.0.1<0>``."""
