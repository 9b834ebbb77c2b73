"""Keeps the events of a trace that matter, as columns: kernels, copies, annotations, messages; on a CPU also its ops.

Times become whole ns since the epoch. What cannot be read is counted, and said.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.analyzers.sources.kineto.blocks import Outline, blocks, split_footer
from ppdiag.analyzers.sources.kineto.decode import Arguments, decode, decode_arguments
from ppdiag.analyzers.validation import LATEST_NS
from ppdiag.errors import BadRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


class Category(IntEnum):
    """What an event is."""

    KERNEL = 1
    COPY = 2
    """A copy or a memset on the device."""
    DEVICE_LABEL = 3
    """An annotation as the device saw it: from its first kernel to its last."""
    LABEL = 4
    """An annotation in a thread of the host."""
    COMMUNICATION_OP = 5
    """The host's call of a send, receive or collective."""
    CPU_OP = 6
    LAUNCH = 7
    """The host's call that launched a kernel."""
    FORWARD_MARK = 8
    """A moment of the host: a forward op begins here whose backward is in the trace too."""
    SYNCHRONISING = 9
    """The host's call that returns when its device, or one stream or event of it, is done."""


CATEGORIES = {
    "kernel": Category.KERNEL,
    "Kernel": Category.KERNEL,
    "gpu_memcpy": Category.COPY,
    "gpu_memset": Category.COPY,
    "Memcpy": Category.COPY,
    "Memset": Category.COPY,
    "gpu_user_annotation": Category.DEVICE_LABEL,
    "user_annotation": Category.LABEL,
    "cpu_op": Category.CPU_OP,
    "Operator": Category.CPU_OP,
    "cuda_runtime": Category.LAUNCH,
    "cuda_driver": Category.LAUNCH,
    "hip_runtime": Category.LAUNCH,
    "Runtime": Category.LAUNCH,
    "fwdbwd": Category.FORWARD_MARK,
    "fwd_bwd": Category.FORWARD_MARK,
}
"""By the ``cat`` of an event; names with a capital are those of torch before 1.13."""
_LARGE_WITH_FRACTION = re.compile(rb'"ts": ?(\d{13,})\.\d')
HOST_MESSAGES = ("gloo:", "mpi:", "ucc:")
"""Annotations of backends that move bytes on the host: from the post of a message to the end of the wait for it."""
MOST_DURATION_NS = 10**15
"""Eleven days."""
EXACT_BELOW_US = 1 << 43
"""A double holds ns of a time in us below this."""


@dataclass(slots=True)
class Events:
    """The kept events of a file, and what surrounds them. E events.

    Attributes:
        start_ns, end_ns: since the epoch (E).
        category: ``Category`` (E).
        name: index in ``names`` (E).
        thread: index in ``threads``, which are (pid, tid): of a kernel, device and stream (E).
        arguments: of the events that have to do with communication, by index; all kernels and launches where launches
            were asked for.
        facts: the header and the footer.
        left_out: how many events were left out, by why.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    category: np.ndarray
    name: np.ndarray
    thread: np.ndarray
    names: list[str]
    threads: list[tuple[Any, Any]]
    arguments: dict[int, Arguments]
    facts: dict[str, Any]
    damage: list[str]
    left_out: dict[str, int]

    def of(self, *categories: Category) -> np.ndarray:
        """Indices of the events of these categories."""
        return np.flatnonzero(np.isin(self.category, [int(category) for category in categories]))

    def name_of(self, index: int) -> str:
        """The name of an event."""
        return self.names[int(self.name[index])]

    def is_communication(self) -> np.ndarray:
        """Mask of the kernels of NCCL or RCCL (E)."""
        names = np.array([_is_communication(name) for name in self.names] or [False])
        return (self.category == Category.KERNEL) & names[self.name]


def _is_communication(name: str) -> bool:
    """Whether a kernel of this name belongs to NCCL or RCCL: ``ncclKernel_…``, ``ncclDevKernel_…``, ``rccl…``."""
    lowered = name.lower()
    return "nccl" in lowered or "rccl" in lowered


@dataclass(slots=True)
class _Kept:
    """Columns while a file is read."""

    wanted: str
    categories: frozenset[Category]
    ts: list[Any] = field(default_factory=list)
    dur: list[float] = field(default_factory=list)
    category: list[int] = field(default_factory=list)
    name: list[int] = field(default_factory=list)
    thread: list[int] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    threads: dict[tuple[Any, Any], int] = field(default_factory=dict)
    arguments: dict[int, Arguments] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    parts: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    exact: bool = False
    """Times are kept as they are written, since a double would round them."""
    count: int = 0

    def lose(self, why: str, count: int = 1) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + count


def read_events(path: Path, wanted: str = "device") -> Events:
    """The events of a file.

    Args:
        path: of the file.
        wanted: ``device`` (kernels, annotations, messages), ``cpu`` (annotations and all ops of the host) or
            ``launches`` (kernels and the calls that launched them).

    Raises:
        BadRecord: it holds no list of events.
    """
    outline = Outline()
    kinds = {
        "device": set(Category) - {Category.CPU_OP, Category.LAUNCH, Category.FORWARD_MARK},
        "cpu": {Category.LABEL, Category.CPU_OP, Category.COMMUNICATION_OP, Category.FORWARD_MARK},
        "launches": {Category.KERNEL, Category.LAUNCH},
    }[wanted]
    kept = _Kept(wanted, frozenset(kinds))
    previous: bytes | None = None
    for block in blocks(path, outline):
        if previous is not None:
            _take_block(previous, kept)
        previous = block
    if previous is not None:
        _take_last(previous, kept, outline)
    if not outline.has_events:
        raise BadRecord(f"{path}: expected a trace of torch.profiler, and it holds no list `traceEvents`")
    _flush(kept)
    return _events(kept, outline)


def _take_last(block: bytes, kept: _Kept, outline: Outline) -> None:
    """The last block: its events, then what follows their list."""
    split = split_footer(block)
    if split is not None:
        outline.whole = True
        body, outline.footer = split
        if body.strip():
            _take_block(body, kept)
        return
    outline.damage.append("it is cut off or damaged at its end; read as far as its last whole event")
    end = block.rfind(b"}")
    if end > 0 and block.strip():
        _take_block(block[: end + 1], kept)


def _take_block(block: bytes, kept: _Kept) -> None:
    if not kept.count and not kept.ts:
        found = _LARGE_WITH_FRACTION.search(block)
        kept.exact = kept.exact or (found is not None and int(found[1][:20]) >= EXACT_BELOW_US)
    _keep(decode(block, kept.wanted, exact=kept.exact, lose=kept.lose), kept)
    if len(kept.ts) > 1 << 16:
        _flush(kept)


def _keep(events: Iterable[Any], kept: _Kept) -> None:
    """Appends events to the columns."""
    names, threads, categories = kept.names, kept.threads, kept.categories
    arguments_of_all = kept.wanted == "launches"
    for event in events:
        category = CATEGORIES.get(event.cat)
        if category is None or event.ph != ("s" if category is Category.FORWARD_MARK else "X"):
            continue
        name = event.name
        known = names.get(name)
        if known is None:
            known = names[name] = len(names)
        if category is Category.CPU_OP and (name == "record_param_comms" or name.startswith("c10d::")):
            category = Category.COMMUNICATION_OP
        if category is Category.LAUNCH and name.endswith("Synchronize"):
            category = Category.SYNCHRONISING
        if category not in categories:
            continue
        try:
            thread = threads.setdefault((event.pid, event.tid), len(threads))
        except TypeError:
            thread = threads.setdefault((None, None), len(threads))
        if arguments_of_all or _has_arguments(category, name):
            arguments = decode_arguments(event.args)
            if arguments is not None:
                kept.arguments[kept.count + len(kept.ts)] = arguments
        kept.ts.append(event.ts)
        kept.dur.append(event.dur if category is not Category.FORWARD_MARK else 0.0)
        kept.category.append(category)
        kept.name.append(known)
        kept.thread.append(thread)


def _has_arguments(category: Category, name: str) -> bool:
    """Whether the arguments of an event say something of its communication."""
    if category is Category.LABEL:
        return name.startswith(HOST_MESSAGES)
    return category is Category.COMMUNICATION_OP or (category is Category.KERNEL and _is_communication(name))


def _flush(kept: _Kept) -> None:
    """Turns what was appended into arrays: a Python object for each number would take five times the memory."""
    start = _exact_ns(kept.ts) if kept.exact else _ns(np.array(kept.ts, np.float64))
    dur = np.array(kept.dur, np.float64)
    length = np.where(np.isfinite(dur) & (dur >= 0) & (dur < MOST_DURATION_NS / 1000), dur, -1.0)
    columns = (kept.category, np.uint8), (kept.name, np.int32), (kept.thread, np.int32)
    kept.parts.append((start, np.rint(length * 1000).astype(np.int64), *(np.array(c, t) for c, t in columns)))
    kept.count += len(kept.ts)
    for column in (kept.ts, kept.dur, kept.category, kept.name, kept.thread):
        column.clear()


def _ns(times_us: np.ndarray) -> np.ndarray:
    """Times in us as whole ns; -1 where they are none."""
    usable = np.isfinite(times_us) & (np.abs(times_us) < LATEST_NS / 1000)
    times_us = np.where(usable, times_us, 0.0)
    whole = np.floor(times_us)
    ns = whole.astype(np.int64) * 1000 + np.rint((times_us - whole) * 1000).astype(np.int64)
    return np.where(usable, ns, _NO_TIME)


_NO_TIME = np.iinfo(np.int64).min


def _exact_ns(raws: Sequence[Any]) -> np.ndarray:
    """The same of times as they are written, each digit kept."""
    found = np.full(len(raws), _NO_TIME, np.int64)
    for i, raw in enumerate(raws):
        whole, _, fraction = bytes(raw).partition(b".")
        if whole.isdigit() and len(whole) < 19 and (fraction.isdigit() or not fraction):
            ns = int(whole) * 1000 + int((fraction + b"000")[:3])
            found[i] = ns if ns < LATEST_NS else _NO_TIME
    return found


def _events(kept: _Kept, outline: Outline) -> Events:
    start, duration, category, name, thread = (np.concatenate(column) for column in zip(*kept.parts, strict=True))
    facts = _facts(outline)
    base = facts.get("baseTimeNanoseconds")
    shift = base if isinstance(base, int) and not isinstance(base, bool) and 0 <= base < LATEST_NS else 0
    good = (start != _NO_TIME) & (duration >= 0)
    start = np.where(good, start, 0) + shift
    good &= (start >= 0) & (start < LATEST_NS - MOST_DURATION_NS)
    if not good.all():
        kept.lose("no time or no duration", int((~good).sum()))
    number = np.cumsum(good) - 1
    arguments = {int(number[i]): found for i, found in kept.arguments.items() if good[i]}
    return Events(
        start_ns=start[good],
        end_ns=(start + np.maximum(duration, 0))[good],
        category=category[good],
        name=name[good],
        thread=thread[good],
        names=list(kept.names),
        threads=list(kept.threads),
        arguments=arguments,
        facts=facts,
        damage=outline.damage,
        left_out=kept.left_out,
    )


_FACT = re.compile(rb'"(baseTimeNanoseconds|rank|world_size)"\s*:\s*(\d{1,20})')


def _facts(outline: Outline) -> dict[str, Any]:
    """What stands before and after the events; of a damaged header or footer the few facts that matter most."""
    facts: dict[str, Any] = {}
    for text in (outline.header.rstrip().rstrip(b",") + b"}", b"{" + outline.footer.lstrip().lstrip(b",")):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = _found_facts(text)
        facts |= found if isinstance(found, dict) else {}
    return facts


def _found_facts(text: bytes) -> dict[str, Any]:
    found = {match[1].decode(): int(match[2]) for match in _FACT.finditer(text)}
    base = {"baseTimeNanoseconds": found.pop("baseTimeNanoseconds")} if "baseTimeNanoseconds" in found else {}
    return {**base, **({"distributedInfo": found} if found else {})}
