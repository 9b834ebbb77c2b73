"""One rank of a file as spans: the ops of its pipeline, its messages, its optimizer steps, numbered by step."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.analyzers.sources.kineto.device import device_ops, launched_ops, time_messages
from ppdiag.analyzers.sources.kineto.events import Category, Events, read_events
from ppdiag.analyzers.sources.kineto.host import (
    Message,
    Op,
    Placed,
    find_waits,
    messages_of,
    name_messages,
    payload_of,
    placed_labels,
    step_marks,
    threads_of,
    whole,
)
from ppdiag.analyzers.sources.kineto.host_ops import inferred_ops, labelled_ops, main_thread
from ppdiag.analyzers.sources.kineto.merged import Part, events_of, parts_of
from ppdiag.analyzers.sources.kineto.sums import Sums, sums_of
from ppdiag.errors import BadRecord
from ppdiag.model import NONE, PIPELINE_KINDS, Flag, HostCause, Kind
from ppdiag.trace import SPAN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_INFERRED, _DEVICE, _NEVER_WAITED = int(Flag.INFERRED), int(Flag.DEVICE), int(Flag.NEVER_WAITED)
SHORTEST_CALL_NS = 100_000
"""A synchronising call of less is none to speak of; the recorder of ppdiag draws the same line."""
_HOST_IN_NAME = re.compile(r"(.{1,200})_(\d{1,10})\.\d{10,20}\.pt\.trace\.json(?:\.gz)?")
"""How torch.profiler.tensorboard_trace_handler names a file: host, process, time."""
_RANK_IN_NAME = re.compile(
    r"(?:^|[^a-z])rank[-_.]?(\d{1,6})(?!\d)|(?:^|[-_.])(\d{1,6})[-_]of[-_]\d{1,6}(?!\d)", re.IGNORECASE
)
"""``rank3``, ``rank-3``, ``trace-3-of-8``."""


@dataclass(slots=True)
class RankRecord:
    """What one file says of one rank.

    Attributes:
        name: of the file, and of the rank in it where there are several.
        rank: of the file itself, else of its name; None where neither says.
        spans: of ``SPAN_DTYPE``; ``group`` is an index of ``groups``, ``seq`` is not set, and ``peer`` is a rank of the
            job, or ``NONE``.
    """

    name: str
    rank: int | None
    spans: np.ndarray
    groups: list[tuple[str, tuple[int, ...]]]
    sums: Sums
    facts: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def read_file(path: Path) -> list[RankRecord]:
    """Reads one file: one rank, or several that a script merged into it.

    Raises:
        BadRecord: it is no trace, or ranks in it cannot be told apart.
    """
    events = read_events(path)
    if not len(events.of(Category.KERNEL, Category.COPY)):
        events = read_events(path, "cpu")
    launches = cache(lambda: read_events(path, "launches"))
    return [_read_part(path, part, events, launches) for part in parts_of(path, events, launches)]


def read_rank(path: Path) -> RankRecord:
    """Reads a file of one rank.

    Raises:
        BadRecord: it is no trace, or there are several ranks in it.
    """
    records = read_file(path)
    if len(records) != 1:
        raise BadRecord(f"{path}: expected one rank, and found {len(records)}")
    return records[0]


def _read_part(path: Path, part: Part, events: Events, launches: Callable[[], Events]) -> RankRecord:
    events = events_of(part, events)
    labels = placed_labels(events, Category.LABEL)
    messages = messages_of(events)
    name_messages(messages, labels)
    warnings = _damage(events)
    if len(events.of(Category.KERNEL, Category.COPY)):
        launched = partial(_launched, part, launches)
        ops, messages = _on_device(events, labels, messages, launched, warnings)
    else:
        ops = _on_host(events, labels, messages)
    rank = part.rank if part.name else _rank_of(path, events.facts)
    name = f"{path.name} ({part.name})" if part.name else path.name
    record = RankRecord(name, rank, np.zeros(0, SPAN_DTYPE), [], sums_of(events), _facts(path, part, events), warnings)
    if any(op.label.kind in PIPELINE_KINDS for op in ops):
        _number_and_place(record, ops, messages, _marks(events, ops), _synchronising_calls(events))
    return record


def _launched(part: Part, launches: Callable[[], Events]) -> Events:
    return events_of(part, launches())


def _on_host(events: Events, labels: Sequence[Placed], messages: Sequence[Message]) -> list[Op]:
    threads = threads_of(events, labels)
    find_waits(messages, threads)
    outer = _outer_optimizers(labels)
    ops = labelled_ops(labels, messages, threads)
    posting = main_thread(messages)
    if not ops and posting in threads:
        own = [message for message in messages if message.thread == posting]
        ops = [op for op, _, _ in inferred_ops(threads[posting], own, outer)]
    return [*ops, *(Op(row.label, row.start_ns, row.end_ns) for row in outer)]


def _outer_optimizers(labels: Sequence[Placed]) -> list[Placed]:
    """Optimizer steps that lie in no other: some wrap others."""
    rows: list[Placed] = []
    for row in labels:
        if row.label.kind is Kind.OPTIMIZER and not (rows and row.end_ns <= rows[-1].end_ns):
            rows.append(row)
    return rows


def _on_device(
    events: Events,
    labels: Sequence[Placed],
    messages: list[Message],
    launches: Callable[[], Events],
    warnings: list[str],
) -> tuple[list[Op], list[Message]]:
    ops = device_ops(events, labels)
    sent = [message for message in messages if message.kind is not Kind.COLLECTIVE]
    on_host = any(row.label.kind in PIPELINE_KINDS for row in labels)
    if not any(op.label.kind in PIPELINE_KINDS for op in ops) and (on_host or sent):
        ops = launched_ops(launches(), events, labels, sent) or ops
    if any(one[1:] == other[1:] for one, other in pairwise(labels)):
        warnings.append(
            "forwards and backwards that overlap have one label for both: on the device each is given half of its time"
        )
    ops = sorted(ops, key=lambda op: op.start_ns)
    compute = [op for op in ops if op.label.kind in PIPELINE_KINDS]
    timed, unknown = time_messages(events, messages, compute)
    if unknown:
        warnings.append(
            f"{unknown} kernels of sends and receives were left out: they do not say whose they are (all-to-all uses "
            "the same kernels)"
        )
    return ops, timed


def _damage(events: Events) -> list[str]:
    lost = [f"{count} events were left out: {why}" for why, count in sorted(events.left_out.items())]
    return [*events.damage, *lost]


def _rank_of(path: Path, facts: dict[str, Any]) -> int | None:
    told = facts.get("distributedInfo")
    rank = whole(told.get("rank")) if isinstance(told, dict) else NONE
    if rank == NONE and (match := _RANK_IN_NAME.search(path.name)):
        rank = int(match[1] or match[2])
    return None if rank == NONE else rank


def _facts(path: Path, part: Part, events: Events) -> dict[str, Any]:
    """What the header says of the job, in bounded size."""
    told = events.facts.get("distributedInfo")
    told = told if isinstance(told, dict) else {}
    groups, devices = told.get("pg_config"), events.facts.get("deviceProperties")
    facts = {
        "world_size": whole(told.get("world_size")),
        "backend": str(told.get("backend", ""))[:80],
        "host": _host(path, events),
        "devices": len(devices) if isinstance(devices, list) and not part.name else NONE,
        "pg_config": [group for group in groups if isinstance(group, dict)][:4096] if isinstance(groups, list) else [],
    }
    return {name: value for name, value in facts.items() if value not in (NONE, "", [])}


def _host(path: Path, events: Events) -> str:
    """The host's name: of the header, else of the file's name where that has the process's id too."""
    for name in ("host_name", "hostname"):
        if isinstance(told := events.facts.get(name), str) and told:
            return told[:200]
    found = _HOST_IN_NAME.fullmatch(path.name)
    labelled = {events.threads[int(thread)][0] for thread in np.unique(events.thread[events.of(Category.LABEL)])}
    return found[1] if found and {str(pid) for pid in labelled} == {found[2]} else ""


@dataclass(slots=True)
class _Marks:
    """Where steps begin on a rank: their numbers by ``numbers``, else counted."""

    begins: list[int]
    numbers: list[int]
    on_host: bool


def _marks(events: Events, ops: Sequence[Op]) -> _Marks:
    on_host = all(op.launch_ns is not None for op in ops)
    on_device = bool(len(events.of(Category.KERNEL)))
    marked = step_marks(events, Category.DEVICE_LABEL) if on_device and not on_host else []
    axis = on_host or not marked
    marked = marked or step_marks(events)
    if marked:
        return _Marks([begin for begin, _ in marked], [number for _, number in marked], on_host=axis)
    when = sorted((_when(op, on_host=on_host), op.label.kind) for op in ops)
    begins, after_optimizer, in_flight = [], True, 0
    counted = any(kind is Kind.OPTIMIZER for _, kind in when)
    for moment, kind in when:
        if kind is Kind.FORWARD and (after_optimizer or (not counted and in_flight <= 0)):
            begins.append(moment)
        after_optimizer = kind is Kind.OPTIMIZER
        in_flight += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(kind, 0)
    return _Marks(begins, list(range(len(begins))), on_host=on_host)


def _when(op: Op, *, on_host: bool) -> int:
    return op.launch_ns if on_host and op.launch_ns is not None else op.start_ns


def _synchronising_calls(events: Events) -> np.ndarray:
    """Begin and end of the calls in which the host waited for its device, but for short ones (n x 2)."""
    calls = events.of(Category.SYNCHRONISING)
    times = np.stack([events.start_ns[calls], events.end_ns[calls]], axis=1)
    return times[times[:, 1] - times[:, 0] >= SHORTEST_CALL_NS]


def _number_and_place(
    record: RankRecord, ops: Sequence[Op], messages: Sequence[Message], marks: _Marks, calls: np.ndarray
) -> None:
    """Fills the record's spans."""
    steps = _Steps(marks, ops)
    chunks = {stage: chunk for chunk, stage in enumerate(sorted({op.label.stage for op in ops} - {NONE}))}
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    rows = [_op_row(op, steps, chunks) for op in ops]
    rows += [_message_row(message, steps, chunks, groups, record) for message in messages]
    rows += [_call_row(start_ns, end_ns, steps) for start_ns, end_ns in calls.tolist()]
    spans = np.zeros(len(rows), SPAN_DTYPE)
    for name in SPAN_DTYPE.names or ():
        spans[name] = [row.get(name, 0) for row in rows]
    record.spans = spans
    record.groups = list(groups)


class _Steps:
    """The step of each op and message of a rank.

    A receive for a step's first op may be posted before the step begins, after the last op of the step before.
    """

    def __init__(self, marks: _Marks, ops: Sequence[Op]) -> None:
        self.marks = marks
        begins = np.array(marks.begins, np.int64)
        ends = np.sort(np.array([_when(op, on_host=marks.on_host) for op in ops], np.int64))
        before = np.searchsorted(ends, begins, "left") - 1
        self.begins = np.where(before >= 0, ends[np.maximum(before, 0)] + 1, begins) if len(begins) else begins
        self.exact = begins

    def of_op(self, op: Op) -> int:
        return self._number(self.exact, _when(op, on_host=self.marks.on_host))

    def of_message(self, kind: Kind, when: int) -> int:
        return self._number(self.begins if kind is Kind.RECV else self.exact, when)

    def _number(self, begins: np.ndarray, when: int) -> int:
        at = int(np.searchsorted(begins, when, "right")) - 1
        return self.marks.numbers[at] if at >= 0 else max(0, (self.marks.numbers or [0])[0] - 1)


def _op_row(op: Op, steps: _Steps, chunks: dict[int, int]) -> dict[str, int]:
    flags = _INFERRED * op.inferred + _DEVICE * (op.launch_ns is not None)
    return {
        "kind": op.label.kind,
        "flags": flags,
        "stage": op.label.stage,
        "chunk": chunks.get(op.label.stage, NONE),
        "microbatch": op.label.microbatch,
        "step": steps.of_op(op),
        "peer": NONE,
        "group": NONE,
        "start_ns": op.start_ns,
        "end_ns": op.end_ns,
        "post_ns": op.start_ns,
        "launch_ns": op.start_ns if op.launch_ns is None else min(op.launch_ns, op.start_ns),
    }


def _call_row(start_ns: int, end_ns: int, steps: _Steps) -> dict[str, int]:
    unknown = dict.fromkeys(("stage", "chunk", "microbatch", "peer", "group"), NONE)
    times = {"start_ns": start_ns, "end_ns": end_ns, "post_ns": start_ns, "launch_ns": start_ns}
    step = steps.of_message(Kind.HOST, start_ns)
    return {"kind": Kind.HOST, "op": HostCause.SYNCHRONISING, "step": step, **unknown, **times}


def _message_row(
    message: Message,
    steps: _Steps,
    chunks: dict[int, int],
    groups: dict[tuple[str, tuple[int, ...]], int],
    record: RankRecord,
) -> dict[str, int]:
    waited = message.done_ns is not None
    start, end = (message.wait_ns, int(message.done_ns or 0)) if waited else (message.post_ns, message.post_ns)
    on_device = record.sums.on_device
    posted = message.called_ns if on_device and steps.marks.on_host else message.post_ns
    stage = message.label.stage if message.label else NONE
    group = message.group or _group_of_messages(message, record)
    return {
        "kind": message.kind,
        "op": message.op if message.kind is Kind.COLLECTIVE else payload_of(message),
        "flags": 0 if waited else _NEVER_WAITED,
        "stage": stage,
        "chunk": chunks.get(stage, NONE),
        "microbatch": message.label.microbatch if message.label else NONE,
        "step": steps.of_message(message.kind, posted),
        "peer": _global_peer(message, group),
        "tag": message.tag,
        "group": NONE if group is None else groups.setdefault(group, len(groups)),
        "size_bytes": message.size_bytes,
        "start_ns": start,
        "end_ns": max(start, end),
        "post_ns": min(message.post_ns, start),
        "launch_ns": start,
    }


def _group_of_messages(message: Message, record: RankRecord) -> tuple[str, tuple[int, ...]] | None:
    """The group of a message that does not name it: the one that is the pipeline's, else the one of all ranks."""
    if message.kind is Kind.COLLECTIVE:
        return None
    own = []
    for group in record.facts.get("pg_config", []):
        ranks = group.get("ranks")
        ranks = tuple(whole(rank) for rank in ranks) if isinstance(ranks, list) else ()
        if len(ranks) > 1 and min(ranks) >= 0 and (record.rank is None or record.rank in ranks):
            own.append((str(group.get("pg_desc", ""))[:200], ranks))
    pipelines = [group for group in own if re.search(r"pp\b|pipe", group[0], re.IGNORECASE)]
    counts = Counter(ranks for _, ranks in (pipelines or own))
    return ("pipeline", next(iter(counts))) if counts else ("pipeline", ())


def _global_peer(message: Message, group: tuple[str, tuple[int, ...]] | None) -> int:
    """The rank of the job at the other end: without a name of its own a rank counts within its group."""
    if message.kind is Kind.COLLECTIVE or message.peer == NONE:
        return NONE
    members = group[1] if group else ()
    if message.peer_is_global or not members:
        return message.peer
    return members[message.peer] if message.peer < len(members) else NONE
