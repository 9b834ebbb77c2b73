"""Turns the entries of logs into a report: each rule of the table has one method here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeVar

from ppdiag.analyzers.nccl.complaints import Complaints
from ppdiag.analyzers.nccl.fallback import (
    NO_DEVICE,
    PLUGIN_FAILED,
    SWITCHED_OFF,
    TCP_PROVIDER,
    Reason,
    find_fallback,
)
from ppdiag.analyzers.nccl.lines import Line, Splitter
from ppdiag.analyzers.nccl.model import (
    Communicator,
    Connection,
    Counts,
    Endpoint,
    Family,
    GdrDecision,
    Hca,
    Interface,
    NcclReport,
    Plugin,
    Process,
)
from ppdiag.analyzers.nccl.ranks import Known, resolve
from ppdiag.analyzers.nccl.rules import ADDRESS, DEVICE, LOOKS_LIKE_A_CONNECTION, NAMES_A_TRANSPORT, RULES
from ppdiag.analyzers.nccl.watchdog import Watchdog, is_watchdog

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from ppdiag.analyzers.nccl.lines import Entry
    from ppdiag.analyzers.nccl.rules import Rule

MAX_RECORDS = 500_000
"""Of one kind (connections, communicators, ...): about 200 MB at most. Beyond it records are counted, not kept."""
MAX_NAMES = 10_000
"""Of interfaces, variables, plug-ins and the like."""

_COMM_ID = re.compile(r"commId (0x[0-9a-f]{1,16})")
_PARENT = re.compile(r"parent (0x[0-9a-f]{1,16})")
_FAMILIES = {"NET/IB": Family.IB, "NET/Socket": Family.SOCKET}
_FLAGS = {"read": "read", "copy": "CE", "pci": "PCI", "shared": "Shared"}
_KINDS = {"coll": "collnet", "network": "net", "": "net"}

_RELEVANT = re.compile(r"N?CCL|nccl|via (?:NET|P2P|SHM|COLLNET)/")
"""Most lines of a training log are not NCCL's."""

T = TypeVar("T")
K = TypeVar("K", bound="Hashable")


class Parser:
    """Takes lines, in order, of any number of files; :meth:`report` gives what they say."""

    def __init__(self) -> None:
        self._splitter = Splitter()
        self._watchdog = Watchdog()
        self.complaints = Complaints()
        self._sources: list[str] = []
        self._versions: dict[str, None] = {}
        self._networks: dict[str, None] = {}
        self._providers: dict[str, None] = {}
        self._environment: dict[tuple[str, str], None] = {}
        self._hcas: dict[tuple[str, str, int | None], Hca] = {}
        self._interfaces: dict[Interface, None] = {}
        self._plugins: dict[Plugin, None] = {}
        self._gdr: dict[GdrDecision, None] = {}
        self._communicators: dict[tuple[str, int, str], Communicator] = {}
        self._connections: dict[Connection, None] = {}
        self._current: dict[tuple[str, int, int], str] = {}
        self._hints: dict[tuple[str, int], int] = {}
        self._wants_plugin = False
        self._reasons: dict[Reason, None] = {}
        self._lines = self._nccl_lines = self._torn = self._unknown = self._overlong = self._dropped = 0

    def source(self, name: str) -> None:
        """What is read from now on."""
        self._sources.append(name)
        self._splitter = Splitter()

    def feed(self, line: Line) -> None:
        """Take one line."""
        self._lines += 1
        self._overlong += line.overlong
        if not _RELEVANT.search(line.text):
            return
        for entry in self._splitter.entries(line):
            if entry.host:
                self._entry(entry)
            else:
                self._without_header(entry)

    def report(self, ranks: Mapping[tuple[str, int], int] | None = None, world_size: int | None = None) -> NcclReport:
        """What all lines say.

        Args:
            ranks: rank in the job of each (host, process), where a record of the job has it.
            world_size: of the job, likewise.
        """
        communicators = tuple(self._communicators.values())
        connections = resolve(self._connections, communicators, Known(self._hints, ranks, world_size))
        hcas = tuple(self._hcas.values())
        return NcclReport(
            sources=tuple(self._sources),
            versions=tuple(self._versions),
            networks_loaded=tuple(self._networks),
            providers=tuple(self._providers),
            environment=tuple(sorted(self._environment)),
            hcas=hcas,
            interfaces=tuple(self._interfaces),
            plugins=tuple(self._plugins),
            gdr=tuple(self._gdr),
            communicators=communicators,
            connections=connections,
            messages=self.complaints.messages(),
            watchdog=self._watchdog.reports(),
            fallback=find_fallback(connections, hcas, tuple(self._reasons)),
            counts=Counts(
                lines=self._lines,
                nccl_lines=self._nccl_lines,
                torn=self._torn,
                unknown_connections=self._unknown,
                overlong=self._overlong,
                dropped=self._dropped,
            ),
        )

    def _without_header(self, entry: Entry) -> None:
        text = entry.text
        if is_watchdog(text):
            self._watchdog.feed(text, entry.rank)
        elif NAMES_A_TRANSPORT.search(text):
            self._torn += 1
            self._unknown += 1
        elif not entry.torn and text.startswith(("NCCL version ", "RCCL version ")):
            self._nccl_lines += 1
            self._apply(entry)
        else:
            self.complaints.exception(text)

    def _entry(self, entry: Entry) -> None:
        self._nccl_lines += 1
        if entry.rank is not None and len(self._hints) < MAX_RECORDS:
            self._hints.setdefault((entry.host, entry.pid), entry.rank)
        if entry.torn:
            self._torn += 1
            self._unknown += bool(LOOKS_LIKE_A_CONNECTION.search(entry.text))
        if entry.level == "WARN":
            self.complaints.warning(entry)
        elif not entry.torn and not self._apply(entry):
            if LOOKS_LIKE_A_CONNECTION.search(entry.text):
                self._unknown += 1
            self.complaints.info(entry)

    def _apply(self, entry: Entry) -> bool:
        """Let the first rule that matches take the entry."""
        for rule in RULES:
            if rule.starts and not entry.text.startswith(rule.starts):
                continue
            match = rule.pattern.match(entry.text)
            if match:
                self._take(rule, entry, match)
                return True
        return False

    def _take(self, rule: Rule, entry: Entry, match: re.Match[str]) -> None:
        getattr(self, f"_on_{rule.field}")(entry, match)

    # Connections

    def _on_connection(self, entry: Entry, match: re.Match[str]) -> None:
        found = match.groupdict()
        transport = str(found["transport"])
        connection = Connection(
            process=_process(entry),
            communicator="",
            channel=int(found["channel"]),
            index=_integer(found.get("index")),
            source=_endpoint(found, "source"),
            destination=_endpoint(found, "destination"),
            direction=found.get("side") or "send",
            transport="SHM/direct/direct" if transport == "direct shared memory" else transport,
            family=family_of(transport),
            net_device=_integer(found.get("net_device")),
            gdrdma=bool(found.get("gdr")),
            flags=tuple(flag for key, flag in _FLAGS.items() if found.get(key)),
            proxy_rank=_integer(found.get("proxy")),
        )
        self._connect(entry, connection, found.get("comm") or "")

    def _on_collnet_connection(self, entry: Entry, match: re.Match[str]) -> None:
        own = Endpoint(int(match["rank"]), "")
        sends = match["side"] == "send"
        connection = Connection(
            process=_process(entry),
            communicator="",
            channel=int(match["channel"]),
            index=_integer(match["index"]),
            source=own if sends else None,
            destination=None if sends else own,
            direction=match["side"],
            transport=match["transport"],
            family=Family.COLLNET,
            net_device=int(match["net_device"]),
            gdrdma=bool(match["gdr"]),
            flags=("PCI",) if match["pci"] else (),
        )
        self._connect(entry, connection, match["comm"] or "")

    def _on_old_connection(self, entry: Entry, match: re.Match[str]) -> None:
        found = match.groupdict()
        transport = found["transport"] or found["transport_p2p"] or "SHM/direct/direct"
        connection = Connection(
            process=_process(entry),
            communicator="",
            channel=int(found["channel"]),
            index=None,
            source=_endpoint(found, "source"),
            destination=_endpoint(found, "destination"),
            direction=found["side"] or "send",
            transport=transport,
            family=family_of(transport),
            net_device=_integer(found["net_device"]),
            gdrdma=bool(found["gdr"]),
        )
        self._connect(entry, connection, "")

    def _connect(self, entry: Entry, connection: Connection, pointer: str) -> None:
        thread = (entry.host, entry.pid, entry.thread)
        pointer = pointer or self._current.get(thread, "")
        known = self._communicators.get((entry.host, entry.pid, pointer))
        if known is not None:
            connection = replace(connection, communicator=known.id)
        self._keep(self._connections, connection, None)

    # Communicators

    def _on_communicator(self, entry: Entry, match: re.Match[str]) -> None:
        more, pointer = match["more"], match["comm"]
        known = self._communicators.get((entry.host, entry.pid, pointer))
        identity, parent = _COMM_ID.search(more), _PARENT.search(more)
        process = Process(entry.host, entry.pid, int(match["cuda"]))
        fresh = Communicator(
            id=identity[1] if identity else f"{pointer}@{entry.host}:{entry.pid}",
            process=process,
            rank=int(match["rank"]),
            size=int(match["size"]),
            nvml_device=_integer(match["nvml"]),
            bus_id=match["bus"],
            parent=parent[1] if parent else "",
        )
        # A COMPLETE ends the set-up of what is known already; an address may be used again by a later communicator.
        same = known is not None and (known.rank, known.size) == (fresh.rank, fresh.size) and not known.ended
        if not same:
            self._keep(self._communicators, (entry.host, entry.pid, pointer), fresh, overwrite=True)
        self._set_current(entry, pointer)

    def _set_current(self, entry: Entry, pointer: str) -> None:
        if len(self._current) < MAX_RECORDS:
            self._current[entry.host, entry.pid, entry.thread] = pointer

    def _on_communicator_size(self, entry: Entry, match: re.Match[str]) -> None:
        self._set_current(entry, match["comm"])
        self._change(entry, nodes=int(match["nodes"]), mnnvl=int(match["mnnvl"]) > 0)

    def _on_communicator_end(self, entry: Entry, match: re.Match[str]) -> None:
        self.complaints.teardown(entry)
        key = (entry.host, entry.pid, match["comm"])
        if key in self._communicators:
            self._communicators[key] = replace(self._communicators[key], ended=match["end"])

    def _on_nvls(self, entry: Entry, match: re.Match[str]) -> None:
        if "comm" in match.re.groupindex:
            self._set_current(entry, match["comm"])
        self._change(entry, nvls=True)

    def _on_collnet(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        self._change(entry, collnet=True)

    def _on_channels(self, entry: Entry, match: re.Match[str]) -> None:
        self._change(entry, channels=int(match["coll"]), p2p_channels=int(match["p2p"]))

    def _on_ring(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        self._count(entry, "rings")

    def _on_tree(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        self._count(entry, "trees")

    def _change(self, entry: Entry, **changes: int | bool) -> None:
        """Changes the communicator that the thread is setting up, if that is known."""
        key = (entry.host, entry.pid, self._current.get((entry.host, entry.pid, entry.thread), ""))
        if key in self._communicators:
            self._communicators[key] = replace(self._communicators[key], **changes)  # type: ignore[arg-type]

    def _count(self, entry: Entry, name: str) -> None:
        key = (entry.host, entry.pid, self._current.get((entry.host, entry.pid, entry.thread), ""))
        if key in self._communicators:
            self._change(entry, **{name: getattr(self._communicators[key], name) + 1})

    # What was found and chosen

    def _on_version(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        self._keep(self._versions, match["version"].replace("NCCL version ", "").replace(" version", ""), None)

    def _on_network(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        self._keep(self._networks, match["network"], None)

    def _on_provider(self, entry: Entry, match: re.Match[str]) -> None:
        provider = match["provider"]
        self._keep(self._providers, provider, None)
        if provider.startswith(("tcp", "sockets", "udp")):
            self._because(entry, TCP_PROVIDER, f"the Libfabric provider is {provider}")

    def _on_hcas(self, entry: Entry, match: re.Match[str]) -> None:
        for device in DEVICE.finditer(match["devices"]):
            self._hca(entry.host, device["name"], int(device["port"]), link=device["link"])
        if match["interface"]:
            interface = Interface(entry.host, "oob", match["interface"], _address(match["address"]))
            self._keep(self._interfaces, interface, None)

    def _on_hca(self, entry: Entry, match: re.Match[str]) -> None:
        self._hca(
            entry.host,
            match["name"],
            int(match["port"]),
            link=match["link"],
            speed_mbps=int(match["speed"]),
            provider=match["provider"],
        )

    def _on_hca_gdr(self, entry: Entry, match: re.Match[str]) -> None:
        enabled = match["state"] == "Enabled"
        for key in [key for key in self._hcas if key[:2] == (entry.host, match["name"])]:
            self._hcas[key] = replace(self._hcas[key], gdr=enabled)
        self._keep(self._gdr, GdrDecision(entry.host, enabled, match["name"]), None)

    def _on_gdr(self, entry: Entry, match: re.Match[str]) -> None:
        decision = GdrDecision(entry.host, match["state"] == "Enabled", match["subject"], match["reason"] or "")
        self._keep(self._gdr, decision, None)

    def _hca(self, host: str, name: str, port: int, **facts: str | int) -> None:
        known = self._hcas.get((host, name, port)) or Hca(host, name, port, "")
        self._keep(self._hcas, (host, name, port), replace(known, **facts), overwrite=True)  # type: ignore[arg-type]

    def _on_no_hca(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        self._because(entry, NO_DEVICE, "NCCL found no RDMA device (NET/IB : No device found)")

    def _on_no_verbs(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        self._because(entry, NO_DEVICE, "libibverbs could not be opened")

    def _on_bootstrap(self, entry: Entry, match: re.Match[str]) -> None:
        self._addresses(entry, "bootstrap", match["interfaces"])

    def _on_bootstrap_device(self, entry: Entry, match: re.Match[str]) -> None:
        self._keep(self._interfaces, Interface(entry.host, "bootstrap", match["device"]), None)

    def _on_socket_interfaces(self, entry: Entry, match: re.Match[str]) -> None:
        self._addresses(entry, "socket", match["interfaces"])

    def _on_interface(self, entry: Entry, match: re.Match[str]) -> None:
        self._keep(self._interfaces, Interface(entry.host, "found", match["name"]), None)

    def _addresses(self, entry: Entry, use: str, text: str) -> None:
        for found in ADDRESS.finditer(text):
            self._keep(self._interfaces, Interface(entry.host, use, found["name"], found["address"]), None)

    def _on_environment(self, entry: Entry, match: re.Match[str]) -> None:
        name, value = match["name"], match["value"]
        self._keep(self._environment, (name, value), None)
        off = (name == "NCCL_IB_DISABLE" and value not in {"0", ""}) or (
            name == "NCCL_NET" and value.lower() == "socket"
        )
        if off:
            self._because(entry, SWITCHED_OFF, f"{name}={value} is set")
        self._wants_plugin |= name == "NCCL_NET_PLUGIN" and value != "none"

    def _because(self, entry: Entry, kind: str, text: str) -> None:
        self._keep(self._reasons, Reason(entry.host, kind, text), None)

    def _on_plugin_loaded(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        self._plugin(match["kind"], match["name"], "loaded", match["detail"])

    def _on_plugin_loaded_external(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        self._plugin(match["kind"] or "", match["name"], "loaded")

    def _on_plugin_requested(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        self._plugin(match["kind"] or "", match["name"].removesuffix("\\n"), "requested")
        self._wants_plugin |= match["kind"] in {None, "NET"}

    def _on_plugin_failed(self, entry: Entry, match: re.Match[str]) -> None:
        name, kind = match["name"] or match["other"], match["kind"] or ""
        self._plugin(kind, name, "failed")
        if kind in {"", "network"}:
            self._because(entry, PLUGIN_FAILED, f"the network plug-in {name} could not be used")

    def _on_plugin_missing(self, entry: Entry, match: re.Match[str]) -> None:
        names = re.findall(r"[^\s,;]*\.so[^\s,;]*", match["name"] or match["names"] or "")
        for name in names or [""]:
            self._plugin(match["kind"], name.rstrip("."), "missing")
        if match["kind"] == "NET" and self._wants_plugin:
            self._because(entry, PLUGIN_FAILED, "the network plug-in that was asked for was not found")

    def _plugin(self, kind: str, name: str, status: str, detail: str = "") -> None:
        kind = kind.lower()
        self._keep(self._plugins, Plugin(_KINDS.get(kind, kind), name, status, detail), None)

    def _on_trace(self, entry: Entry, match: re.Match[str]) -> None:
        self.complaints.trace(entry, PurePath(match["file"]).name, int(match["code"]))

    def _keep(self, store: dict[K, T], key: K, value: T, *, overwrite: bool = False) -> None:
        """Remembers a record within the limits on memory; the first of equal keys stays unless told otherwise."""
        limit = MAX_RECORDS if store is self._connections or store is self._communicators else MAX_NAMES
        if key in store:
            if overwrite:
                store[key] = value
        elif len(store) < limit:
            store[key] = value
        else:
            self._dropped += 1


def family_of(transport: str) -> Family:
    """The kind of a transport by its name.

    >>> family_of("NET/IBext_v8").name, family_of("NET/AWS Libfabric").name, family_of("NET/FasTrak").name
    ('IB', 'LIBFABRIC', 'OTHER_NET')
    """
    if transport.startswith("P2P"):
        return Family.P2P
    if not transport.startswith("NET/"):
        return Family.SHM
    if transport.startswith("NET/IBext"):
        return Family.IB
    if transport.endswith("Libfabric"):
        return Family.LIBFABRIC
    return _FAMILIES.get(transport, Family.OTHER_NET)


def _process(entry: Entry) -> Process:
    return Process(entry.host, entry.pid, entry.device)


def _endpoint(found: Mapping[str, str | None], side: str) -> Endpoint:
    return Endpoint(int(found[side] or 0), found.get(f"{side}_device") or "")


def _integer(text: str | None) -> int | None:
    return None if text is None else int(text)


def _address(text: str) -> str:
    """An address without its port.

    >>> _address("192.168.0.3<0>")
    '192.168.0.3'
    """
    return text.partition("<")[0]
