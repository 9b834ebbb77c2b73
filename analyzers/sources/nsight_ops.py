"""The processes of an Nsight Systems export, and what their calls of NCCL and their launches say of a pipeline."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.analyzers.sources.device_ops import NEVER_LAUNCHED, Kernels, Message, Op, Range
from ppdiag.analyzers.sources.kineto.host import Message as Posted
from ppdiag.analyzers.sources.kineto.host import Placed, Thread
from ppdiag.analyzers.sources.kineto.host_ops import inferred_ops
from ppdiag.analyzers.sources.kineto.labels import Label as Placeable
from ppdiag.analyzers.sources.nsight_nccl import CALLS, INITS, UNKNOWN, Payload
from ppdiag.model import NONE, Kind
from ppdiag.trace import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Call(NamedTuple):
    """A call of NCCL on the host. Times in ns."""

    name: str
    start_ns: int
    thread: int
    payload: Payload


@dataclass(slots=True)
class Process:
    """One process of one file."""

    path: Path
    number: int
    device: int
    kernels: Kernels
    """Their threads are global ids."""
    names: list[str]
    """Of the kernels' communication only, in the order of the kernels."""
    ranges: list[Range] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    host: str = ""
    synchronising: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    """Begin and end of the calls in which it waited for its device."""

    @property
    def threads(self) -> np.ndarray:
        """Which thread launched each kernel."""
        return np.zeros(len(self.kernels.start_ns), np.int64) if self.kernels.thread is None else self.kernels.thread

    def inits(self) -> list[Payload]:
        """What this process said of itself when communicators began."""
        return [call.payload for call in self.calls if call.name in INITS and call.payload.rank != UNKNOWN]


class Groups:
    """The communicators of a job as process groups."""

    def __init__(self, ranks: dict[int, Process]) -> None:
        users: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._members: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, process in ranks.items():
            for call in process.calls:
                if call.payload.communicator != UNKNOWN:
                    users[call.payload.communicator][rank] |= {call.payload.peer} - {UNKNOWN}
            for init in process.inits():
                self._members[init.communicator][init.rank] = rank
        for communicator, peers in users.items():
            if len(self._members[communicator]) < len(peers):  # its begin is not in the recording
                self._members[communicator] = _members(peers)
        self._index = {communicator: i for i, communicator in enumerate(sorted(users))}
        self.groups = [
            ProcessGroup(
                f"communicator {i}", tuple(self._members[communicator].values()) or tuple(sorted(users[communicator]))
            )
            for communicator, i in self._index.items()
        ]

    def index(self, communicator: int) -> int:
        """Place in ``groups``; ``NONE`` where the communicator is not known."""
        return self._index.get(communicator, NONE)

    def rank(self, communicator: int, member: int) -> int:
        """The job's rank of a communicator's; ``NONE`` where it is not in the recording."""
        return self._members[communicator].get(member, NONE) if communicator in self._members else NONE


def _members(peers: Mapping[int, set[int]]) -> dict[int, int]:
    """The members of a communicator by their number in it, from which numbers each rank that uses it calls.

    Ranks keep their order. Where some left no trace, that does not give their numbers: those of the job are then tried,
    and nothing is known where a rank would call itself by them.

    >>> _members({4: {1}, 6: {0}}), _members({1: {0, 2}, 2: {1, 3}}), _members({1: {1}, 3: {0, 2}})
    ({0: 4, 1: 6}, {1: 1, 2: 2}, {})
    """
    size = 1 + max((number for called in peers.values() for number in called), default=-1)
    if size <= len(peers):
        return dict(enumerate(sorted(peers)))
    fits = not any(rank in called for rank, called in peers.items())
    return {rank: rank for rank in sorted(peers)} if fits else {}


def messages_of(rank: int, process: Process, groups: Groups) -> list[Message]:
    """NCCL's kernels as messages: a call belongs to the first kernel of NCCL that its thread launches from then on."""
    kernels = process.kernels
    carriers = np.flatnonzero(kernels.communicates)
    threads = process.threads
    found: list[Message] = []
    seq: Counter[tuple[int, ...]] = Counter()
    for thread in np.unique(threads[carriers]).tolist():
        own = carriers[threads[carriers] == thread]
        own = own[np.argsort(kernels.launch_ns[own], kind="stable")]
        calls = [call for call in process.calls if call.thread == thread and call.name in CALLS]
        places = np.searchsorted(kernels.launch_ns[own], np.array([call.start_ns for call in calls], np.int64))
        for call, place in sorted(zip(calls, places.tolist(), strict=True), key=lambda pair: pair[0].start_ns):
            if place < len(own):
                found += _message(call, rank, (kernels, int(own[place])), groups, seq)
    return sorted(found, key=lambda message: (message.start_ns, message.end_ns))


def _message(
    call: Call, rank: int, carrier: tuple[Kernels, int], groups: Groups, seq: Counter[tuple[int, ...]]
) -> list[Message]:
    """A call as a message; none where its peer or group is not known."""
    kind, op = CALLS[call.name]
    group = groups.index(call.payload.communicator)
    peer = groups.rank(call.payload.communicator, call.payload.peer) if kind is not Kind.COLLECTIVE else NONE
    if group == NONE or peer == rank or (kind is not Kind.COLLECTIVE and call.payload.peer == UNKNOWN):
        return []
    kernels, at = carrier
    key = (group, kind, peer) if kind is not Kind.COLLECTIVE else (group,)
    number = seq[key]
    seq[key] += 1
    times = (int(kernels.start_ns[at]), int(kernels.end_ns[at]), int(kernels.launch_ns[at]))
    return [Message(kind, op, group, peer, number, max(call.payload.size_bytes, 0), *times)]


def ops_between_messages(process: Process) -> list[Op]:
    """The ops of a process whose ranges name none: kernels launched between two calls of sends and receives.

    Those that the thread of these calls launches are of a forward, those of another thread (autograd's) of a backward.
    """
    calls = [call for call in process.calls if call.name in ("ncclSend", "ncclRecv")]
    if not calls:
        return []
    main = Counter(call.thread for call in calls).most_common(1)[0][0]
    posts = [call for call in calls if call.thread == main]
    kernels = process.kernels
    threads = process.threads
    rows = np.flatnonzero(~kernels.communicates & (kernels.launch_ns != NEVER_LAUNCHED))
    rows = rows[np.argsort(kernels.launch_ns[rows], kind="stable")]
    launch_ns = kernels.launch_ns[rows]
    thread = Thread(np.stack([launch_ns, launch_ns], axis=1), threads[rows] != main, launch_ns)
    messages = [Posted(CALLS[call.name][0], main, call.start_ns, call.start_ns) for call in posts]
    optimizers = [part for part in process.ranges if part.label.kind is Kind.OPTIMIZER]
    placed = [Placed(Placeable(Kind.OPTIMIZER), part.start_ns, part.end_ns, main) for part in optimizers]
    ops = []
    for op, first, last in inferred_ops(thread, messages, placed):
        own = rows[first : last + 1]
        times = int(kernels.start_ns[own].min()), int(kernels.end_ns[own].max()), int(launch_ns[first])
        ops.append(Op(op.label.kind, NONE, NONE, *times))
    return ops
