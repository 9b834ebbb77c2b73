"""Reads what NCCL's Inspector writes: one JSON object a collective or message, with its bytes, time and bandwidth.

There are no ops of a pipeline in it, so that idle time cannot be split. What it does say: how fast each communicator's
collectives and messages are, and which rank comes last to collectives. All ranks leave a collective together, so that
the one that spends the least time in it has come last.

Source: ext-profiler/inspector (README.md, json.cc) of NVIDIA/nccl, output format v4.0 and later. Newer versions write
the communicator once, in a record of its own (``dump_stats``), for all records that follow.
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
MOST_NUMBER = 1 << 62
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


Link = tuple[int, int]
"""Ranks of sender and receiver within their communicator."""


@dataclass(slots=True)
class _Communicator:
    """``messages``: (time in us, bytes) of each message by its link and the end that recorded it."""

    ranks: int
    calls: list[_Call] = field(default_factory=list)
    messages: dict[tuple[Link, str], list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))


@dataclass(slots=True)
class _Found:
    """What all files hold; ``bad`` lines are no records, ``dropped`` calls were not written by the Inspector."""

    communicators: dict[str, _Communicator] = field(default_factory=dict)
    kept: int = 0
    bad: int = 0
    dropped: int = 0


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
        found = _Found()
        for done, path in enumerate(files):
            if progress is not None:
                progress("reading files", done, len(files))
            _read(path, found)
        source = ", ".join(map(str, paths[:LISTED]))
        rows = [row for row in found.communicators.values() if row.calls or row.messages]
        if not rows:
            raise BadRecord(f"{source}: expected records of NCCL's Inspector, and none of {found.bad} lines is one")
        rows.sort(key=lambda row: -len(row.calls))
        said = [_words(row) for row in rows[:LISTED]]
        said += [f"{len(rows) - LISTED} more communicators"] if len(rows) > LISTED else []
        said += [f"{found.bad} lines were left out: cut off or no records"] if found.bad else []
        said += [f"{found.dropped} calls were dropped by the Inspector itself"] if found.dropped else []
        raise NoPipelineFound(
            f"{source}: NCCL's Inspector records collectives and messages and no ops of a pipeline, so that idle time "
            f"cannot be split by cause; found {'; '.join(said)}"
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


def _read(path: Path, found: _Found) -> None:
    """Takes the records of a file."""
    marker: Any = None  # the header that records without one inherit
    for line in _lines(path):
        if found.kept >= MOST_CALLS:
            break
        try:
            record = msgspec.json.decode(line)
            header = record.get("header", marker)
            if "dump_stats" in record:
                marker = header
                found.dropped += sum(_dropped(record["dump_stats"]))
            _take(record, header, found)
        except (msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
            found.bad += 1
            marker = None  # it may have been one


def _dropped(stats: dict[str, Any]) -> Iterator[int]:
    for kind in ("coll", "p2p"):
        yield _whole(stats.get(f"{kind}_dropped_since_last_dump", 0))


def _take(record: dict[str, Any], header: dict[str, Any], found: _Found) -> None:
    """Keeps a collective or a message; records of other kinds are passed over."""
    collective, message = record.get("coll_perf"), record.get("p2p_perf")
    if collective is None and message is None:
        return
    name = str(header["id"])[:64]
    communicator = found.communicators.get(name) or _Communicator(_whole(header["n_ranks"]))
    if collective is not None:
        communicator.calls.append(_call(header, collective))
    if message is not None:
        link, end = _link(header, message)
        times = float(message["p2p_exec_time_us"]), _whole(message["p2p_msg_size_bytes"])
        communicator.messages[link, end].append(times)
    found.communicators[name] = communicator
    found.kept += 1


def _whole(value: Any) -> int:  # noqa: ANN401  (whatever a line holds)
    number = int(value)
    if not 0 <= number <= MOST_NUMBER:
        raise ValueError
    return number


def _link(header: dict[str, Any], message: dict[str, Any]) -> tuple[Link, str]:
    own, peer, end = _whole(header["rank"]), _whole(message["p2p_peer"]), str(message["p2p"])
    if end not in ("Send", "Recv"):
        raise ValueError
    return ((own, peer) if end == "Send" else (peer, own)), end


def _call(header: dict[str, Any], perf: dict[str, Any]) -> _Call:
    return _Call(
        rank=_whole(header["rank"]),
        number=_whole(perf["coll_sn"]),
        name=str(perf["coll"])[:64],
        size_bytes=_whole(perf["coll_msg_size_bytes"]),
        time_us=float(perf["coll_exec_time_us"]),
        bus_gbs=float(perf.get("coll_busbw_gbs", 0.0)),
    )


def _words(communicator: _Communicator) -> str:
    """A communicator in a few words: its most usual collective and who comes last to it, its slowest link."""
    words = [f"{communicator.ranks} ranks"]
    if communicator.calls:
        words += [_usual(communicator.calls), _comes_last(communicator.calls, communicator.ranks)]
    if communicator.messages:
        words.append(_slowest(communicator.messages))
    return ", ".join(word for word in words if word)


def _usual(calls: Sequence[_Call]) -> str:
    name, count = Counter(call.name for call in calls).most_common(1)[0]
    own = [call for call in calls if call.name == name]
    size = median(call.size_bytes for call in own)
    time_ms = median(call.time_us for call in own) / 1e3
    return f"{count} {name} of {size:.0f} bytes: {time_ms:.3g} ms, {median(call.bus_gbs for call in own):.3g} GB/s"


def _slowest(messages: dict[tuple[Link, str], list[tuple[float, int]]]) -> str:
    """The slowest link. Either end waits for the other too: the shorter of their median times is the message's."""
    times_us: dict[Link, float] = {}
    for (link, _), rows in messages.items():
        own = median(time for time, _ in rows)
        times_us[link] = min(own, times_us.get(link, own))
    link = max(times_us, key=lambda link: times_us[link])
    size = median(size for (other, _), rows in messages.items() if other == link for _, size in rows)
    return (
        f"messages on {len(times_us)} links, slowest from rank {link[0]} to {link[1]} of it: {size:.0f} bytes in "
        f"{times_us[link] / 1e3:.3g} ms"
    )


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
