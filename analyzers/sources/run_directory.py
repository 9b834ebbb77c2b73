"""Reads the run directory that ppdiag's own hooks wrote."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.analyzers import clock
from ppdiag.analyzers.nccl.digest import digest_of
from ppdiag.analyzers.nccl.reader import own_logs, read_logs, recorded_ranks
from ppdiag.analyzers.nccl.transports import transports_of
from ppdiag.analyzers.sources import rank_state
from ppdiag.analyzers.sources.device_words import DeviceWords, move_posts
from ppdiag.analyzers.sources.layer_spans import LayerNames, facts_of, without_layers
from ppdiag.analyzers.sources.run_files import FileBytes, damage, latest_files, read_lines
from ppdiag.analyzers.validation import MOST_RANKS, plausible, whole, whole_or_none
from ppdiag.errors import BadRecord, BadShape, NotARun, NothingRecorded, VersionMismatch
from ppdiag.model import FORMAT_VERSION
from ppdiag.rundir import (
    MAX_HEADER_BYTES,
    PROCESSES_FILE,
    RUN_FILE,
    SPAN_MAGIC,
    decode_blocks,
    parse_rank_file_name,
    read_run_file,
)
from ppdiag.stated import StatedLayout
from ppdiag.trace import SPAN_DTYPE, JobFacts, ProcessGroup, RankFacts, Trace, fact_names, sorted_spans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ppdiag.analyzers.nccl.model import NcclReport
    from ppdiag.analyzers.sources import Progress

MOST_GROUPS = 1 << 15
"""A span names its group in 16 bits."""
PROBE = ("t0", "t1", "t2", "t3")
LAUNCH = "launch_lead_ms"
"""The one field that is no integer, and that not every record has."""
NUMBERS = ("world_size", "microbatches", "pp", "vpp", "tp", "dp")
"""Facts of the job that are whole numbers; the others are words."""


class RunDirectory:
    """One or more run directories of the same job (several where machines share no file system)."""

    description = "run directories of `ppdiag run`"

    def recognises(self, path: Path) -> bool:
        """Whether the path is a directory with at least one file that only a run has."""
        if not path.is_dir():
            return False
        return any(
            entry.name in (RUN_FILE, PROCESSES_FILE) or parse_rank_file_name(entry.name) for entry in path.iterdir()
        )

    def read(self, paths: Sequence[Path], progress: Progress | None) -> Trace:
        """Reads every rank that left a record; what cannot be read is named in the warnings.

        Raises:
            NothingRecorded: no rank left a record.
            BadRecord, VersionMismatch: no rank's record could be read.
        """
        files, warnings = latest_files(paths)
        warnings += [line for path in paths for line in damage(path)]
        if not files:
            raise NothingRecorded(f"{', '.join(map(str, paths))}: no rank ever wrote a record into this run directory")
        ranks, failures = [], []
        for done, (rank, path) in enumerate(sorted(files.items())):
            if progress is not None:
                progress("reading ranks", done, len(files))
            try:
                ranks.append(_read_rank(rank, path))
            except (BadRecord, VersionMismatch) as error:
                failures.append(error)
        if not ranks:
            raise failures[0]
        ranks, mixed = _of_the_newest_job(ranks)
        warnings += [*mixed, *map(str, failures)]
        ended = {rank_state.ended_host(path) for path in paths}
        trace = _assemble(ranks, source=", ".join(map(str, paths)), ended=ended, warnings=warnings)
        trace = _with_stated_layout(trace, paths)
        report = _nccl_report(paths)
        return replace(trace, transports=transports_of(report), nccl=digest_of(report)) if report else trace


def _with_stated_layout(trace: Trace, paths: Sequence[Path]) -> Trace:
    """The trace with the layout that was stated when the job was started, where it is one of so many ranks."""
    stated = (StatedLayout.of_record(read_run_file(path).get("layout")) for path in paths)
    layout = next(filter(None, stated), None)
    if layout is None:
        return trace
    try:
        layout.pipelines(trace.job.world_size or len(trace.ranks))
    except BadShape as error:
        warning = f"{RUN_FILE}: the layout that was stated for this job is not used: {error}"
        return replace(trace, warnings=(*trace.warnings, warning))
    return replace(trace, layout=layout)


def _of_the_newest_job(ranks: list[_Rank]) -> tuple[list[_Rank], list[str]]:
    """The ranks that belong with the one that began last: an earlier job may have left more ranks in the directory."""
    newest = max(ranks, key=lambda rank: whole_or_none(rank.header, "started_unix_ns") or 0)
    size = whole_or_none(newest.header, "world_size")
    kept = [rank for rank in ranks if size is None or whole_or_none(rank.header, "world_size") in (None, size)]
    others = len(ranks) - len(kept)
    warning = f"{others} ranks of a job of another size in this directory were left out; give each job its own"
    return kept, [warning] if others else []


def _nccl_report(paths: Sequence[Path]) -> NcclReport | None:
    """What the logs of NCCL in the run directories say; None where there are none."""
    logs = [log for path in paths for log in own_logs(path)]
    if not logs:
        return None
    ranks, world_size = recorded_ranks(paths)
    try:
        return read_logs(logs, ranks=ranks or {}, world_size=world_size)
    except (BadRecord, NotARun):
        return None


class _Rank:
    """What one rank's files say."""

    def __init__(self, rank: int, header: dict[str, Any], spans: np.ndarray) -> None:
        self.rank = rank
        self.header = header
        self.spans = spans
        self.facts: dict[str, Any] = {}
        self.groups: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.faults: list[str] = []
        self.probes: list[dict[str, Any]] = []
        self.blocks: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.device = DeviceWords()
        self.layer_names = LayerNames()
        self.layers: list[dict[str, Any]] = []
        self.state = rank_state.UNKNOWN


def _read_rank(rank: int, path: Path) -> _Rank:
    with path.open("rb") as stream:
        data = FileBytes(stream)
        header, offset = _read_header(data, path)
        spans, lost = _read_spans(data, offset, rank, np.dtype([(name, kind) for name, kind in header["fields"]]))
    kept = plausible(spans)
    spans, layers = without_layers(spans if kept.all() else spans[kept])
    found = _Rank(rank, header, spans)
    move_posts(found.spans)
    if not kept.all():
        found.warnings.append(f"{path.name}: {int((~kept).sum())} spans with impossible values were left out")
    if lost:
        found.warnings.append(f"{path.name}: {lost} bytes of torn or damaged records were left out")
    _read_words(path.with_suffix(".jsonl"), found)
    if not found.groups and (found.spans["group"] >= 0).any():
        name = path.with_suffix(".jsonl").name  # empty where the disk was full when the rank began
        found.warnings.append(f"{name}: names no group of rank {rank}, so that its messages have no other end")
    found.layers = facts_of(found.spans, layers, found.layer_names.names) if len(layers) else []
    if found.layer_names.names and not found.layers:
        found.warnings.append(
            f"rank {rank}: no call of its layers was seen, and they have no times (is the stage compiled as a whole?)"
        )
    found.state = rank_state.read(path.with_suffix(".state"))
    if found.state is rank_state.UNKNOWN:  # not equal to it, as the state of a rank that has only just begun is
        name = path.with_suffix(".state").name
        found.warnings.append(f"{name}: missing or damaged, so that it is unknown how rank {rank} ended")
    return found


def _read_spans(data: FileBytes, offset: int, rank: int, dtype: np.dtype[Any]) -> tuple[np.ndarray, int]:
    """The spans of a file, and how many bytes of it are lost; no more is held than the spans and one block."""
    spans = np.zeros((len(data) - offset) // dtype.itemsize, SPAN_DTYPE)
    count = lost = 0
    for payload, lost_bytes in decode_blocks(data, offset, dtype.itemsize):
        lost += lost_bytes
        records = np.frombuffer(payload, dtype)
        _fill(spans[count : count + len(records)], records, rank)
        count += len(records)
    return spans[:count], lost


def _read_header(data: FileBytes, path: Path) -> tuple[dict[str, Any], int]:
    head = data[: len(SPAN_MAGIC) + MAX_HEADER_BYTES]
    if not head.startswith(SPAN_MAGIC):
        raise BadRecord(f"{path}: expected a span file of ppdiag, found other bytes at its beginning")
    end = head.find(b"\n", len(SPAN_MAGIC))
    try:
        header = json.loads(head[len(SPAN_MAGIC) : end]) if end > 0 else None
        version = header["version"] if header else None
    except (ValueError, KeyError, TypeError, RecursionError):
        header, version = None, None
    if header is None:
        raise BadRecord(f"{path}: its header is damaged or cut off, so that its records cannot be read")
    if version != FORMAT_VERSION:
        raise VersionMismatch(
            f"{path}: written in format {version!r}, and this ppdiag reads format {FORMAT_VERSION}; "
            "use the version of ppdiag that recorded it"
        )
    if not _fields_are_known(header.get("fields")):
        raise BadRecord(f"{path}: its header does not describe the fields of a span")
    return header, end + 1


def _fields_are_known(described: object) -> bool:
    """Whether the header lists names and plain integer types, with all that a trace needs among them."""
    try:
        dtype = np.dtype([(str(name), str(kind)) for name, kind in described])  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False
    wanted = set(SPAN_DTYPE.names or ()) - {"rank", "launch_ns"}
    integers = all(dtype[name].kind in "iu" or (name == LAUNCH and dtype[name] == "<f2") for name in dtype.names or ())
    return wanted <= set(dtype.names or ()) and integers and dtype.itemsize <= 1024


def _fill(spans: np.ndarray, records: np.ndarray, rank: int) -> None:
    spans["rank"] = rank
    for name in records.dtype.names or ():
        if name in (SPAN_DTYPE.names or ()):
            spans[name] = records[name]
    spans["launch_ns"] = spans["start_ns"]
    if LAUNCH in (records.dtype.names or ()):
        lead_ns = 1e6 * np.nan_to_num(records[LAUNCH].astype(np.float64), posinf=0.0, neginf=0.0)
        spans["launch_ns"] -= np.rint(lead_ns).astype(np.int64)


def _read_words(path: Path, found: _Rank) -> None:
    if not path.is_file():
        found.warnings.append(
            f"{path.name}: missing, so that facts and process groups of rank {found.rank} are unknown"
        )
        return
    words, damaged = read_lines(path)
    found.warnings += damaged
    wrong = 0
    for word in words:
        try:
            _take_word(word, found)
        except (ValueError, KeyError, TypeError):
            wrong += 1
    if wrong:
        found.warnings.append(f"{path.name}: {wrong} lines with missing or impossible values were left out")


def _take_word(word: dict[str, Any], found: _Rank) -> None:
    match word["type"]:
        case "fact":
            found.facts[str(word["name"])] = word["value"]
        case "group":
            members = tuple(whole(rank, high=MOST_RANKS) for rank in word["ranks"])
            found.groups[whole(word["id"], high=MOST_GROUPS)] = (str(word["name"]), members)
        case "clock":
            found.probes.append({name: whole(word[name]) for name in PROBE} | {"burst": whole(word.get("burst", 0))})
        case "memory":
            found.device.take_memory(word)
        case "sample":
            found.device.take_sample(word)
        case "layers":
            found.layer_names.take(word)
        case "block":
            numbers = {name: whole(word[name]) for name in ("first", "steps", "wall_ns")}
            found.blocks.append({"probed": bool(word["probed"]), **numbers})
        case "fault":
            found.faults.append(f"{word.get('probe', 'probe')}: {word.get('error', '')}")


def _assemble(ranks: list[_Rank], *, source: str, ended: set[str | None], warnings: list[str]) -> Trace:
    groups = _Groups()
    for rank in ranks:
        rank.spans["group"] = groups.translate(rank)
    facts = {rank.rank: _rank_facts(rank, ended=ended) for rank in ranks}
    spans = [rank.spans for rank in ranks]
    clocks = clock.align(facts)
    for part, rank in zip(spans, ranks, strict=True):
        clocks.apply(part, rank.rank)
    job = _job_facts(ranks, source)
    warnings = [*warnings, *_missing_ranks(job, facts), *clocks.warnings]
    for rank in ranks:
        warnings += [*rank.warnings, *rank.device.warnings(rank.rank)]
        if untimed := whole_or_none(rank.facts, "untimed_on_device", low=1):
            warnings.append(
                f"rank {rank.rank}: {untimed} moments could not be timed on its device (in the capture of a CUDA "
                "graph, on another device, or with too many pending); those ops have the host's times"
            )
        warnings += [f"rank {rank.rank}: a probe of ppdiag turned itself off: {fault}" for fault in rank.faults]
    return Trace(
        spans=sorted_spans(np.concatenate(spans)),
        job=job,
        ranks=facts,
        groups=tuple(groups.all),
        clock_error_s=clocks.error_s + _device_clock_error_s(ranks),
        warnings=tuple(warnings),
    )


def _device_clock_error_s(ranks: Sequence[_Rank]) -> float:
    """How far the devices' times may be off their hosts' clocks; 0 where nothing was timed on a device."""
    return max((whole_or_none(rank.facts, "device_clock_error_ns") or 0 for rank in ranks), default=0) / 1e9


class _Groups:
    """Process groups of all ranks under one numbering.

    Names of groups may differ between ranks, so that a group is known by its members, and by which one it is among
    those with the same members.
    """

    def __init__(self) -> None:
        self.all: list[ProcessGroup] = []
        self._index: dict[tuple[tuple[int, ...], int], int] = {}

    def translate(self, rank: _Rank) -> np.ndarray:
        """The rank's ``group`` column in the common numbering; -1 where its table does not have the group."""
        seen: Counter[tuple[int, ...]] = Counter()
        mapping = np.full(max(rank.groups, default=0) + 2, -1, np.int32)
        for local, (name, members) in sorted(rank.groups.items()):
            key = (members, seen[members])
            seen[members] += 1
            if key not in self._index:
                self._index[key] = len(self.all)
                self.all.append(ProcessGroup(name, members))
            mapping[local] = self._index[key]
        column = rank.spans["group"]
        return mapping[np.where((column >= 0) & (column < len(mapping)), column, len(mapping) - 1)]


def _rank_facts(rank: _Rank, *, ended: set[str | None]) -> RankFacts:
    last_span = int(rank.spans["end_ns"].max()) if len(rank.spans) else 0
    return RankFacts(
        rank=rank.rank,
        host=str(rank.header.get("host", "")),
        clock=str(rank.header.get("clock", "")),
        facts={**rank.header, **rank.facts, **rank.device.facts(), "blocks": tuple(rank.blocks), "layers": rank.layers},
        clock_probes=tuple(rank.probes),
        status=rank_state.settle(
            rank.state,
            raised=str(rank.facts.get("raised", "")),
            ended=str(rank.header.get("host", "")) in ended,
            clock=str(rank.header.get("clock", "")),
            pid=whole_or_none(rank.header, "pid") or 0,
        ),
        inside=rank.state.inside,
        inside_s=rank.state.inside_s,
        waiting=rank.state.waiting,
        last_seen_ns=max(last_span, rank.state.heartbeat_ns),
        faults=tuple(rank.faults),
    )


def _job_facts(ranks: list[_Rank], source: str) -> JobFacts:
    """Facts on which the ranks agree; the most frequent value where they do not."""
    known: dict[str, Any] = {}
    for name in fact_names():
        told = [_told(rank, name) for rank in ranks]
        values: Mapping[Any, int] = Counter(value for value in told if value is not None)
        if values:
            known[name] = max(values, key=lambda value: values[value])
    return JobFacts(**{**known, "source": source})


def _told(rank: _Rank, name: str) -> str | int | None:
    """A fact of the job as one rank tells it; None where it tells nothing of the right type."""
    facts = {**rank.header, **rank.facts}
    if name in NUMBERS:
        return whole_or_none(facts, name, low=1, high=MOST_RANKS)
    value = facts.get(name)
    return value if isinstance(value, str) else None


def _missing_ranks(job: JobFacts, facts: Mapping[int, RankFacts]) -> list[str]:
    missing = sorted(set(range(job.world_size or 0)) - set(facts))
    if not missing:
        return []
    named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return [f"no record of {len(missing)} of {job.world_size} ranks ({named}); what they did is unknown"]
