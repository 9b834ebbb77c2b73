"""The run directory: which files a run consists of, and how spans lie in them.

Standard library only; the writer (``ppdiag.hooks``) and the reader (``ppdiag.analyzers.sources.run_directory``) share
it.

A rank writes three files, named by its rank and by how often it was (re)started in this directory:

* ``rank00003-0.spans``: a magic line, one line of JSON (the header), then blocks. A block is ``BLOCK_MAGIC``, the
  number of records and the CRC-32 of its payload, then the records of ``model.SPAN_FIELDS``. Only whole blocks are
  appended, so that a reader may look at any time and a killed rank loses at most its last block.
* ``rank00003-0.jsonl``: what is said in words, one JSON object a line, each with a ``type``: ``fact`` (``name``,
  ``value``), ``group`` (``id``, ``name``, ``ranks``: global ranks), ``anchor`` (``local_ns``, ``unix_ns``),
  ``clock`` (a ping-pong probe), ``fault`` (a probe of ours that failed: ``probe``, ``error``).
* ``rank00003-0.state``: the state slot, ``STATE_SIZE`` bytes, rewritten in place.

Beside them ``run.json`` (the launcher's facts), ``processes.jsonl`` (every Python process that was armed) and, while
``ppdiag record`` speaks with the ranks, ``control.json`` (``id``, ``steps``, ``start``: -1 while it asks; ``ahead``:
by how many steps each rank that was attached to counts ahead of the one that counts least). The ranks
answer with lines of type ``control``; ``block`` lines have the lengths of blocks of steps, probed and not;
``layers`` lines (``first``, ``names``, ``root``) the names of the layers from this number on.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ppdiag.model import FORMAT_VERSION, SPAN_FIELDS, STATE_STRUCT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPAN_MAGIC = b"PPDIAG-SPANS\n"
STATE_MAGIC = b"PPDIAG-STATE\n"
BLOCK_MAGIC = b"BLK1"
BLOCK_HEADER = struct.Struct("<4sII")
STATE_SIZE = 4096
"""One page: the slot is a shared mapping, and a preallocated page cannot raise SIGBUS on a full disk."""
STATE = struct.Struct(STATE_STRUCT)
STATE_OFFSET = 64
STATE_TAG = struct.Struct("<i")
STATE_TAG_OFFSET = STATE_OFFSET + STATE.size
"""The tag of the message waited for lies behind the slot's other fields: 0 where an older recorder left it out."""
MAX_HEADER_BYTES = 1 << 20
MAX_BLOCK_RECORDS = 1 << 20
MOST_FAILED_CHECKSUMS = 16
"""How often its length of a file may be read in vain: one damaged block costs at most once."""

RUN_DIR_VARIABLE = "PPDIAG_RUN_DIR"
MAX_BYTES_VARIABLE = "PPDIAG_MAX_BYTES"
MODE_VARIABLE = "PPDIAG_MODE"
"""Environment variables by which the launcher tells the ranks: where, how much, and which steps (``hooks.control``)."""
ATTACHED_MODE = "attached"
"""Asleep, as in mode ``dormant``, but armed while the job ran: the ranks do not count steps from the same one."""
ADAPTERS_VARIABLE = "PPDIAG_ADAPTERS"
"""The same: ``none`` switches the framework adapters off."""
LAYER_TIMES_VARIABLE = "PPDIAG_LAYER_TIMES"
"""The same: set, the layers of each stage are timed in a few steps (``hooks.layer_times``)."""

RUN_FILE = "run.json"
PROCESSES_FILE = "processes.jsonl"
CONTROL_FILE = "control.json"
_RANK_FILE = re.compile(r"rank(\d{5,})-(\d+)\.(spans|jsonl|state)\Z")


class RankFile(NamedTuple):
    """The parts of the name of a rank's file."""

    rank: int
    start: int
    """0 for the first process that recorded this rank in the directory, 1 after the first restart, and so on."""
    suffix: str


def rank_file_name(rank: int, start: int, suffix: str) -> str:
    """Name of a rank's file.

    >>> rank_file_name(3, 0, "spans")
    'rank00003-0.spans'
    """
    return f"rank{rank:05d}-{start}.{suffix}"


def parse_rank_file_name(name: str) -> RankFile | None:
    """The inverse of :func:`rank_file_name`; None for any other name.

    >>> parse_rank_file_name("rank00003-0.spans")
    RankFile(rank=3, start=0, suffix='spans')
    """
    match = _RANK_FILE.match(name)
    return RankFile(int(match[1]), int(match[2]), match[3]) if match else None


def encode_header(facts: dict[str, Any], fields: Sequence[tuple[str, str, str]] = SPAN_FIELDS) -> bytes:
    """The beginning of a span file. ``facts`` (rank, world_size, host, pid, clock, ...) must be JSON-serialisable."""
    header = {"version": FORMAT_VERSION, "fields": [[name, dtype] for name, _, dtype in fields], **facts}
    return SPAN_MAGIC + json.dumps(header, separators=(",", ":")).encode() + b"\n"


def encode_block(records: bytes | bytearray, count: int) -> bytes:
    """A block of ``count`` packed records, ready to be appended with one ``write``."""
    return BLOCK_HEADER.pack(BLOCK_MAGIC, count, zlib.crc32(records)) + records


def read_header(path: Path) -> dict[str, Any]:
    """The header of a span file, of whichever version; empty where it cannot be read."""
    try:
        with path.open("rb") as stream:
            magic, line = stream.readline(len(SPAN_MAGIC)), stream.readline(MAX_HEADER_BYTES)
        header = json.loads(line) if magic == SPAN_MAGIC else None
    except (OSError, ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def read_run_file(directory: Path) -> dict[str, Any]:
    """What the launcher knows (``run.json``); empty where it cannot be read.

    An argument of the job that is no UTF-8 comes back as the launcher had it, with lone surrogates.
    """
    try:
        facts = json.loads((directory / RUN_FILE).read_text(encoding="utf-8", errors="surrogateescape"))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


class Readable(Protocol):
    """Bytes, or a file that is read as it is looked at."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> bytes: ...
    def find(self, sub: bytes, start: int, /) -> int: ...  # noqa: D102


def decode_blocks(data: Readable, offset: int, record_size: int) -> Iterator[tuple[bytes, int]]:
    """Payloads of the whole, undamaged blocks in ``data[offset:]``.

    Yields:
        ``(payload, 0)`` for a good block and ``(b"", lost_bytes)`` for a stretch that is torn or damaged; reading goes
        on at the next block after it. A file of nothing but false blocks is given up after a few times its length of
        failed checksums.
    """
    patience = MOST_FAILED_CHECKSUMS * len(data)
    while offset < len(data) and patience >= 0:
        length = _length_at(data, offset, record_size)
        payload = None if length is None else _payload_at(data, offset, length)
        if payload is not None:
            yield payload, 0
            offset += BLOCK_HEADER.size + len(payload)
            continue
        patience -= length or 0
        following = data.find(BLOCK_MAGIC, offset + 1)
        following = len(data) if following < 0 or patience < 0 else following
        yield b"", following - offset
        offset = following


def _length_at(data: Readable, offset: int, record_size: int) -> int | None:
    """Length of the payload that a block at ``offset`` promises; None where no whole block can be."""
    head = data[offset : offset + BLOCK_HEADER.size]
    if len(head) < BLOCK_HEADER.size:
        return None
    magic, count, _ = BLOCK_HEADER.unpack(head)
    length = int(count) * record_size
    whole = magic == BLOCK_MAGIC and count <= MAX_BLOCK_RECORDS and offset + BLOCK_HEADER.size + length <= len(data)
    return length if whole else None


def _payload_at(data: Readable, offset: int, length: int) -> bytes | None:
    start = offset + BLOCK_HEADER.size
    payload = data[start : start + length]
    checksum = BLOCK_HEADER.unpack(data[offset:start])[2]
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None


def clock_identity() -> str:
    """Equal in two processes if and only if they read the same monotonic clock: same boot, same time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = socket.gethostname()
    try:
        namespace = Path("/proc/self/ns/time").stat().st_ino
    except OSError:  # a kernel without time namespaces has one clock
        namespace = 0
    return f"{boot}:{namespace}"
