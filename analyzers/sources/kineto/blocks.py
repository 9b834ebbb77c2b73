"""Cuts a trace file into blocks of whole events: memory is bounded by the block, not by the file.

Kineto separates its events by the same bytes always, and no string can hold them, since a raw newline cannot occur in
one. Other writers (``json.dump``, one line) separate them by a comma between two braces, which may also be inside of an
event; a block cut there that cannot be decoded is read event by event.
"""

from __future__ import annotations

import itertools
import re
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_BYTES = 1 << 20
"""Fits into a processor's cache: larger blocks are slower."""
MOST_HEADER_BYTES = 16 << 20
MOST_FOOTER_BYTES = 16 << 20
MOST_EVENT_BYTES = 16 << 20
MOST_INFLATION = 100
"""A trace shrinks to a tenth, and a file made to burst to a thousandth."""
LEAST_INFLATED_BYTES = 32 << 20
SEPARATOR = b"\n  },\n  {\n"
GZIP_MAGIC = b"\x1f\x8b"
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*\Z")
_END = re.compile(rb"\}\s*\]")
_ROW = msgspec.json.Decoder(list[msgspec.Raw])
MOST_ENDS = 16
"""Brackets tried as the end of the list."""


@dataclass(slots=True)
class Outline:
    """What surrounds the events of a file, and how far it could be read."""

    header: bytes = b""
    footer: bytes = b""
    has_events: bool = False
    """Whether the list of events was found."""
    whole: bool = False
    """Whether its end was."""
    damage: list[str] = field(default_factory=list)


def head(path: Path, size: int) -> bytes:
    """The first bytes of a file, decompressed where it is compressed; empty where that fails."""
    try:
        with path.open("rb") as stream:
            data = stream.read(size)
        return zlib.decompressobj(31).decompress(data, size) if data.startswith(GZIP_MAGIC) else data
    except (OSError, zlib.error):
        return b""


def chunks(path: Path, outline: Outline) -> Iterator[bytes]:
    """The bytes of a file, decompressed where its first bytes say that it is compressed, whatever its name."""
    with path.open("rb") as stream:
        compressed = stream.read(2) == GZIP_MAGIC
        stream.seek(0)
        if compressed:
            yield from _inflated(stream, path, outline)
        else:
            while chunk := stream.read(BLOCK_BYTES):
                yield chunk


def _inflated(stream: BinaryIO, path: Path, outline: Outline) -> Iterator[bytes]:
    most = max(LEAST_INFLATED_BYTES, MOST_INFLATION * path.stat().st_size)
    inflater, given = zlib.decompressobj(31), 0
    pending = b""
    while True:
        pending = pending or stream.read(BLOCK_BYTES // 4)
        if not pending:
            break
        if inflater.eof:
            if not pending.startswith(GZIP_MAGIC):
                return
            inflater = zlib.decompressobj(31)
        try:
            chunk = inflater.decompress(pending, BLOCK_BYTES)
        except zlib.error:
            outline.damage.append("its compressed data are damaged; read up to there")
            return
        pending = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
        given += len(chunk)
        if given > most:
            outline.damage.append(f"it unpacks to more than {MOST_INFLATION} times its size; read up to there")
            return
        yield chunk
    if not inflater.eof:
        outline.damage.append("its compressed data end early; read up to there")


def blocks(path: Path, outline: Outline) -> Iterator[bytes]:
    """Blocks of a file's events: each is a row of objects with commas between them, the last one with what follows.

    The last block ends where the file does, with the end of the list and the footer still on it.
    """
    stream = chunks(path, outline)
    rest = _after_header(stream, outline)
    if rest is None:
        return
    outline.has_events = True
    for chunk in stream:
        rest += chunk
        cut = last_cut(rest)
        if cut is not None:
            end, begin = cut
            yield rest[:end]
            rest = rest[begin:]
        elif len(rest) > MOST_EVENT_BYTES + MOST_FOOTER_BYTES:
            outline.damage.append(f"no event ends within {len(rest)} bytes; read up to there")
            return
    yield rest


def _after_header(stream: Iterator[bytes], outline: Outline) -> bytes | None:
    """The first bytes after the begin of the list of events; None where there is none."""
    data = b""
    for chunk in stream:
        data += chunk
        begin = data.lstrip(b"\xef\xbb\xbf \t\r\n")
        if begin.startswith(b"["):
            return begin[1:]
        found = _EVENTS.search(data)
        if found:
            outline.header = data[: found.start()]
            return data[found.end() :]
        if len(data) > MOST_HEADER_BYTES or not begin.startswith(b"{"):
            break
    outline.header = data
    return None


def last_cut(data: bytes) -> tuple[int, int] | None:
    """The end of the last event but one, and the begin of the last, by their offsets; None where no two are there."""
    at = data.rfind(SEPARATOR)
    if at >= 0:
        return at + 4, at + 6
    begin = data.rfind(b"{")
    for _ in range(64):
        if begin <= 0:
            return None
        between = _BETWEEN.search(data, max(0, begin - 64), begin)
        if between:
            return between.start() + 1, begin
        begin = data.rfind(b"{", 0, begin)
    return None


def split_footer(block: bytes) -> tuple[bytes, bytes] | None:
    """The events of the last block and what follows their list; None where the list does not end in it.

    Kineto indents the end of the list by two. In other layouts it is the first bracket behind a brace, after the begin
    of the last event, up to which all can be decoded.
    """
    at = block.find(b"\n  }\n  ]")
    if at >= 0:
        return block[: at + 4], block[at + 8 :]
    if block.lstrip().startswith(b"]"):
        return b"", block.lstrip()[1:]
    ends = list(itertools.islice(_END.finditer(block, max(0, block.rfind(b'"ph"'))), MOST_ENDS))
    for end in ends:
        if _is_whole(block[: end.start() + 1]):
            return block[: end.start() + 1], block[end.end() :]
    return (block[: ends[0].start() + 1], block[ends[0].end() :]) if ends else None


def _is_whole(row: bytes) -> bool:
    """Whether these bytes are a row of values with commas between them."""
    try:
        _ROW.decode(b"[" + row + b"]")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return True
