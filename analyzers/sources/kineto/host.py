"""What the threads of a rank's host did: its ops, its messages and its waits, where the work itself is on the host.

A message of gloo is an op ``c10d::send`` or ``c10d::recv_`` (its post), with an annotation ``gloo:send`` that ends when
the wait for it returns. When the wait began is not in the trace: the thread then did nothing else, so that it lies at
the last moment before the end of the wait at which something of that thread began or ended.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppdiag.analyzers.sources.kineto.events import HOST_MESSAGES, Category, Events
from ppdiag.analyzers.sources.kineto.labels import Label, labels_of, step_number
from ppdiag.model import NONE, Collective, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

AUTOGRAD = "autograd::engine::evaluate_function"
_CALLS = {"c10d::send": Kind.SEND, "c10d::recv_": Kind.RECV, "c10d::recv_any_source_": Kind.RECV}
_ENDS = {"send": Kind.SEND, "recv": Kind.RECV, "recvAnySource": Kind.RECV}
COLLECTIVES = (
    ("alltoall", Collective.ALL_TO_ALL),
    ("all_to_all", Collective.ALL_TO_ALL),
    ("allreduce", Collective.ALL_REDUCE),
    ("all_reduce", Collective.ALL_REDUCE),
    ("reduce_scatter", Collective.REDUCE_SCATTER),
    ("reducescatter", Collective.REDUCE_SCATTER),
    ("allgather", Collective.ALL_GATHER),
    ("all_gather", Collective.ALL_GATHER),
    ("broadcast", Collective.BROADCAST),
    ("barrier", Collective.BARRIER),
    ("scatter", Collective.SCATTER),
    ("gather", Collective.GATHER),
    ("reduce", Collective.REDUCE),
)
"""Parts of the names of ops and kernels, the first that is found counts."""
_TYPE_BYTES = {
    **dict.fromkeys(("float", "int", "Float", "Int"), 4),
    **dict.fromkeys(("double", "long int", "Double", "Long"), 8),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "Half", "BFloat16", "short int"), 2),
    **dict.fromkeys(("unsigned char", "signed char", "bool", "Byte", "Char"), 1),
}
MOST_PEER = 1 << 20
RETURNED_AT_ONCE_NS = 20_000
"""So long takes the call of a wait, and what lies before it in its thread, where nothing is waited for."""
_ANNOTATED = re.compile(r"nccl:(send|recv) \d{1,7}(?:->|<-)(\d{1,7})|gloo:(send|recv|recvAnySource)")


class Placed(NamedTuple):
    """A label with its place in a thread."""

    label: Label
    start_ns: int
    end_ns: int
    thread: int


@dataclass(slots=True)
class Message:
    """A send, a receive or a collective, as the host posted it.

    Attributes:
        post_ns, called_ns: begin and end of the call that posted it.
        done_ns: when the wait for it returned; None where no wait was seen.
        peer: rank of the other end, in the group or in the job as ``peer_is_global`` says; ``NONE`` unknown.
    """

    kind: Kind
    thread: int
    post_ns: int
    called_ns: int
    done_ns: int | None = None
    wait_ns: int = 0
    peer: int = NONE
    peer_is_global: bool = False
    tag: int = 0
    size_bytes: int = 0
    op: int = 0
    group: tuple[str, tuple[int, ...]] | None = None
    label: Label | None = None
    external: int = NONE


@dataclass(slots=True)
class Op:
    """A forward, backward, weight gradient or optimizer step."""

    label: Label
    start_ns: int
    end_ns: int
    launch_ns: int | None = None
    inferred: bool = False


@dataclass(slots=True)
class Thread:
    """What one thread did, without what is nested in something else of the same sort (all n x 2 or n, by start)."""

    activity: np.ndarray
    autograd: np.ndarray
    """Mask of the activities that the autograd engine made."""
    marks: np.ndarray
    """Moments at which something began or ended, messages aside; sorted."""
    forwards: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Moments at which an op began whose backward is in the trace; sorted."""


def placed_labels(events: Events, category: Category) -> list[Placed]:
    """The annotations of known names, by start."""
    known = {index: labels for index, name in enumerate(events.names) if (labels := labels_of(name))}
    found = []
    for i in events.of(category).tolist():
        times = int(events.start_ns[i]), int(events.end_ns[i]), int(events.thread[i])
        found += [Placed(label, *times) for label in known.get(int(events.name[i]), ())]
    return sorted(found, key=lambda row: row.start_ns)


def step_marks(events: Events, category: Category = Category.LABEL) -> list[tuple[int, int]]:
    """(begin, number) of each step that torch.profiler marked, by begin, on the host or as the device saw it."""
    numbers = {index: number for index, name in enumerate(events.names) if (number := step_number(name)) is not None}
    chosen = [i for i in events.of(category).tolist() if int(events.name[i]) in numbers]
    begins: dict[int, int] = {}
    for i in chosen:  # each stream of a device has its own
        number = numbers[int(events.name[i])]
        begins[number] = min(begins.get(number, int(events.start_ns[i])), int(events.start_ns[i]))
    return sorted((begin, number) for number, begin in begins.items())


def messages_of(events: Events) -> list[Message]:
    """Sends, receives and collectives as the host posted them, by post.

    Of NCCL ``record_param_comms`` is taken, which says most; else the calls of ``c10d``, else annotations. Where the
    first do not say the peer, the annotation inside of them does (torch before 2.3).
    """
    calls = [(i, events.name_of(i)) for i in events.of(Category.COMMUNICATION_OP).tolist()]
    told = [i for i, name in calls if name == "record_param_comms" and _collective_name(events, i)]
    if told:
        found = [_told_message(events, i) for i in told]
    else:
        found = [_called_message(events, i, name) for i, name in calls if name.startswith("c10d::")]
        _find_ends(found, events)
    messages = [message for message in found if message is not None]
    annotated = _annotated_messages(events)
    if not any(message.kind is not Kind.COLLECTIVE for message in messages):
        messages += annotated
    else:
        _take_peers(messages, annotated)
    return sorted(messages, key=lambda message: message.post_ns)


def _annotated_messages(events: Events) -> list[Message]:
    """Sends and receives as annotations name them: ``nccl:send 0->1``, by ranks of their group, and ``gloo:send``.

    One of gloo lasts from the post to the end of the wait.
    """
    known = {index: match for index, name in enumerate(events.names) if (match := _ANNOTATED.fullmatch(name))}
    found = []
    for i in events.of(Category.LABEL).tolist():
        if match := known.get(int(events.name[i])):
            thread, start, end = int(events.thread[i]), int(events.start_ns[i]), int(events.end_ns[i])
            kind = _ENDS[match[1] or match[3]]
            if match[1]:
                found.append(Message(kind, thread, start, end, peer=whole(match[2])))
            else:
                found.append(Message(kind, thread, start, start, end, size_bytes=_size_bytes(events.arguments.get(i))))
    return found


def _take_peers(messages: Sequence[Message], annotated: Sequence[Message]) -> None:
    """Gives messages without a peer that of the annotation inside of them."""
    inside: dict[tuple[int, Kind], list[Message]] = defaultdict(list)
    for message in sorted(annotated, key=lambda message: message.post_ns):
        inside[message.thread, message.kind].append(message)
    starts = {key: np.array([message.post_ns for message in found]) for key, found in inside.items()}
    for message in messages:
        key = message.thread, message.kind
        if message.peer == NONE and key in starts:
            at = int(np.searchsorted(starts[key], message.post_ns, "left"))
            if at < len(starts[key]) and starts[key][at] <= message.called_ns:
                message.peer = inside[key][at].peer


def _collective_name(events: Events, i: int) -> str:
    arguments = events.arguments.get(i)
    name = arguments.collective if arguments else None
    return name if isinstance(name, str) else ""


def _told_message(events: Events, i: int) -> Message | None:
    arguments = events.arguments[i]
    name = str(arguments.collective)
    kind = _ENDS.get(name)
    if kind is None and collective(name) is Collective.OTHER:
        return None  # waits, and the begin and end of a coalesced batch
    peer = arguments.target if kind is Kind.SEND else arguments.source
    known = whole(peer)
    times = int(events.thread[i]), int(events.start_ns[i]), int(events.end_ns[i])
    message = Message(kind or Kind.COLLECTIVE, *times, peer_is_global=known != NONE)
    message.peer = (known if known != NONE else whole(arguments.peer)) if kind else NONE
    message.op = 0 if kind else int(collective(name))
    message.group = group_of(arguments)
    message.external = whole(arguments.external, most=1 << 62)
    message.size_bytes = max(0, whole(arguments.elements, most=1 << 50)) * _TYPE_BYTES.get(str(arguments.dtype), 0)
    return message


def _called_message(events: Events, i: int, name: str) -> Message | None:
    kind = _CALLS.get(name, Kind.COLLECTIVE)
    message = Message(kind, int(events.thread[i]), int(events.start_ns[i]), int(events.end_ns[i]))
    if kind is Kind.COLLECTIVE:
        message.op = int(collective(name))
        return message if message.op or "barrier" in name else None
    inputs = events.arguments[i].inputs if i in events.arguments else None
    if isinstance(inputs, list) and len(inputs) == 4 and name != "c10d::recv_any_source_":
        message.peer, message.tag = whole(inputs[2]), max(0, whole(inputs[3], most=1 << 31))
    return message


def collective(name: str) -> Collective:
    """Which collective an op or kernel of this name is."""
    lowered = name.lower()
    return next((found for part, found in COLLECTIVES if part in lowered), Collective.OTHER)


def group_of(arguments: Any) -> tuple[str, tuple[int, ...]] | None:  # noqa: ANN401  (decoded JSON)
    """Name and members of the process group that the arguments name; None where they do not."""
    members = arguments.members
    if isinstance(members, str):
        members = [part.strip() for part in members.strip("[] ").split(",")]
    if not isinstance(members, list):
        return None
    ranks = tuple(whole(rank) for rank in members[:MOST_PEER])
    return (str(arguments.group or "")[:200], ranks) if ranks and min(ranks) >= 0 else None


def whole(value: object, most: int = MOST_PEER) -> int:
    """A whole number below ``most``, also as text; ``NONE`` where it is none."""
    if isinstance(value, str) and len(value) < 20 and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < most else NONE


def _find_ends(messages: Iterable[Message | None], events: Events) -> None:
    """Gives each message the end of its annotation, which begins within the call that posted it."""
    waiting: dict[tuple[bool, int], list[Message]] = defaultdict(list)
    collectives = []
    for message in messages:
        if message is not None and message.kind is not Kind.COLLECTIVE:
            waiting[message.kind is Kind.SEND, message.thread].append(message)
        elif message is not None:
            collectives.append(message)
    annotations = [(i, events.name_of(i)) for i in events.of(Category.LABEL).tolist()]
    annotations = [(i, name) for i, name in annotations if name.startswith(HOST_MESSAGES)]
    for key, found in waiting.items():
        own = [
            i
            for i, name in annotations
            if int(events.thread[i]) == key[1] and (":send" in name, ":recv" in name)[not key[0]]
        ]
        _pair(sorted(found, key=lambda message: message.post_ns), own, events)
    others = [i for i, name in annotations if ":send" not in name and ":recv" not in name]
    if len(others) == len(collectives):  # they run on threads of gloo's own, in the order of their posts
        order = sorted(others, key=lambda i: int(events.start_ns[i]))
        for message, i in zip(sorted(collectives, key=lambda message: message.post_ns), order, strict=True):
            message.done_ns = max(int(events.end_ns[i]), message.called_ns)


def _pair(messages: Sequence[Message], annotations: Sequence[int], events: Events) -> None:
    own = sorted(annotations, key=lambda i: int(events.start_ns[i]))
    at = 0
    for message in messages:
        while at < len(own) and int(events.start_ns[own[at]]) < message.post_ns:
            at += 1
        if at < len(own) and int(events.start_ns[own[at]]) <= message.called_ns:
            message.done_ns = int(events.end_ns[own[at]])
            message.size_bytes = _size_bytes(events.arguments.get(own[at]))
            at += 1


def _size_bytes(arguments: Any) -> int:  # noqa: ANN401  (decoded JSON)
    """Bytes of the first input of an annotation; 0 where its shape was not recorded."""
    try:
        shape, kind = arguments.shapes[0], arguments.types[0]
        size = math.prod(whole(length, most=1 << 40) for length in shape[:16]) * _TYPE_BYTES.get(kind, 0)
    except (AttributeError, TypeError, IndexError, KeyError):
        return 0
    return size if 0 <= size < 1 << 50 else 0


def threads_of(events: Events, labels: Sequence[Placed]) -> dict[int, Thread]:
    """The threads of the host, from its ops and annotations."""
    ops = events.of(Category.CPU_OP)
    forwards = events.of(Category.FORWARD_MARK)
    calls = events.of(Category.COMMUNICATION_OP)
    autograd = np.array([name.startswith(AUTOGRAD) for name in events.names] or [False])
    found = {}
    for thread in np.unique(np.concatenate([events.thread[ops], events.thread[calls]])).tolist():
        own = ops[events.thread[ops] == thread]
        outer = own[_outermost(events.start_ns[own], events.end_ns[own])]
        activity = np.stack([events.start_ns[outer], events.end_ns[outer]], axis=1)
        called = calls[events.thread[calls] == thread]
        edges = [activity.ravel(), events.start_ns[called], events.end_ns[called]]
        edges += [np.array([(row.start_ns, row.end_ns) for row in labels if row.thread == thread], np.int64).ravel()]
        marks = np.unique(np.concatenate(edges))
        forward = np.sort(events.start_ns[forwards[events.thread[forwards] == thread]])
        found[thread] = Thread(activity, autograd[events.name[outer]], marks, forward)
    return found


def _outermost(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Indices of the intervals that lie in no other, by start."""
    order = np.lexsort((-end, start))
    reach = np.maximum.accumulate(end[order])
    outer = np.ones(len(order), bool)
    outer[1:] = start[order][1:] >= reach[:-1]
    return order[outer]


def find_waits(messages: Sequence[Message], threads: dict[int, Thread]) -> None:
    """When the wait for each message began: see the head of this file."""
    dones: dict[int, list[int]] = defaultdict(list)
    for message in messages:
        if message.done_ns is not None and message.kind is not Kind.COLLECTIVE:
            dones[message.thread].append(message.done_ns)
    empty = np.empty(0, np.int64)
    marks = {
        thread: np.unique(np.concatenate([threads[thread].marks if thread in threads else empty, dones[thread]]))
        for thread in {message.thread for message in messages}
    }
    for message in messages:
        if message.done_ns is None:
            continue
        own = marks[message.thread]
        at = int(np.searchsorted(own, message.done_ns, "left")) - 1
        last = int(own[at]) if at >= 0 else message.called_ns
        message.done_ns = max(message.done_ns, message.called_ns)
        waited_ns = message.done_ns - max(last, message.called_ns)
        message.wait_ns = message.done_ns - (waited_ns if waited_ns > RETURNED_AT_ONCE_NS else 0)


def name_messages(messages: Sequence[Message], labels: Sequence[Placed]) -> None:
    """Gives each message the label around its post (the annotations of one thread follow each other)."""
    around: dict[int, list[Placed]] = defaultdict(list)
    for row in labels:
        if row.label.kind in (Kind.SEND, Kind.RECV):
            around[row.thread].append(row)
    starts = {thread: np.array([row.start_ns for row in rows]) for thread, rows in around.items()}
    for message in messages:
        if message.thread not in starts or message.kind is Kind.COLLECTIVE:
            continue
        at = int(np.searchsorted(starts[message.thread], message.post_ns, "right")) - 1
        if at < 0:
            continue
        row = around[message.thread][at]
        if message.post_ns <= row.end_ns and row.label.kind is message.kind:
            message.label = row.label


def payload_of(message: Message) -> Payload:
    """What a message carries, as its label says."""
    return message.label.payload if message.label else Payload.UNKNOWN
