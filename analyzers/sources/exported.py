"""Reads back what ``ppdiag export`` wrote for Perfetto or Chrome: the record travels inside of it, whole."""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ppdiag.analyzers.sources.sorting import some
from ppdiag.analyzers.validation import plausible
from ppdiag.errors import BadRecord, NotARun
from ppdiag.portable import PERFETTO_FIELD, PERFETTO_MAGIC, trace_of
from ppdiag.trace import SPAN_DTYPE, sorted_spans

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from ppdiag.analyzers.sources import Progress
    from ppdiag.trace import Trace

CHROME_MAGIC = b'{"ppdiag":{"header":'
HEAD_BYTES = 64
SMALL_BYTES = 16 << 20
MOST_LINE = 4
"""The record in a packed file takes no more than ``SMALL_BYTES`` and so many times the file: it is packed already."""
MOST_UNPACKED = 100
"""The same of the spans: a record of one moment over and over is 60 times as long as it is packed."""
GZIP_MAGIC = b"\x1f\x8b"
TRACE_PACKET = 1
LENGTH_DELIMITED = 2


class Exported:
    """One file of ``ppdiag export --perfetto`` or ``--chrome``."""

    description = "exports of `ppdiag export` (--perfetto, --chrome)"

    def recognises(self, path: Path) -> bool:
        """Whether the file begins as an export does."""
        if not path.is_file():
            return False
        try:
            with _opened(path) as stream:
                head = stream.read(HEAD_BYTES)
        except (OSError, EOFError, zlib.error):  # packed, and not whole
            return False
        return head.startswith(CHROME_MAGIC) or PERFETTO_MAGIC in head

    def read(self, paths: Sequence[Path], progress: Progress | None) -> Trace:
        """The trace that was exported.

        Raises:
            BadRecord: the record in it cannot be read.
            NotARun: there is more than one file.
        """
        if len(paths) > 1:
            raise NotARun(f"{some(paths)}: each is the export of a whole job; name one of them")
        path = paths[0]
        if progress is not None:
            progress("reading the export", 0, 1)
        size = path.stat().st_size
        most_spans = (SMALL_BYTES + MOST_UNPACKED * size) // SPAN_DTYPE.itemsize
        try:
            with _opened(path) as stream:
                is_chrome = stream.read(len(CHROME_MAGIC)) == CHROME_MAGIC
                stream.seek(0)
                pieces = _chrome_pieces(stream, path, SMALL_BYTES + MOST_LINE * size)
                pieces = pieces if is_chrome else _perfetto_pieces(stream, size)
                trace, missing = trace_of(next(pieces, b""), pieces, most_spans=most_spans)
        except ValueError as error:
            raise BadRecord(f"{path}: not an export that this ppdiag reads: {error}") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadRecord(f"{path}: damaged or cut off, so that it cannot be unpacked") from error
        return _checked(trace, path, missing)


def _opened(path: Path) -> BinaryIO:
    """The file, unpacked where it is packed."""
    stream = path.open("rb")
    packed = stream.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    stream.seek(0)
    if packed:
        stream.close()
        return cast("BinaryIO", gzip.open(path))
    return stream


def _checked(trace: Trace, path: Path, missing: int) -> Trace:
    kept = plausible(trace.spans)
    missing += int((~kept).sum())
    warnings = trace.warnings
    if missing:
        warnings = (*warnings, f"{path.name}: {missing} spans are missing, damaged or impossible, and were left out")
    return replace(
        trace, spans=sorted_spans(trace.spans[kept]), job=replace(trace.job, source=str(path)), warnings=warnings
    )


def _chrome_pieces(stream: BinaryIO, path: Path, most_bytes: int) -> Iterator[bytes]:
    """The header and the blocks, of the file's first line."""
    line = stream.readline(most_bytes).rstrip()
    try:
        record = json.loads(line.rstrip(b",") + b"}")["ppdiag"]
        header, blocks = record["header"], record["blocks"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadRecord(f"{path}: its first line, which holds the record, is damaged or cut off") from error
    yield json.dumps(header).encode()
    for block in blocks if isinstance(blocks, list) else ():
        try:
            yield base64.b64decode(block, validate=True)
        except (binascii.Error, TypeError, ValueError):
            continue


def _perfetto_pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """The header and the blocks: the packets at the file's beginning that hold the extension's field."""
    while True:
        packet = _field(stream, TRACE_PACKET)
        length = _field(stream, PERFETTO_FIELD) if packet is not None else None
        if length is None or length > size:
            return
        piece = stream.read(length)
        if len(piece) < length:
            return
        yield piece.removeprefix(PERFETTO_MAGIC)


def _field(stream: BinaryIO, number: int) -> int | None:
    """Length of the field that follows, if it is this one; else None."""
    if _varint(stream) != (number << 3 | LENGTH_DELIMITED):
        return None
    return _varint(stream)


def _varint(stream: BinaryIO) -> int | None:
    value = 0
    for place in range(10):
        byte = stream.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << (7 * place)
        if byte[0] < 0x80:
            return value
    return None
