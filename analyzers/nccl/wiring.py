"""What connects the ranks: communicators and their channels, as the lines come."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from ppdiag.analyzers.nccl.bounded import Bounded
from ppdiag.analyzers.nccl.model import Communicator, Connection, Endpoint, Family, Process

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ppdiag.analyzers.nccl.complaints import Complaints
    from ppdiag.analyzers.nccl.lines import Entry

Thread: TypeAlias = tuple[str, int, int]
"""Host, process id, thread id."""

MAX_RECORDS = 500_000
"""Connections, and communicators: about 200 MB at most. Beyond it they are counted, not kept."""

_COMM_ID = re.compile(r"commId (0x[0-9a-f]{1,16})")
_SPLIT = re.compile(
    r"parent (?P<parent>0x[0-9a-f]{1,16})(?: (?:split|child)Count (?P<count>\d{1,9}))? color (?P<color>-?\d{1,12})"
)
_FAMILIES = {"NET/IB": Family.IB, "NET/Socket": Family.SOCKET}
_FLAGS = {"read": "read", "copy": "CE", "pci": "PCI", "shared": "Shared"}


@dataclass(slots=True)
class _Draft:
    """What a thread wrote before its communicator was named: up to NCCL 2.18.1 only the end of a set-up has a line."""

    connections: list[Connection] = field(default_factory=list)
    changes: dict[str, int | bool] = field(default_factory=dict)


class Wiring:
    """One method for each rule about a connection or a communicator."""

    def __init__(self, complaints: Complaints) -> None:
        self._complaints = complaints
        self.connections: Bounded[Connection, None] = Bounded(MAX_RECORDS)
        self._communicators: Bounded[tuple[str, int, str], Communicator] = Bounded(MAX_RECORDS)
        self._former: Bounded[int, Communicator] = Bounded(MAX_RECORDS)
        self._current: Bounded[Thread, str] = Bounded(MAX_RECORDS)
        self._drafts: Bounded[Thread, _Draft] = Bounded(MAX_RECORDS)

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """All of them, also those whose address was used again."""
        return (*self._former.values(), *self._communicators.values())

    @property
    def dropped(self) -> int:
        """Records beyond the limits."""
        return self.connections.dropped + self._communicators.dropped + self._former.dropped

    def on_connection(self, entry: Entry, match: re.Match[str]) -> None:
        """A channel between two ranks."""
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

    def on_collnet_connection(self, entry: Entry, match: re.Match[str]) -> None:
        """A channel into the network."""
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

    def on_old_connection(self, entry: Entry, match: re.Match[str]) -> None:
        """A channel of NCCL 2.4 to 2.7."""
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
        thread = _thread(entry)
        pointer = pointer or self._current.get(thread, "")
        known = self._communicators.get((entry.host, entry.pid, pointer))
        if known is not None:
            connection = replace(connection, communicator=known.id)
        elif connection not in self.connections:
            self._draft(thread).connections.append(connection)
        self.connections.keep(connection, None)

    def on_communicator(self, entry: Entry, match: re.Match[str]) -> None:
        """The beginning or end of a communicator's set-up."""
        fresh = self._communicator(entry, match)
        key, thread = (entry.host, entry.pid, match["comm"]), _thread(entry)
        known = self._communicators.get(key)
        # A COMPLETE ends the set-up of what is known already; an address may be used again by a later communicator.
        if known is None or known.ended or (known.id, known.rank, known.size) != (fresh.id, fresh.rank, fresh.size):
            if known is not None:
                self._former.keep(len(self._former), known)
            self._communicators.change(key, fresh)
        if match["event"] == "START":
            self._drafts.pop(thread, None)
            self._current.change(thread, match["comm"])
        else:
            self._finish(thread, fresh, key)

    def _communicator(self, entry: Entry, match: re.Match[str]) -> Communicator:
        more = match["more"]
        identity, split = _COMM_ID.search(more), _SPLIT.search(more)
        parent = self._communicators.get((entry.host, entry.pid, split["parent"])) if split else None
        own = f"{match['comm']}@{entry.host}:{entry.pid}"
        # The children of one split have no commId in common, but a parent, a count of splits and a colour.
        child = f"{parent.id}/{split['count'] or ''}.{split['color']}" if split and parent else own
        return Communicator(
            id=identity[1] if identity else child,
            process=Process(entry.host, entry.pid, int(match["cuda"])),
            rank=int(match["rank"]),
            size=int(match["size"]),
            nvml_device=_integer(match["nvml"]),
            bus_id=match["bus"],
            parent=split["parent"] if split else "",
        )

    def _finish(self, thread: Thread, communicator: Communicator, key: tuple[str, int, str]) -> None:
        """The set-up is over: what the thread wrote before, without a START, was about this communicator."""
        self._current.pop(thread, None)
        draft = self._drafts.pop(thread, None)
        if draft is None or key not in self._communicators:
            return
        self._communicators[key] = replace(self._communicators[key], **draft.changes)  # type: ignore[arg-type]
        for connection in draft.connections:
            mine = connection.source if connection.direction == "send" else connection.destination
            if mine is not None and mine.rank == communicator.rank and connection in self.connections:
                del self.connections[connection]
                self.connections.keep(replace(connection, communicator=communicator.id), None)

    def _draft(self, thread: Thread) -> _Draft:
        draft = self._drafts.get(thread) or _Draft()
        self._drafts.keep(thread, draft)
        return draft

    def _set_current(self, entry: Entry, pointer: str) -> None:
        self._current.change(_thread(entry), pointer)

    def on_communicator_size(self, entry: Entry, match: re.Match[str]) -> None:
        """On how many machines it is."""
        self._set_current(entry, match["comm"])
        self._change(entry, nodes=int(match["nodes"]), mnnvl=int(match["mnnvl"]) > 0)

    def on_communicator_end(self, entry: Entry, match: re.Match[str]) -> None:
        """A communicator is taken down."""
        self._complaints.teardown(entry)
        key = (entry.host, entry.pid, match["comm"])
        if key in self._communicators:
            self._communicators[key] = replace(self._communicators[key], ended=match["end"])

    def on_nvls(self, entry: Entry, match: re.Match[str]) -> None:
        """NVLink SHARP is set up."""
        if "comm" in match.re.groupindex:
            self._set_current(entry, match["comm"])
        self._change(entry, nvls=True)

    def on_collnet(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        """Reductions in the network are set up."""
        self._change(entry, collnet=True)

    def on_channels(self, entry: Entry, match: re.Match[str]) -> None:
        """How many channels it has."""
        self._change(entry, channels=int(match["coll"]), p2p_channels=int(match["p2p"]))

    def on_ring(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        """One ring."""
        self._count(entry, "rings")

    def on_tree(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        """One tree."""
        self._count(entry, "trees")

    def _change(self, entry: Entry, **changes: int | bool) -> None:
        """Changes the communicator that the thread is setting up."""
        key = (entry.host, entry.pid, self._current.get(_thread(entry), ""))
        if key in self._communicators:
            self._communicators[key] = replace(self._communicators[key], **changes)  # type: ignore[arg-type]
        else:
            self._draft(_thread(entry)).changes.update(changes)

    def _count(self, entry: Entry, name: str) -> None:
        known = self._communicators.get((entry.host, entry.pid, self._current.get(_thread(entry), "")))
        before = getattr(known, name) if known else self._draft(_thread(entry)).changes.get(name, 0)
        self._change(entry, **{name: before + 1})


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


def _thread(entry: Entry) -> Thread:
    return (entry.host, entry.pid, entry.thread)


def _process(entry: Entry) -> Process:
    return Process(entry.host, entry.pid, entry.device)


def _endpoint(found: Mapping[str, str | None], side: str) -> Endpoint:
    return Endpoint(int(found[side] or 0), found.get(f"{side}_device") or "")


def _integer(text: str | None) -> int | None:
    return None if text is None else int(text)
