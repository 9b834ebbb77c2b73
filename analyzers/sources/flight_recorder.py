"""Reads dumps of PyTorch's Flight Recorder: what each rank had called and not finished when the job stood still.

One file a rank, pickled (``TORCH_NCCL_DEBUG_INFO_TEMP_FILE``, of builtin types) or as JSON. Entries that are still
pending are in every dump, finished ones as far as the ring buffer goes and the dump was not of active ones only. Names
of sends and receives hold ranks of the group, which are mapped by the group's members.

Source: torch's FlightRecorder.hpp, dump versions 2.0 to 2.10.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from ppdiag.analyzers.sources.plain_pickle import NotPlain, loads
from ppdiag.errors import BadRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from ppdiag.analyzers.sources import Progress

HEAD_BYTES = 4096
MARKS = (b"pg_config", b"collective_seq_id", b"nccl_comm_state")
"""One of these is near the beginning of every dump."""
MOST_BYTES = 256 << 20
"""A full ring buffer of 20000 entries with Python stacks takes some tens of MiB."""
MOST_RANK = 1 << 20
MOST_MEMBERS = 1 << 20
UNKNOWN = -1
MOST_TEXT = 200
LONGEST_NUMBER = 20
TORCH = "torch/distributed/"
"""Part of the files of frames in which no user's call is."""
_RANK_AT_THE_END = re.compile(r"(\d{1,7})$")
_MESSAGE = re.compile(r"(?:\w+:)?(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})")
_BACKEND = re.compile(r"^\w+:")
_END_OF_BATCH = re.compile(r"(?:\w+:)?(?:[A-Z_]+_)?coalesced")
"""Closes a batch of calls, which have entries of their own; ``allreduce_coalesced`` is a call."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: its members as ranks of the job."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of a rank."""

    order: int
    """Counts the calls of the rank."""
    group: Group
    name: str
    """Without the backend; send or recv for a message."""
    sequence: int
    """Of the collective, or of the message, in its group."""
    peer: int
    """Other end of a message, as a rank of the job; ``UNKNOWN`` for a collective."""
    sizes: str
    """Of a pending call; likewise the user's line, where the dump has Python stacks."""
    finished: bool
    called_at: str = ""

    @property
    def is_message(self) -> bool:
        """Whether it goes from one rank to another."""
        return self.name in ("send", "recv")


@dataclass(frozen=True, slots=True)
class Dump:
    """The dump of one rank.

    Attributes:
        called, finished: by the group's name, the number of the last collective or message that the rank has called,
            and finished. Empty before version 2.2.
    """

    rank: int
    entries: tuple[Entry, ...]
    groups: tuple[Group, ...]
    called: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dumps:
    """The dumps of one job, by rank."""

    source: str
    by_rank: dict[int, Dump]
    warnings: tuple[str, ...] = ()


class FlightRecorder:
    """The dumps of one job: its files, or their directory."""

    description = "dumps of PyTorch's Flight Recorder (pickle or JSON, one a rank)"

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        """``ranks``: those of the dumps that do not say theirs, in the order of the files."""
        self.ranks = tuple(ranks)

    def recognises(self, path: Path) -> bool:
        """Whether the path is a dump, or a directory with one."""
        return any(True for _ in _files([path]))

    def read(self, paths: Sequence[Path], progress: Progress | None) -> Dumps:
        """The dumps of one job.

        Raises:
            BadRecord: no file can be read, or two are of one rank.
        """
        files = list(_files(paths))
        found: dict[int, Dump] = {}
        warnings: list[str] = []
        given = iter(self.ranks)
        for done, path in enumerate(files):
            if progress is not None:
                progress("reading dumps", done, len(files))
            try:
                dump = _dump(_load(path), path, given)
            except BadRecord as error:
                warnings.append(str(error))
                continue
            if dump.rank in found:
                raise BadRecord(f"{path}: rank {dump.rank} is in an earlier dump too; name the dumps of one job only")
            found[dump.rank] = dump
        if not found:
            raise BadRecord(warnings[0] if warnings else f"{paths[0]}: holds no dump of Flight Recorder")
        return Dumps(", ".join(map(str, paths)), dict(sorted(found.items())), tuple(warnings))


def _files(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file() and _is_dump(file):
                yield file


def _is_dump(path: Path) -> bool:
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    return (head[:1] == b"\x80" or head.lstrip()[:1] == b"{") and any(mark in head for mark in MARKS)


def _load(path: Path) -> dict[str, Any]:
    """The dump as plain data.

    Raises:
        BadRecord: it is none.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise BadRecord(f"{path}: {size} bytes are more than a dump of Flight Recorder has (at most {MOST_BYTES})")
    data = path.read_bytes()
    try:
        value = loads(data) if data[:1] == b"\x80" else msgspec.json.decode(data)
    except NotPlain as error:
        raise BadRecord(f"{path}: expected a dump of Flight Recorder, but {error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRecord(
            f"{path}: expected a dump of Flight Recorder, but it is cut off or damaged ({error})"
        ) from error
    if not isinstance(value, dict) or not isinstance(value.get("entries", []), (list, tuple)):
        raise BadRecord(f"{path}: expected a dump of Flight Recorder, found other data")
    return value


def _dump(value: dict[str, Any], path: Path, given: Iterator[int]) -> Dump:
    rank = _rank(value, path, given)
    groups = _groups(value.get("pg_config"))
    rows = [row for row in value.get("entries") or () if isinstance(row, dict)]
    entries = [entry for order, row in enumerate(rows) if (entry := _entry(row, order, groups)) is not None]
    entries = sorted(_as_their_batches(entries, rows), key=lambda entry: entry.order)
    called, finished = _status(value.get("pg_status"), rows, groups)
    return Dump(rank, tuple(entries), tuple(groups.values()), called, finished)


def _rank(value: dict[str, Any], path: Path, given: Iterator[int]) -> int:
    """As the dump says it, else the end of the file's name, else the next one that the user gave."""
    named = _RANK_AT_THE_END.search(path.stem)
    said = _number(value.get("rank"), UNKNOWN)
    rank = said if said != UNKNOWN else int(named[1]) if named else next(given, UNKNOWN)
    if not 0 <= rank < MOST_RANK:
        raise BadRecord(
            f"{path}: its rank is not known; name the dump of rank 3 …_3 as torch does, or say it with --rank"
        )
    return rank


def _groups(config: object) -> dict[str, Group]:
    """Groups by name. Their ranks are a list, or a list in a text."""
    found = {}
    for key, row in config.items() if isinstance(config, dict) else ():
        name, ranks, description = str(key), row, ""
        if isinstance(row, dict):
            name, ranks = str(row.get("name", key)), row.get("ranks")
            description = str(row.get("desc", ""))
        found[name] = Group(name[:MOST_TEXT], description[:MOST_TEXT], _members(ranks))
    return found


def _members(ranks: object) -> tuple[int, ...]:
    if isinstance(ranks, str):
        ranks = [int(part) for part in re.findall(r"\d{1,7}", ranks[: 8 * MOST_MEMBERS])]
    members = list(ranks)[:MOST_MEMBERS] if isinstance(ranks, (list, tuple)) else []
    return tuple(rank for rank in members if _number(rank, UNKNOWN) != UNKNOWN and rank < MOST_RANK)


def _entry(row: dict[str, Any], order: int, groups: dict[str, Group]) -> Entry | None:
    """A call; None where it is not as expected, or only closes a batch of calls."""
    name = row.get("profiling_name")
    if not isinstance(name, str) or _END_OF_BATCH.fullmatch(name):
        return None
    group_name, description = _group_names(row)
    group = groups.get(group_name) or Group(group_name[:MOST_TEXT], description[:MOST_TEXT], ())
    message = _MESSAGE.match(name)
    peer, sequence = UNKNOWN, _number(row.get("collective_seq_id", row.get("seq_id")), UNKNOWN)
    if message is not None:
        peer = _of_job(group, int(message[3]))
        sequence = _number(row.get("p2p_seq_id"), sequence)
    finished = _is_finished(row)
    return Entry(
        order=_number(row.get("record_id"), order),
        group=group,
        name=message[1] if message else _BACKEND.sub("", name)[:MOST_TEXT],
        sequence=sequence,
        peer=peer,
        sizes="" if finished else _sizes(row),
        finished=finished,
        called_at="" if finished else _called_at(row.get("frames")),
    )


def _is_finished(row: dict[str, Any]) -> bool:
    return row.get("state") == "completed" or row.get("retired") is True


def _group_names(row: dict[str, Any]) -> tuple[str, str]:
    """Name and description of a call's group."""
    names = row.get("process_group")
    return (str(names[0]), str(names[1])) if isinstance(names, (list, tuple)) and len(names) > 1 else ("", "")


def _as_their_batches(entries: Sequence[Entry], rows: Sequence[dict[str, Any]]) -> Iterator[Entry]:
    """Calls of a batch are as finished as what closes it, of the same number: only that is watched.

    Batches of one group follow each other on one stream: where one has finished, those before have.
    """
    ends: dict[tuple[str, bool], dict[int, bool]] = defaultdict(dict)
    for row in rows:
        if isinstance(row.get("profiling_name"), str) and _END_OF_BATCH.fullmatch(row["profiling_name"]):
            messages = row.get("is_p2p") is True
            number = _number(row.get("p2p_seq_id" if messages else "collective_seq_id"), UNKNOWN)
            ends[_group_names(row)[0], messages][number] = _is_finished(row)
    last = {key: max((n for n, done in numbers.items() if done), default=UNKNOWN) for key, numbers in ends.items()}
    for entry in entries:
        key = (entry.group.name, entry.is_message)
        if entry.sequence in ends.get(key, ()):
            yield replace(entry, finished=entry.finished or entry.sequence <= last[key])
        else:
            yield entry


def _called_at(frames: object) -> str:
    """The innermost frame outside of torch's own, such as ``train.py:12 step``; empty where there is none."""
    for frame in frames[:64] if isinstance(frames, (list, tuple)) else ():
        if isinstance(frame, dict) and isinstance(frame.get("filename"), str) and TORCH not in frame["filename"]:
            return f"{frame['filename']}:{_short(frame.get('line', '?'))} {_short(frame.get('name', ''))}"[:MOST_TEXT]
    return ""


def _of_job(group: Group, member: int) -> int:
    """A rank of a group as one of the job. Without the group's members it is taken as it is."""
    if not group.ranks:
        return member
    return group.ranks[member] if member < len(group.ranks) else UNKNOWN


def _sizes(row: dict[str, Any]) -> str:
    """Shapes and types of the inputs, such as ``4096x5120 BFloat16``."""
    shapes, types = row.get("input_sizes"), row.get("input_dtypes")
    found = []
    for i, shape in enumerate(shapes[:8] if isinstance(shapes, (list, tuple)) else ()):
        numbers = shape[:16] if isinstance(shape, (list, tuple)) else [shape]
        kind = types[i] if isinstance(types, (list, tuple)) and i < len(types) else ""
        found.append(f"{'x'.join(map(str, map(_short, numbers)))} {_short(kind)}".strip())
    return ", ".join(found)[:MOST_TEXT]


def _short(value: object) -> str:
    return str(value)[:40] if isinstance(value, (str, int, float)) else "?"


def _status(
    status: object, rows: Sequence[dict[str, Any]], groups: dict[str, Group]
) -> tuple[dict[str, int], dict[str, int]]:
    """Last called and last finished number of each group, by its name; the dump has them by a number of its own."""
    called: dict[str, int] = {}
    finished: dict[str, int] = {}
    if not isinstance(status, dict):
        return called, finished
    for number, name in _names(status, rows, groups).items():
        row = status.get(number)
        if isinstance(row, dict):
            called[name] = _number(row.get("last_enqueued_collective"), UNKNOWN)
            finished[name] = _number(row.get("last_completed_collective"), UNKNOWN)
    return called, finished


def _names(status: dict[Any, Any], rows: Sequence[dict[str, Any]], groups: dict[str, Group]) -> dict[Any, str]:
    """The name of each group by its number in this dump: as entries say; else both count in the order of creation."""
    said = {}
    for row in rows:
        names = row.get("process_group")
        if isinstance(names, (list, tuple)) and names and isinstance(row.get("pg_id"), (int, str)):
            said[str(row["pg_id"])] = str(names[0])
    keys = {str(key): key for key in status if isinstance(key, (int, str))}
    named = [name for name in groups if name.isdecimal()]
    if len(named) == len(groups) == len(keys) and all(key.isdecimal() for key in keys):
        ordered = dict(zip(sorted(keys, key=int), sorted(named, key=int), strict=True))
        if all(ordered.get(key, name) == name for key, name in said.items()):
            return {keys[key]: name for key, name in ordered.items()}
    return {keys[key]: name for key, name in said.items() if key in keys}


def _number(value: object, default: int) -> int:
    """A whole number from 0 to 2**62, else the default. JSON dumps have some numbers as texts."""
    if isinstance(value, str) and len(value) < LONGEST_NUMBER and value.isdecimal() and value.isascii():
        value = int(value)
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
    return int(value) if good and isinstance(value, int) else default
