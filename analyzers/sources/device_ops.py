"""From what a device did to the spans of a pipeline: for recorders that see kernels, and names around their launches.

An op (forward, backward, ...) lasts from the first to the last kernel launched inside its range. A message is the
kernel that carries it: posted where the kernel begins, waited for where compute stands still until the kernel's end.
Where a recording does not say what its SendRecv kernels carry, messages are inferred from the gaps before ops.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.model import NONE, PIPELINE_KINDS, Flag, Kind, Payload
from ppdiag.trace import SPAN_DTYPE, sorted_spans

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ppdiag.analyzers.sources.kineto.labels import Label

NEVER_LAUNCHED = -1
"""``launch_ns`` of a kernel whose launch is not in the recording."""
_PAYLOADS = {Kind.FORWARD: Payload.ACTIVATION, Kind.BACKWARD: Payload.GRADIENT}


class Op(NamedTuple):
    """An op on the device. Times in ns."""

    kind: Kind
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int
    launch_ns: int
    step: int = NONE
    """Where the recorder counts steps; else they are counted by the optimizer's."""


class Message(NamedTuple):
    """A kernel of NCCL as one message or collective of a rank."""

    kind: Kind
    op: int
    group: int
    peer: int
    seq: int
    size_bytes: int
    start_ns: int
    end_ns: int
    launch_ns: int


class Range(NamedTuple):
    """A named range on the host, or on the device where a recorder has projected it already."""

    label: Label
    start_ns: int
    end_ns: int
    thread: int | None = None
    """Where a forward and a backward overlap: the forward's thread. Another one (autograd's) launches the backward."""


@dataclass(slots=True)
class Kernels:
    """Kernels of one rank, columns of one length, sorted by start."""

    start_ns: np.ndarray
    end_ns: np.ndarray
    launch_ns: np.ndarray
    communicates: np.ndarray
    """Mask: kernels of NCCL or RCCL."""
    thread: np.ndarray | None = None
    """Which thread launched each."""

    def busy_s(self) -> tuple[float, float, float]:
        """Seconds in which compute ran, in which only communication ran, and from the first kernel to the last."""
        if not len(self.start_ns):
            return 0.0, 0.0, 0.0
        compute = union(self.start_ns[~self.communicates], self.end_ns[~self.communicates])
        everything = union(self.start_ns, self.end_ns)
        busy, total = (float((part[:, 1] - part[:, 0]).sum()) / 1e9 for part in (compute, everything))
        return busy, total - busy, float(self.end_ns.max() - self.start_ns.min()) / 1e9


@dataclass(slots=True)
class RankOps:
    """What a recording says of one rank."""

    rank: int
    kernels: Kernels
    ops: list[Op]
    messages: list[Message] = field(default_factory=list)


def union(start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """The union of intervals sorted by start, as intervals that do not touch (n x 2).

    >>> union(np.array([0, 1, 9]), np.array([4, 2, 10])).tolist()
    [[0, 4], [9, 10]]
    """
    if not len(start_ns):
        return np.empty((0, 2), np.int64)
    reach = np.maximum.accumulate(end_ns)
    first = np.flatnonzero(np.append(True, start_ns[1:] > reach[:-1]))
    last = np.append(first[1:], len(start_ns)) - 1
    return np.stack([start_ns[first], reach[last]], axis=1)


def project(ranges: Sequence[Range], kernels: Kernels) -> tuple[list[Op], int]:
    """The ops on the device, and how many ranges launched no kernel of compute.

    A range takes the kernels that its process launched while it was open, on whatever thread: the autograd engine
    launches those of a backward on threads of its own. Of nested ranges the outer is left out.
    """
    compute = np.flatnonzero(~kernels.communicates & (kernels.launch_ns != NEVER_LAUNCHED))
    order = compute[np.argsort(kernels.launch_ns[compute], kind="stable")]
    launch_ns = kernels.launch_ns[order]
    ops, empty = [], 0
    for part in _innermost(ranges):
        own = order[slice(*np.searchsorted(launch_ns, [part.start_ns, part.end_ns]))]
        if part.thread is not None and kernels.thread is not None:
            own = own[(kernels.thread[own] == part.thread) == (part.label.kind is Kind.FORWARD)]
        if not len(own):
            empty += 1
            continue
        start, end = int(kernels.start_ns[own].min()), int(kernels.end_ns[own].max())
        label = part.label
        ops.append(Op(label.kind, label.stage, label.microbatch, start, end, int(kernels.launch_ns[own].min())))
    return sorted(ops, key=lambda op: (op.start_ns, op.end_ns)), empty


def _innermost(ranges: Sequence[Range]) -> Iterator[Range]:
    """Ranges with no other of the same kind inside, in order of their start."""
    ordered = sorted(ranges, key=lambda part: (part.start_ns, -part.end_ns))
    for i, part in enumerate(ordered):
        following = ordered[i + 1] if i + 1 < len(ordered) else None
        if following is None or following.start_ns >= part.end_ns or following.label.kind is not part.label.kind:
            yield part


def spans_of(ranks: Sequence[RankOps]) -> np.ndarray:
    """The spans of all ranks, as :class:`~ppdiag.trace.Trace` keeps them."""
    rows: list[dict[str, int]] = []
    for rank in ranks:
        rows += _op_rows(rank)
        rows += _message_rows(rank)
    if not any(rank.messages for rank in ranks):
        rows += _inferred_messages(ranks)
    return sorted_spans(_structured(rows))


def _structured(rows: Sequence[Mapping[str, int]]) -> np.ndarray:
    spans = np.zeros(len(rows), SPAN_DTYPE)
    for name in SPAN_DTYPE.names or ():
        default = NONE if name in ("stage", "chunk", "microbatch", "peer") else 0
        spans[name] = [row.get(name, default) for row in rows]
    return spans


def _op_rows(rank: RankOps) -> Iterator[dict[str, int]]:
    stages = sorted({op.stage for op in rank.ops if op.stage != NONE})
    for op, step in zip(rank.ops, _steps(rank.ops), strict=True):
        inferred = Flag.INFERRED if op.stage == NONE and op.kind in PIPELINE_KINDS else Flag(0)
        yield {
            "rank": rank.rank,
            "kind": op.kind,
            "stage": op.stage,
            "chunk": stages.index(op.stage) if op.stage in stages else NONE,
            "microbatch": op.microbatch,
            "step": step,
            "start_ns": op.start_ns,
            "end_ns": op.end_ns,
            "post_ns": op.start_ns,
            "launch_ns": min(op.launch_ns, op.start_ns),
            "flags": Flag.DEVICE | inferred,
        }


def _steps(ops: Sequence[Op]) -> Iterator[int]:
    """The step of each op: as recorded, else up at the first op of the pipeline after an optimizer's."""
    step, stepped = 0, False
    for op in ops:
        if op.step != NONE:
            yield op.step
            continue
        if op.kind is Kind.OPTIMIZER:
            stepped = True
        elif stepped:
            step, stepped = step + 1, False
        yield step


def _message_rows(rank: RankOps) -> Iterator[dict[str, int]]:
    """Each message, with its wait.

    For a send or receive an op counts as compute from end to end; a collective may also be waited for inside an op.
    """
    kernels, ops = rank.kernels, rank.ops
    compute = ~kernels.communicates
    of_kernels = union(kernels.start_ns[compute], kernels.end_ns[compute])
    begins = np.array([op.start_ns for op in ops], np.int64)
    of_ops = union(begins, np.array([op.end_ns for op in ops], np.int64))
    steps = list(_steps(ops))
    several_stages = len({op.stage for op in ops if op.stage != NONE}) > 1
    for message in rank.messages:
        received = message.kind is Kind.RECV
        if received:
            near = int(np.searchsorted(begins, message.end_ns, "left"))
        else:
            near = int(np.searchsorted(begins, message.start_ns, "right")) - 1
        op = ops[near] if 0 <= near < len(ops) else None
        row = {**_wait(message, of_kernels if message.kind is Kind.COLLECTIVE else of_ops, op), "op": message.op}
        if op is not None and message.kind is not Kind.COLLECTIVE:
            row["op"] = _PAYLOADS.get(op.kind, Payload.UNKNOWN)
            row["stage"] = op.stage if several_stages else NONE
        yield {
            **row,
            "rank": rank.rank,
            "kind": message.kind,
            "group": message.group,
            "peer": message.peer,
            "seq": message.seq,
            "size_bytes": message.size_bytes,
            "step": steps[min(max(near, 0), len(ops) - 1)] if ops else 0,
            "post_ns": message.start_ns,
        }


def _wait(message: Message, busy: np.ndarray, op: Op | None) -> dict[str, int]:
    """When compute stood still for a message: before the kernel's end, and it began again after it.

    Where it did not stand still, a receive is waited for in no time by the ``op`` that comes next.
    """
    last = int(np.searchsorted(busy[:, 0], message.end_ns, "left")) - 1
    reached = int(busy[last, 1]) if last >= 0 else message.start_ns
    if reached < message.end_ns:
        start, end = max(message.start_ns, reached), message.end_ns
        return {"start_ns": start, "end_ns": end, "launch_ns": min(message.launch_ns, start), "flags": Flag.DEVICE}
    if message.kind is Kind.RECV and op is not None:
        return {"start_ns": op.start_ns, "end_ns": op.start_ns, "launch_ns": op.launch_ns, "flags": Flag.DEVICE}
    at = message.start_ns
    return {"start_ns": at, "end_ns": at, "launch_ns": at, "flags": Flag.DEVICE | Flag.NEVER_WAITED}


def _inferred_messages(ranks: Sequence[RankOps]) -> Iterator[dict[str, int]]:
    """What each op must have received and sent, where the stages of all ranks are named, and no message is.

    The wait for a message is the gap before its op, as far as a kernel of communication ended in it. Its output is
    sent when an op has ended.
    """
    holders: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        for stage in sorted({op.stage for op in rank.ops if op.stage != NONE}):
            holders[stage].append(rank.rank)
    for rank in ranks:
        ends = np.sort(rank.kernels.end_ns[rank.kernels.communicates])
        reached = rank.ops[0].start_ns if rank.ops else 0
        for op, step in zip(rank.ops, _steps(rank.ops), strict=True):
            for row, towards in _ends_of(op):
                peer = _twin(holders, rank.rank, op.stage, op.stage + towards)
                if peer is not None and peer != rank.rank:
                    times = _gap(op, reached, ends) if row["kind"] == Kind.RECV else (op.end_ns, op.end_ns)
                    yield {
                        **row,
                        **_inferred(times, op),
                        "rank": rank.rank,
                        "peer": peer,
                        "step": step,
                        "seq": _seq(op, step),
                    }
            reached = max(reached, op.end_ns)


def _ends_of(op: Op) -> Iterator[tuple[dict[str, int], int]]:
    """The receive before an op and the send after it, each with the way to the other end's stage (-1 or 1)."""
    if op.kind not in _PAYLOADS or op.stage == NONE:
        return
    way = 1 if op.kind is Kind.FORWARD else -1
    row = {"stage": op.stage, "microbatch": op.microbatch, "op": _PAYLOADS[op.kind]}
    yield {**row, "kind": Kind.RECV, "tag": 2 * (op.stage - way) + (way < 0)}, -way
    yield {**row, "kind": Kind.SEND, "tag": 2 * op.stage + (way < 0)}, way


def _gap(op: Op, reached: int, ends: np.ndarray) -> tuple[int, int]:
    """The part of the gap before an op that a kernel of communication ended; else no time at all."""
    at = int(np.searchsorted(ends, op.start_ns, "right")) - 1
    ended = int(ends[at]) if at >= 0 else reached
    return (reached, ended) if ended > reached else (op.start_ns, op.start_ns)


def _inferred(times: tuple[int, int], op: Op) -> dict[str, int]:
    start, end = times
    sent = Flag.NEVER_WAITED if start >= op.end_ns else Flag(0)
    flags = Flag.INFERRED | Flag.DEVICE | sent
    return {"post_ns": start, "start_ns": start, "end_ns": end, "launch_ns": min(op.launch_ns, start), "flags": flags}


def _seq(op: Op, step: int) -> int:
    return (step << 20) + max(op.microbatch, 0)


def _twin(holders: Mapping[int, Sequence[int]], rank: int, stage: int, other: int) -> int | None:
    """The rank that holds another stage in the same replica; ``NONE`` where it was not recorded, None past the ends."""
    if not min(holders) <= other <= max(holders):
        return None
    place, there = holders[stage].index(rank), holders.get(other, [])
    return there[place] if place < len(there) else NONE
