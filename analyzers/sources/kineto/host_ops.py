"""Finds the ops of a rank in the threads of its host: by their labels, else between the messages.

Without labels an op is a stretch of work of the thread that posts the messages, from one message to the next: a
backward where the autograd engine did it, else a forward. What follows a backward and is no forward (a detach before
the gradient's send) belongs to it, and what is neither (clipping, scaling of gradients) is no op of the pipeline.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.analyzers.sources.kineto.host import Message, Op, Placed, Thread
from ppdiag.analyzers.sources.kineto.labels import Label
from ppdiag.model import PIPELINE_KINDS, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence


def labelled_ops(labels: Sequence[Placed], messages: Sequence[Message], threads: dict[int, Thread]) -> list[Op]:
    """The ops that annotations are around, without the waits for their inputs and the posts of their outputs."""
    by_thread: dict[int, list[Message]] = defaultdict(list)
    for message in messages:
        by_thread[message.thread].append(message)
    dones = {
        thread: np.array(sorted(m.done_ns for m in own if m.done_ns is not None and m.kind is Kind.RECV), np.int64)
        for thread, own in by_thread.items()
    }
    sends = {
        thread: np.array(sorted(m.post_ns for m in own if m.kind is Kind.SEND), np.int64)
        for thread, own in by_thread.items()
    }
    empty = np.empty(0, np.int64)
    ops: list[Op] = []
    for piece in _pieces(labels, threads):
        done, send = dones.get(piece.thread, empty), sends.get(piece.thread, empty)
        begin = _last_before(done, piece.start_ns, piece.end_ns)
        end = _first_after(send, begin, piece.end_ns)
        end = _last_work(threads.get(piece.thread), begin, end)
        ops.append(Op(piece.label, begin, max(end, begin)))
    return ops


def _last_work(thread: Thread | None, begin: int, end: int) -> int:
    """When the last work between these times ended; ``end`` where there is none: labels cost time of their own."""
    if thread is None or not len(thread.activity):
        return end
    at = int(np.searchsorted(thread.activity[:, 0], end, "left")) - 1
    last = int(thread.activity[at, 1]) if at >= 0 else begin
    return last if begin < last <= end else end


def _pieces(labels: Sequence[Placed], threads: dict[int, Thread]) -> list[Placed]:
    """The labels of ops, those around two of them cut where the autograd engine begins the second."""
    pieces: list[Placed] = []
    rows = [row for row in labels if row.label.kind in PIPELINE_KINDS]
    at = 0
    while at < len(rows):
        row = rows[at]
        following = rows[at + 1] if at + 1 < len(rows) else None
        both = following is not None and following[1:] == row[1:]
        if not both or following is None:
            pieces.append(row)
            at += 1
            continue
        first_end, second_start = _cut(row, threads.get(row.thread))
        pieces += [row._replace(end_ns=first_end), following._replace(start_ns=second_start)]
        at += 2
    return pieces


def _cut(row: Placed, thread: Thread | None) -> tuple[int, int]:
    """Where the first of two ops under one label ends, and the second begins."""
    if thread is not None:
        inside = (thread.activity[:, 0] >= row.start_ns) & (thread.activity[:, 1] <= row.end_ns)
        own, autograd = thread.activity[inside], thread.autograd[inside]
        if autograd.any() and not autograd.all():
            first = int(np.argmax(autograd))
            if first > 0:
                return int(own[first - 1, 1]), int(own[first - 1, 1])
    middle = (row.start_ns + row.end_ns) // 2
    return middle, middle


def _last_before(times: np.ndarray, start: int, end: int) -> int:
    """The last of the sorted times in ``start..end``; ``start`` where there is none."""
    at = int(np.searchsorted(times, end, "right")) - 1
    return int(times[at]) if at >= 0 and times[at] >= start else start


def _first_after(times: np.ndarray, start: int, end: int) -> int:
    """The first of the sorted times in ``start..end``; ``end`` where there is none."""
    at = int(np.searchsorted(times, start, "left"))
    return int(times[at]) if at < len(times) and times[at] <= end else end


class _Stretch(NamedTuple):
    """Work of one kind between two messages; indices of activities."""

    autograd: bool
    first: int
    last: int
    continues: bool
    """Whether nothing lies between it and the stretch before."""
    received: bool
    """Whether the last message before it is a receive."""
    received_ns: int | None
    """When the wait for it returned, where it is known."""
    sends: bool
    """Whether the post of a send follows."""


def inferred_ops(
    thread: Thread, messages: Sequence[Message], optimizers: Sequence[Placed]
) -> list[tuple[Op, int, int]]:
    """The ops between the messages of a thread, each with its first and last activity."""
    stretches = _stretches(thread, messages, optimizers)
    kept: list[_Stretch] = []
    for i, stretch in enumerate(stretches):
        forward = not stretch.autograd and _is_forward(stretches, i, thread)
        if stretch.autograd and stretch.continues and kept and kept[-1].autograd:
            kept[-1] = kept[-1]._replace(last=stretch.last, sends=stretch.sends)
        elif stretch.autograd or forward:
            kept.append(stretch)
        elif kept and kept[-1].autograd and stretch.sends and stretch.continues:
            kept[-1] = kept[-1]._replace(last=stretch.last, sends=True)
    return [(_op(stretch, thread), stretch.first, stretch.last) for stretch in kept]


def _op(stretch: _Stretch, thread: Thread) -> Op:
    start, end = int(thread.activity[stretch.first, 0]), int(thread.activity[stretch.last, 1])
    if stretch.received_ns is not None:
        start = min(start, stretch.received_ns)
    elif not stretch.autograd:  # data may have been made or split before
        start = _first_forward(thread, start, end)
    label = Label(Kind.BACKWARD if stretch.autograd else Kind.FORWARD)
    return Op(label, start, end, inferred=True)


def _first_forward(thread: Thread, start: int, end: int) -> int:
    """When the first op with a backward began between these times; ``start`` where none is known."""
    at = int(np.searchsorted(thread.forwards, start, "left"))
    if at == len(thread.forwards) or thread.forwards[at] > end:
        return start
    outer = int(np.searchsorted(thread.activity[:, 0], thread.forwards[at], "right")) - 1
    return max(start, int(thread.activity[outer, 0])) if outer >= 0 else start


def _is_forward(stretches: Sequence[_Stretch], i: int, thread: Thread) -> bool:
    """Whether work outside of the autograd engine is a forward: its backward is known, or messages say so."""
    stretch = stretches[i]
    if len(thread.forwards):
        start, end = thread.activity[stretch.first, 0], thread.activity[stretch.last, 1]
        at = int(np.searchsorted(thread.forwards, start, "left"))
        return at < len(thread.forwards) and bool(thread.forwards[at] <= end)
    following = stretches[i + 1] if i + 1 < len(stretches) else None
    leads_on = following is not None and following.autograd and following.continues
    return stretch.received or stretch.sends or leads_on


class _Moment(NamedTuple):
    """Something that ends a stretch of work."""

    when_ns: int
    what: str
    """``optimizer``, ``post`` or ``done``."""
    kind: Kind


def _stretches(thread: Thread, messages: Sequence[Message], optimizers: Sequence[Placed]) -> list[_Stretch]:
    """Work cut at messages, optimizer steps, and where the autograd engine begins or ends."""
    moments = _moments(messages, optimizers)
    free = np.ones(len(thread.activity), bool)
    for row in optimizers:
        free &= (thread.activity[:, 0] < row.start_ns) | (thread.activity[:, 1] > row.end_ns)
    chosen = np.flatnonzero(free)
    times = np.array([moment.when_ns for moment in moments], np.int64)
    passed = np.searchsorted(times, thread.activity[chosen, 0], "right")  # how many moments lie before each activity
    autograd = thread.autograd[chosen].astype(np.int8)
    firsts = np.flatnonzero((np.diff(passed, prepend=-1) != 0) | (np.diff(autograd, prepend=-1) != 0))
    found = []
    for n, first in enumerate(firsts.tolist()):
        following = int(firsts[n + 1]) if n + 1 < len(firsts) else len(chosen)
        at = int(passed[first])
        continues = n > 0 and int(passed[firsts[n - 1]]) == at
        leads_on = following < len(chosen) and int(passed[following]) == at
        before = moments[at - 1] if at and not continues else None
        after = moments[at] if at < len(moments) and not leads_on else None
        found.append(
            _Stretch(
                autograd=bool(autograd[first]),
                first=int(chosen[first]),
                last=int(chosen[following - 1]),
                continues=continues,
                received=before is not None and before.kind is Kind.RECV,
                received_ns=before.when_ns if before and before[1:] == ("done", Kind.RECV) else None,
                sends=after is not None and after[1:] == ("post", Kind.SEND),
            )
        )
    return found


def _moments(messages: Sequence[Message], optimizers: Sequence[Placed]) -> list[_Moment]:
    moments = [_Moment(row.start_ns, "optimizer", Kind.OPTIMIZER) for row in optimizers]
    for message in messages:
        moments.append(_Moment(message.post_ns, "post", message.kind))
        if message.done_ns is not None and message.wait_ns < message.done_ns:
            moments.append(_Moment(message.done_ns, "done", message.kind))
    return sorted(moments)


def main_thread(messages: Sequence[Message]) -> int | None:
    """The thread that posts the most sends and receives."""
    counts = Counter(message.thread for message in messages if message.kind in (Kind.SEND, Kind.RECV))
    return counts.most_common(1)[0][0] if counts else None
