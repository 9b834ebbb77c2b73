"""Reads what NCCL's Inspector writes: one JSON object a collective, with its bytes, time and bandwidth.

There are no ops of a pipeline in it, so that idle time cannot be split. What it does say: how fast each communicator's
collectives are, and which rank comes last to them. All ranks leave a collective together, so that the one that spends
the least time in it has come last.

Source: ext-profiler/inspector/README.md of NVIDIA/nccl, output format v4.0 and later.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ppdiag.errors import BadRecord, NoPipelineFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO, NoReturn

    from ppdiag.analyzers.sources import Progress

HEAD_BYTES = 4096
MARKS = (b'"coll_perf"', b'"p2p_perf"', b'"inspector_output_format_version"')
SUFFIXES = (".log", ".jsonl", ".json", ".log.gz", ".jsonl.gz", ".json.gz")
GZIP_MAGIC = b"\x1f\x8b"
MOST_LINE = 1 << 20
MOST_INFLATION = 300
"""Such logs shrink to a twentieth; a file made to burst, to a thousandth."""
LEAST_READ_BYTES = 64 << 20
MOST_CALLS = 1 << 21
"""Of all communicators; the first ones are kept."""
LEAST_CALLS = 10
LISTED = 8


class _Call(NamedTuple):
    """One collective as one rank saw it."""

    rank: int
    number: int
    name: str
    size_bytes: int
    time_us: float
    bus_gbs: float


@dataclass(slots=True)
class _Communicator:
    ranks: int
    calls: list[_Call] = field(default_factory=list)


class NcclInspector:
    """The files of one job, or their directory."""

    description = "logs of NCCL's Inspector (.log, .jsonl)"

    def recognises(self, path: Path) -> bool:
        """Whether the path is such a file, or a directory with one in it."""
        return any(True for _ in _files([path]))

    def read(self, paths: Sequence[Path], progress: Progress | None) -> NoReturn:
        """Says what the recording holds.

        Raises:
            NoPipelineFound: always; the message says how fast collectives are, and who comes last.
            BadRecord: no line of the files is a record.
        """
        files = list(_files(paths))
        found: dict[str, _Communicator] = {}
        bad = 0
        for done, path in enumerate(files):
            if progress is not None:
                progress("reading files", done, len(files))
            bad += _read(path, found)
        source = ", ".join(map(str, paths[:LISTED]))
        if not found:
            raise BadRecord(f"{source}: expected records of NCCL's Inspector, and none of {bad} lines is one")
        rows = sorted(found.values(), key=lambda communicator: -len(communicator.calls))
        said = "; ".join(_words(communicator) for communicator in rows[:LISTED])
        more = f"; {len(rows) - LISTED} more communicators" if len(rows) > LISTED else ""
        damaged = f"; {bad} lines were left out: cut off or no records" if bad else ""
        raise NoPipelineFound(
            f"{source}: NCCL's Inspector records collectives and no ops of a pipeline, so that idle time cannot be "
            f"split by cause; found {said}{more}{damaged}"
        )


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.name.endswith(SUFFIXES) and file.is_file() and _looks_like_one(file):
                yield file


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as stream:
        packed = stream.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    return gzip.open(path) if packed else path.open("rb")  # type: ignore[return-value]


def _looks_like_one(path: Path) -> bool:
    try:
        with _open(path) as stream:
            head = stream.read(HEAD_BYTES)
    except (OSError, EOFError, zlib.error):
        return False
    return head.lstrip()[:1] == b"{" and any(mark in head for mark in MARKS)


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; a packed one is read as far as it goes, and as far as is sensible."""
    done, most = 0, max(LEAST_READ_BYTES, MOST_INFLATION * path.stat().st_size)
    with _open(path) as stream:
        try:
            while done < most and (line := stream.readline(MOST_LINE)):
                done += len(line)
                if line.strip():
                    yield line
        except (OSError, EOFError, zlib.error):
            return


def _read(path: Path, found: dict[str, _Communicator]) -> int:
    """Takes the records of a file; returns how many lines are none."""
    bad = 0
    kept = sum(len(communicator.calls) for communicator in found.values())
    for line in _lines(path):
        if kept >= MOST_CALLS:
            break
        try:
            record = msgspec.json.decode(line)
            header, perf = record["header"], record.get("coll_perf")
            if perf is None:
                continue
            communicator = found.setdefault(str(header["id"])[:64], _Communicator(int(header["n_ranks"])))
            communicator.calls.append(_call(header, perf))
            kept += 1
        except (msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
            bad += 1
    for name in [name for name, communicator in found.items() if not communicator.calls]:
        del found[name]
    return bad


def _call(header: dict[str, Any], perf: dict[str, Any]) -> _Call:
    return _Call(
        rank=int(header["rank"]),
        number=int(perf["coll_sn"]),
        name=str(perf["coll"])[:64],
        size_bytes=int(perf["coll_msg_size_bytes"]),
        time_us=float(perf["coll_exec_time_us"]),
        bus_gbs=float(perf.get("coll_busbw_gbs", 0.0)),
    )


def _words(communicator: _Communicator) -> str:
    """A communicator in a few words: its most usual collective, and who comes last."""
    calls = communicator.calls
    name, count = Counter(call.name for call in calls).most_common(1)[0]
    own = [call for call in calls if call.name == name]
    size = median(call.size_bytes for call in own)
    time_ms = median(call.time_us for call in own) / 1e3
    bandwidth = median(call.bus_gbs for call in own)
    words = f"{communicator.ranks} ranks, {count} {name} of {size:.0f} bytes: {time_ms:.3g} ms, {bandwidth:.3g} GB/s"
    last = _comes_last(calls, communicator.ranks)
    return f"{words}, {last}" if last else words


def _comes_last(calls: Sequence[_Call], ranks: int) -> str:
    """The rank that comes last to most collectives that all ranks recorded; empty where none stands out."""
    by_number: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
    for call in calls:
        by_number[call.number, call.name][call.rank] = call.time_us
    whole = [times for times in by_number.values() if len(times) == ranks > 1]
    if len(whole) < LEAST_CALLS:
        return ""
    last = Counter(min(times, key=lambda rank: times[rank]) for times in whole)
    rank, count = last.most_common(1)[0]
    if count <= len(whole) / 2:
        return ""
    waits_ms = median(max(times.values()) - min(times.values()) for times in whole) / 1e3
    return f"rank {rank} of it comes last to {count} of {len(whole)} ({waits_ms:.3g} ms after the first)"
