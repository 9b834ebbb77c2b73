"""What a rank's device did: ops from the annotations as the device saw them, messages from NCCL's kernels.

A kernel of a receive begins when its stream has come so far, and ends when the bytes are there; one of a send begins
when what it sends is there. So the sender's kernel says which part of the receiver's was waiting, and which transfer.
Where annotations of the host have no twin on the device, ops are the kernels that were launched inside of them, and
without annotations those launched between two messages: by the thread that posts messages in a forward, by another one
(autograd's) in a backward.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.analyzers.sources.kineto.events import Category, Events
from ppdiag.analyzers.sources.kineto.host import (
    Message,
    Op,
    Placed,
    Thread,
    collective,
    group_of,
    placed_labels,
    whole,
)
from ppdiag.analyzers.sources.kineto.host_ops import inferred_ops, main_thread
from ppdiag.model import NONE, PIPELINE_KINDS, Collective, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def compute_stream(events: Events) -> int | None:
    """The stream (an index of ``events.threads``) on which most of the computing was done."""
    computes = (events.category == Category.KERNEL) & ~events.is_communication()
    if not computes.any():
        return None
    length = (events.end_ns - events.start_ns)[computes].astype(np.float64)
    return int(np.argmax(np.bincount(events.thread[computes], weights=length)))


def device_ops(events: Events, labels: Sequence[Placed]) -> list[Op]:
    """The ops that the device's annotations are around, each with the begin of its annotation on the host."""
    stream = compute_stream(events)
    rows = [row for row in placed_labels(events, Category.DEVICE_LABEL) if row.thread == stream]
    launches: dict[Any, list[int]] = defaultdict(list)
    for row in labels:
        launches[row.label].append(row.start_ns)
    counts: dict[Any, int] = defaultdict(int)
    ops = []
    for at, row in enumerate(rows):
        if row.label.kind not in (*PIPELINE_KINDS, Kind.OPTIMIZER):
            continue
        nth = counts[row.label]
        counts[row.label] += 1
        start, end = _halved(rows, at)
        begun = launches[row.label]
        launch = begun[nth] if nth < len(begun) and begun[nth] <= start else None
        ops.append(Op(row.label, start, end, launch_ns=launch))
    return ops


def _halved(rows: Sequence[Placed], at: int) -> tuple[int, int]:
    """Begin and end of an op; of two under one annotation the halves, since the device does not say where one ends."""
    row = rows[at]
    middle = (row.start_ns + row.end_ns) // 2
    if at + 1 < len(rows) and rows[at + 1][1:] == row[1:]:
        return row.start_ns, middle
    if at and rows[at - 1][1:] == row[1:]:
        return middle, row.end_ns
    return row.start_ns, row.end_ns


def launched_ops(launched: Events, events: Events, labels: Sequence[Placed], messages: Sequence[Message]) -> list[Op]:
    """The ops as the kernels that were launched inside of the host's annotations, or between its messages.

    ``launched`` has the kernels with the calls that launched them.
    """
    thread_of_messages = main_thread(messages)
    rows = _launches(launched)
    rows = rows[np.argsort(rows["launch"], kind="stable")]
    ops = []
    wanted = [row for row in labels if row.label.kind in (*PIPELINE_KINDS, Kind.OPTIMIZER)]
    for row in wanted:
        first, end = np.searchsorted(rows["launch"], (row.start_ns, row.end_ns))
        if end > first:
            part = rows[first:end]
            ops.append(Op(row.label, int(part["start"].min()), int(part["end"].max()), int(part["launch"][0])))
    labelled = any(row.label.kind in PIPELINE_KINDS for row in wanted)
    if labelled or thread_of_messages is None or not len(rows):
        return ops
    main = events.threads[thread_of_messages]
    own = launched.threads.index(main) if main in launched.threads else -1
    activity = np.stack([rows["launch"], rows["launch"]], axis=1)
    thread = Thread(activity, rows["thread"] != own, rows["launch"])
    optimizers = [row for row in labels if row.label.kind is Kind.OPTIMIZER]
    for op, first, last in inferred_ops(thread, messages, optimizers):
        part = rows[first : last + 1]
        times = int(part["start"].min()), int(part["end"].max()), int(part["launch"][0])
        ops.append(Op(op.label, *times, inferred=True))
    return ops


def _launches(launched: Events) -> np.ndarray:
    """Launch, thread, begin and end of each kernel of the compute stream whose launch is in the trace."""
    stream = compute_stream(launched)
    communicates = launched.is_communication()
    kernels, launches = {}, {}
    for i, arguments in launched.arguments.items():
        number = whole(arguments.correlation, most=1 << 62)
        if number == NONE:
            continue
        if launched.category[i] == Category.LAUNCH:
            launches[number] = i
        elif launched.thread[i] == stream and not communicates[i]:
            kernels[number] = i
    pairs = [(launches[number], kernel) for number, kernel in kernels.items() if number in launches]
    rows = np.zeros(len(pairs), [("launch", "<i8"), ("thread", "<i8"), ("start", "<i8"), ("end", "<i8")])
    if pairs:
        launch, kernel = np.array(pairs).T
        rows["launch"], rows["thread"] = launched.start_ns[launch], launched.thread[launch]
        rows["start"], rows["end"] = launched.start_ns[kernel], launched.end_ns[kernel]
    return rows


def time_messages(events: Events, messages: Sequence[Message], ops: Sequence[Op]) -> tuple[list[Message], int]:
    """The messages with the device's times, and how many kernels of sends and receives belong to none.

    The kernel of a message names it by its external id; a batch has one kernel, which names one of them.
    """
    kernels = _communication_kernels(events)
    peer_to_peer = [message for message in messages if message.kind is not Kind.COLLECTIVE]
    own = _message_kernels(events, kernels, peer_to_peer)
    found, unknown = _kernels_of(events, own, peer_to_peer)
    done = np.maximum.accumulate(np.array([op.end_ns for op in ops], np.int64)) if ops else np.empty(0, np.int64)
    starts = np.array([op.start_ns for op in ops], np.int64)
    timed = []
    for message, kernel in zip(peer_to_peer, found, strict=True):
        if kernel is None:
            continue
        start, end = int(events.start_ns[kernel]), int(events.end_ns[kernel])
        message.called_ns = message.post_ns  # the host's post: it launched the kernel
        message.post_ns = start
        if message.kind is Kind.RECV:
            before = int(np.searchsorted(starts, end, "left")) - 1
            reached = int(done[before]) if before >= 0 else start
            message.wait_ns = max(start, reached)
            message.done_ns = max(end, message.wait_ns)
        timed.append(message)
    mine = set(own)
    others = [kernel for kernel in kernels.tolist() if kernel not in mine]
    posts = {message.external: message.post_ns for message in messages if message.kind is Kind.COLLECTIVE}
    return [*timed, *_collectives(events, others, posts)], unknown


def _communication_kernels(events: Events) -> np.ndarray:
    kernels = np.flatnonzero(events.is_communication())
    return kernels[np.argsort(events.start_ns[kernels], kind="stable")]


def _message_kernels(events: Events, kernels: np.ndarray, messages: Sequence[Message]) -> list[int]:
    """The kernels of sends and receives, which RCCL does not name so."""
    known = {message.external for message in messages} - {NONE}
    return [kernel for kernel in kernels.tolist() if _external(events, kernel) in known or _is_message(events, kernel)]


def _external(events: Events, kernel: int) -> int:
    arguments = events.arguments.get(kernel)
    return whole(arguments.external, most=1 << 62) if arguments else NONE


def _is_message(events: Events, kernel: int) -> bool:
    """Whether a kernel is of sends and receives of a pipeline: all-to-all uses the same kernels."""
    arguments = events.arguments.get(kernel)
    name = arguments.collective if arguments and isinstance(arguments.collective, str) else ""
    if name:
        return collective(name) is Collective.OTHER or name in ("send", "recv")
    return "sendrecv" in events.name_of(kernel).lower()


def _kernels_of(events: Events, own: Sequence[int], messages: Sequence[Message]) -> tuple[list[int | None], int]:
    """The kernel of each message (by post); a batch ends with the message that its kernel names."""
    by_id = {message.external: n for n, message in enumerate(messages) if message.external != NONE}
    named: dict[int, int] = {}
    for kernel in own:
        number = _external(events, kernel)
        if number in by_id:
            named[by_id[number]] = kernel
    found: list[int | None] = [None] * len(messages)
    if named:
        kernel_after: int | None = None
        for n in range(len(messages) - 1, -1, -1):
            kernel_after = named.get(n, kernel_after)
            found[n] = kernel_after
        return found, len(own) - len(named)
    if len(own) == len(messages):
        return [*own], 0
    return found, len(own)


def _collectives(events: Events, kernels: Sequence[int], posts: Mapping[int, int]) -> list[Message]:
    """The collectives of the device, each as long as its kernel; ``posts``: when the host called them, by id."""
    found = []
    for kernel in kernels:
        arguments = events.arguments.get(kernel)
        name = arguments.collective if arguments and isinstance(arguments.collective, str) else ""
        start, end = int(events.start_ns[kernel]), int(events.end_ns[kernel])
        called = posts.get(_external(events, kernel), start)
        message = Message(Kind.COLLECTIVE, int(events.thread[kernel]), start, called, end, start)
        message.op = int(collective(name or events.name_of(kernel)))
        message.group = group_of(arguments) if arguments else None
        found.append(message)
    return found
