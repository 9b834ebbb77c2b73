"""Decodes a block of events: only those that are looked at, and what can be read of a damaged one."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec

from ppdiag.analyzers.sources.kineto.blocks import SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Callable

_BEGIN = rb'"ph": "X",\s+"cat": "'
WANTED = {
    "device": re.compile(
        _BEGIN + rb'(?:kernel|gpu_|user_ann|cpu_op",\s+"name": "(?:record_param_comms|c10d::)|Kernel|Mem'
        rb'|(?:cuda|hip)_(?:runtime|driver)",\s+"name": "\w*Synchronize")'
    ),
    "cpu": re.compile(rb'"ph": "(?:X",\s+"cat": "(?:user_ann|cpu_op|Operator)|s",)'),
    "launches": re.compile(
        _BEGIN + rb'(?:kernel|(?:cuda|hip)_(?:runtime|driver)",\s+"name": "\w*Launch|Kernel|Runtime)'
    ),
}
"""What is looked at, by what is asked for. Each begins with the same bytes, so that the scan is a search for them."""
MOST_FAILURES = 200
"""Of one block: each may cost the time to read all of it."""
_NO_NUMBER = re.compile(rb"(?<=[:,\[])(\s*)[-+]?(?:nan|inf|NaN|Infinity)(?=\s*[,}\]\n])")
_BETWEEN_OBJECTS = re.compile(r"\}\s*,\s*\{")


class Event(msgspec.Struct, gc=False):
    """An event; ``ts`` and ``dur`` in us, ``dur`` negative where there is none."""

    ts: float
    dur: float = -1.0
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: Any = None
    tid: Any = None
    args: msgspec.Raw = msgspec.Raw()


class ExactEvent(msgspec.Struct, gc=False):
    """The same with its time as it is written."""

    ts: msgspec.Raw
    dur: float = -1.0
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: Any = None
    tid: Any = None
    args: msgspec.Raw = msgspec.Raw()


class Arguments(msgspec.Struct, gc=False):
    """What the arguments of a kernel or of a call say of its communication."""

    collective: Any = msgspec.field(default=None, name="Collective name")
    source: Any = msgspec.field(default=None, name="Src Rank")
    target: Any = msgspec.field(default=None, name="Dst Rank")
    peer: Any = msgspec.field(default=None, name="Rank")
    sequence: Any = msgspec.field(default=None, name="Seq")
    external: Any = msgspec.field(default=None, name="External id")
    elements: Any = msgspec.field(default=None, name="In msg nelems")
    dtype: Any = msgspec.field(default=None, name="dtype")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    members: Any = msgspec.field(default=None, name="Process Group Ranks")
    inputs: Any = msgspec.field(default=None, name="Concrete Inputs")
    shapes: Any = msgspec.field(default=None, name="Input Dims")
    types: Any = msgspec.field(default=None, name="Input type")
    correlation: Any = None


_PLAIN = msgspec.json.Decoder(list[Event])
_EXACT = msgspec.json.Decoder(list[ExactEvent])
_ARGUMENTS = msgspec.json.Decoder(Arguments)
_FAILURES = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def decode(block: bytes, wanted: str, *, exact: bool, lose: Callable[[str], None]) -> list[Any]:
    """The events of a block, as :class:`Event`, or :class:`ExactEvent` where ``exact``.

    Args:
        block: objects with commas between them.
        wanted: a key of ``WANTED``; in layouts other than Kineto's all events are decoded.
        exact: keep times as they are written, since a double would round them.
        lose: told of each event that cannot be read.
    """
    text = _selected(block, WANTED[wanted]) if SEPARATOR in block else block
    if not text:
        return []
    decoder = _EXACT if exact else _PLAIN
    try:
        return decoder.decode(b"[" + text + b"]")
    except _FAILURES:
        pass
    try:
        return decoder.decode(b"[" + _NO_NUMBER.sub(rb"\1null", text) + b"]")
    except _FAILURES:
        return _one_by_one(text, exact=exact, lose=lose)


def decode_arguments(raw: msgspec.Raw) -> Arguments | None:
    """What the arguments of an event say of its communication; None where they cannot be read."""
    try:
        return _ARGUMENTS.decode(raw)
    except _FAILURES:
        return None


def _selected(block: bytes, wanted: re.Pattern[bytes]) -> bytes:
    """The events of a block in Kineto's layout that are looked at, with commas between them."""
    found, end = [], 0
    for match in wanted.finditer(block):
        if match.start() < end:
            continue
        begin = block.rfind(b"{", end, match.start())
        end = block.find(SEPARATOR, match.end())
        end = len(block) if end < 0 else end + 4
        found.append(block[begin:end])
    return b",".join(found)


def _one_by_one(text: bytes, *, exact: bool, lose: Callable[[str], None]) -> list[Any]:
    """The events of a block in which something is wrong; those that cannot be read are left out."""
    decoder = json.JSONDecoder()
    words = text.decode("utf-8", "replace")
    events, at, failures = [], 0, 0
    while (at := words.find("{", at)) >= 0 and failures < MOST_FAILURES:
        try:
            value, at = decoder.raw_decode(words, at)
        except (ValueError, RecursionError):
            failures += 1
            lose("no JSON")
            following = _BETWEEN_OBJECTS.search(words, at + 1)
            at = following.end() - 1 if following else len(words)
            continue
        if isinstance(value, dict) and value.get("ph") in ("X", "s"):
            event = _event(value, exact=exact)
            events += [event] if event is not None else []
            if event is None:
                lose("no time or name")
    return events


def _event(value: dict[str, Any], *, exact: bool) -> Event | ExactEvent | None:
    """An event out of a dict; None where it has no time or no name."""
    ts, dur, name, category = (value.get(key, "") for key in ("ts", "dur", "name", "cat"))
    dur = -1.0 if dur in ("", None) else dur
    numbers = all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in (ts, dur))
    if not numbers or not isinstance(name, str) or not isinstance(category, str):
        return None
    try:
        arguments = msgspec.Raw(json.dumps(value.get("args") or {}).encode())
        rest = (float(dur), value["ph"], category, name, value.get("pid"), value.get("tid"), arguments)
        return ExactEvent(msgspec.Raw(json.dumps(ts).encode()), *rest) if exact else Event(float(ts), *rest)
    except (OverflowError, ValueError, RecursionError):
        return None
