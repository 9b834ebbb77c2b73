"""A whole trace as pieces of bytes that travel inside of other files, and back: what an export carries for ``analyze``.

One header (JSON: the facts of job, ranks and groups), then blocks of spans, each column after the other, compressed.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.trace import SPAN_DTYPE, JobFacts, ProcessGroup, RankFacts, Trace, Waiting

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

SCHEMA = "ppdiag.trace/1"
PERFETTO_FIELD = 1797
"""Number of the field of a TracePacket that holds a piece, of those that Perfetto leaves to extensions."""
PERFETTO_MAGIC = b"PPDIAG-TRACE\n"
"""Before the header, in the first packet."""
BLOCK_SPANS = 1 << 16
BLOCK_BYTES = BLOCK_SPANS * SPAN_DTYPE.itemsize
"""No block is longer when it is unpacked, whatever it says."""


def header_of(trace: Trace) -> bytes:
    """All of a trace but its spans, as one line of JSON."""
    data = {
        "schema": SCHEMA,
        "fields": [[name, SPAN_DTYPE[name].str] for name in SPAN_DTYPE.names or ()],
        "spans": len(trace),
        "job": _fields(trace.job),
        "ranks": [_fields(rank) for rank in trace.ranks.values()],
        "groups": [[group.name, list(group.ranks)] for group in trace.groups],
        "clock_error_s": trace.clock_error_s,
        "warnings": list(trace.warnings),
        "transports": [dict(row) for row in trace.transports],
        "nccl": dict(trace.nccl),
    }
    return json.dumps(data, separators=(",", ":"), default=_plain).encode("ascii")


def blocks_of(trace: Trace) -> Iterator[bytes]:
    """The spans of a trace, some at a time."""
    for first in range(0, len(trace), BLOCK_SPANS):
        part = trace.spans[first : first + BLOCK_SPANS]
        columns = [np.ascontiguousarray(part[name]).tobytes() for name in SPAN_DTYPE.names or ()]
        yield zlib.compress(b"".join(columns), 6)


def _fields(value: Any) -> dict[str, Any]:  # noqa: ANN401  (a dataclass of ``ppdiag.trace``)
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _plain(value: Any) -> Any:  # noqa: ANN401  (what json does not know)
    if isinstance(value, Waiting):
        return _fields(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    return str(value)


def trace_of(header: bytes, blocks: Iterable[bytes], *, most_spans: int) -> tuple[Trace, int]:
    """The trace of these pieces, and how many spans of it are missing or damaged.

    Args:
        header: of :func:`header_of`.
        blocks: of :func:`blocks_of`.
        most_spans: no more are unpacked: a few bytes may promise gigabytes.

    Raises:
        ValueError: the header is none of ours, or of another version.
    """
    try:
        data = json.loads(header)
        wanted = [[name, SPAN_DTYPE[name].str] for name in SPAN_DTYPE.names or ()]
        if data["schema"] != SCHEMA or data["fields"] != wanted:
            raise ValueError(f"expected {SCHEMA}, found {str(data['schema'])[:50]!r} or other fields")
        spans = _unpacked(blocks, min(most_spans, int(data["spans"])))
        ranks = [_rank_facts(row) for row in data["ranks"]]
        trace = Trace(
            spans=spans,
            job=_made(JobFacts, data["job"]),
            ranks={rank.rank: rank for rank in ranks},
            groups=tuple(ProcessGroup(str(name), tuple(map(int, members))) for name, members in data["groups"]),
            clock_error_s=_finite(data["clock_error_s"]),
            warnings=tuple(map(str, data["warnings"])),
            transports=tuple(dict(row) for row in data["transports"]),
            nccl=dict(data["nccl"]),
        )
        return trace, max(0, int(data["spans"]) - len(spans))
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"its header is damaged ({type(error).__name__})") from error


def _unpacked(blocks: Iterable[bytes], most_spans: int) -> np.ndarray:
    parts, count = [np.zeros(0, SPAN_DTYPE)], 0
    for block in blocks:
        if count >= most_spans:
            break
        part = _spans_of(block)
        if part is not None:
            parts.append(part[: most_spans - count])
            count += len(part)
    return np.concatenate(parts)


def _spans_of(block: bytes) -> np.ndarray | None:
    """The spans of a block; None where it is damaged."""
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(block, BLOCK_BYTES)
    except zlib.error:
        return None
    count = len(data) // SPAN_DTYPE.itemsize
    if not unpacking.eof or count * SPAN_DTYPE.itemsize != len(data):
        return None
    spans, at = np.zeros(count, SPAN_DTYPE), 0
    for name in SPAN_DTYPE.names or ():
        size = count * SPAN_DTYPE[name].itemsize
        spans[name] = np.frombuffer(data[at : at + size], SPAN_DTYPE[name])
        at += size
    return spans


def _rank_facts(row: Mapping[str, Any]) -> RankFacts:
    waiting = row.get("waiting")
    kept = {**row, "waiting": _made(Waiting, waiting) if waiting is not None else None}
    kept["clock_probes"] = tuple(dict(probe) for probe in row.get("clock_probes", ()))
    kept["faults"] = tuple(map(str, row.get("faults", ())))
    kept["facts"] = dict(row.get("facts", {}))
    made: RankFacts = _made(RankFacts, kept)
    return made


def _made(kind: Any, row: Mapping[str, Any]) -> Any:  # noqa: ANN401  (a dataclass of ``ppdiag.trace``)
    """A dataclass from a row of its fields; each of those that are words or numbers is checked to be of its type."""
    made = kind(**{f.name: row[f.name] for f in fields(kind) if f.name in row})
    for f in fields(kind):
        value, expected = getattr(made, f.name), _PLAIN_TYPES.get(str(f.type))
        if expected is not None and not isinstance(value, expected):
            raise TypeError(f"{f.name} is {type(value).__name__}")
    return made


_PLAIN_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "int | None": (int, type(None)),
}


def _finite(value: Any) -> float:  # noqa: ANN401  (what a file says)
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise TypeError("clock_error_s")
    return float(value)
