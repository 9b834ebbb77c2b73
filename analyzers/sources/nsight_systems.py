"""Reads exports of Nsight Systems (``nsys export --type sqlite``): one file of all ranks of a machine, or one a rank.

Each process with kernels is a rank. Ops are NVTX ranges that frameworks, torch's ``emit_nvtx`` or ppdiag's own hooks
write, projected on the device, else what was launched between messages; messages are NCCL's kernels, with what NCCL's
NVTX ranges say of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.sources.device_ops import NEVER_LAUNCHED, Kernels, Range, RankOps, project, spans_of
from ppdiag.analyzers.sources.host_clocks import agree
from ppdiag.analyzers.sources.labels import NO_OPS, best_detail, detail, ops_named
from ppdiag.analyzers.sources.missing_ranks import missing_ranks
from ppdiag.analyzers.sources.nsight_database import MAGIC, MISSING, Database
from ppdiag.analyzers.sources.nsight_host import synchronising_calls, with_calls
from ppdiag.analyzers.sources.nsight_nccl import CALLS, INITS, layouts, payload_of
from ppdiag.analyzers.sources.nsight_ops import Call, Groups, Process, messages_of, ops_between_messages
from ppdiag.errors import BadRecord, NoPipelineFound
from ppdiag.model import NONE, Kind
from ppdiag.trace import JobFacts, ProcessGroup, RankFacts, Trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ppdiag.analyzers.sources import Progress

KERNELS, RUNTIME, RANGES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
RANGE_TYPES = "59,60,70,71"
"""Push/pop and start/end ranges, the last two imported from text files."""
REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")
PID_SHIFT = 24
"""A global id holds the process above these bits; those below are the thread's number."""
MOST_NS = 1 << 61
MOST_RANGES = 4_000_000
"""Of one file, of ops and of NCCL's calls: more than a day's recording that anybody keeps."""
LISTED = 8
EPOCH_NS = 10**18
"""Times beyond it count from 1970 (exports with ``--ts-normalize=true``); else from the begin of the recording."""
_COMMUNICATION = re.compile(r"(?:void )?(?:nccl|rccl|msccl)", re.IGNORECASE)
_RANK_IN_NAME = re.compile(r"rank[^0-9]?(\d{1,6})")


class NsightSystems:
    """The exports of one job, or a directory of these."""

    description = "exports of Nsight Systems (.sqlite)"

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        """``ranks``: of the processes, in the order of files, devices and processes, where nothing else says them."""
        self.ranks = tuple(ranks)

    def recognises(self, path: Path) -> bool:
        """Whether the path is an export, or a report that has to be exported first, or a directory with one."""
        files = _files([path])
        return bool(files) and (_is_report(files[0]) or _is_export(files[0]))

    def read(self, paths: Sequence[Path], progress: Progress | None) -> Trace:
        """The trace of one job.

        Raises:
            BadRecord: a file is no export.
            NoPipelineFound: no range names an op of a pipeline.
        """
        files = [path for path in _files(paths) if not _is_report(path)]
        reports = [path for path in _files(paths) if _is_report(path)]
        if not files:
            names = " ".join(str(path) for path in reports[:LISTED])
            raise BadRecord(
                f"{reports[0]}: a report of Nsight Systems, which only nsys can read; export it, and analyze what it "
                f"writes: nsys export --type sqlite --include-blobs=true {names}"
            )
        found = _Found(given=self.ranks)
        for done, path in enumerate(files):
            if progress is not None:
                progress("reading files", done, len(files))
            found.processes += _read_file(path, found)
        exported = {path.stem for path in files}
        found.warnings += [f"{path.name}: not exported, left out" for path in reports if path.stem not in exported]
        return _trace(found, source=", ".join(map(str, paths)))


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.sqlite")) + sorted(path.glob("*.nsys-rep")) if path.is_dir() else [path]
        found += [file for file in inside if _is_report(file) or _is_export(file)]
    return found


def _is_report(path: Path) -> bool:
    return path.suffix in REPORTS and path.is_file()


def _is_export(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


@dataclass(slots=True)
class _Found:
    given: tuple[int, ...] = ()
    processes: list[Process] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    hosts: set[tuple[str, int]] = field(default_factory=set)
    """Host and begin of each recording: each has a clock of its own."""


def _read_file(path: Path, found: _Found) -> list[Process]:
    """The processes of a file that launched kernels, their times from 1970 where the file knows them."""
    database = Database(path)
    try:
        if not database.has(KERNELS) and not database.has(RANGES):
            raise BadRecord(
                f"{path}: expected an export of Nsight Systems with kernels, and found no table {KERNELS}; record with "
                "nsys profile --trace=cuda,nvtx"
            )
        shift, host = _zero(database)
        processes = _kernels(database, path, shift)
        calls = synchronising_calls(database)
        for process in processes.values():
            process.host = host
            process.synchronising = calls.get(process.number, process.synchronising) + shift
        _read_ranges(database, processes, shift)
        found.hosts.add((host, shift))
        found.warnings += [f"{path.name}: of the table {table} only the first rows were read" for table in database.cut]
        return list(processes.values())
    finally:
        database.close()


def _zero(database: Database) -> tuple[int, str]:
    """When the recording began (ns from 1970; 0 where it is not known or its times contain it), and on what host."""
    begin = 0
    for (value,) in database.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
        begin = value if isinstance(value, int) and 0 < value < MOST_NS else begin
    first = database.numbers(KERNELS, ["start"])["start"][:1]
    host = ""
    for name, value in database.rows("TARGET_INFO_SYSTEM_ENV", ("name", "value"), "\"name\" = 'Hostname'"):
        host = str(value) if name == "Hostname" else host
    return (0 if len(first) and first[0] > EPOCH_NS else begin), host


def _kernels(database: Database, path: Path, shift: int) -> dict[int, Process]:
    """Each process's kernels, by its number."""
    columns = ["start", "end", "globalPid", "correlationId", "deviceId", "shortName", "demangledName"]
    rows = np.concatenate([database.numbers(KERNELS, columns), database.numbers(GRAPHS, columns)])
    rows = rows[(rows["start"] >= 0) & (rows["end"] >= rows["start"]) & (rows["end"] < MOST_NS - max(shift, 0))]
    rows = rows[np.lexsort((rows["end"], rows["start"]))]
    name_ids = np.where(rows["shortName"] >= 0, rows["shortName"], rows["demangledName"])
    texts = database.texts(np.unique(name_ids))
    communicating = [i for i, text in texts.items() if _COMMUNICATION.match(text)]
    launch, thread = _launches(database, rows)
    process = rows["globalPid"] >> PID_SHIFT
    found = {}
    for number in np.unique(process).tolist():
        own = process == number
        communicates = np.isin(name_ids[own], communicating)
        launch_ns = np.where(launch[own] == NEVER_LAUNCHED, NEVER_LAUNCHED, launch[own] + shift)
        times = rows["start"][own] + shift, rows["end"][own] + shift
        kernels = Kernels(*times, launch_ns, communicates, thread[own])
        names = [texts[i] for i in name_ids[own][communicates].tolist()]
        found[number] = Process(path, number, int(rows["deviceId"][own].min()), kernels, names)
    return found


def _launches(database: Database, kernels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When and on which thread the host launched each kernel: the call with its correlation, of its process."""
    calls = database.numbers(RUNTIME, ["start", "globalTid", "correlationId"])
    launch = np.full(len(kernels), NEVER_LAUNCHED, np.int64)
    thread = np.full(len(kernels), MISSING, np.int64)
    if not len(calls) or not len(kernels):
        return launch, thread
    known = database.has_column(KERNELS, "globalPid")
    key = np.stack([(calls["globalTid"] >> PID_SHIFT) * known, calls["correlationId"]])
    order = np.lexsort(key[::-1])
    keys = key[:, order]
    packed, wanted = _pack(keys, np.stack([(kernels["globalPid"] >> PID_SHIFT) * known, kernels["correlationId"]]))
    at = np.minimum(np.searchsorted(packed, wanted), len(packed) - 1)
    hit = packed[at] == wanted
    launch[hit], thread[hit] = calls["start"][order][at[hit]], calls["globalTid"][order][at[hit]]
    return launch, thread


def _pack(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (2 x n) as single numbers, of equal order."""
    first = np.unique(np.concatenate([keys[0], wanted[0]]))
    second = np.unique(np.concatenate([keys[1], wanted[1]]))

    def number(pairs: np.ndarray) -> np.ndarray:
        return np.searchsorted(first, pairs[0]) * len(second) + np.searchsorted(second, pairs[1])

    return number(keys), number(wanted)


def _read_ranges(database: Database, processes: dict[int, Process], shift: int) -> None:
    """The ranges that name ops of a pipeline, and the calls of NCCL, of each process."""
    ids = np.unique(database.numbers(RANGES, ["textId"])["textId"]).tolist()
    texts = database.texts(ids)
    layout = layouts(database)
    last = max((int(p.kernels.end_ns.max()) for p in processes.values() if len(p.kernels.end_ns)), default=0)
    kept = 0
    columns = ("start", "end", "text", "textId", "globalTid", "binaryData", "jsonText")
    where = f'"eventType" IN ({RANGE_TYPES})'
    if database.has_column(RANGES, "text"):
        where += ' AND ("text" IS NULL OR "text" NOT GLOB \'aten::*\')'  # nearly all of them under emit_nvtx
    for start, end, text, text_id, thread, blob, json_text in database.rows(RANGES, columns, where):
        name = text if isinstance(text, str) else texts.get(text_id, "") if isinstance(text_id, int) else ""
        if not name or not isinstance(start, int) or not isinstance(thread, int) or not 0 <= start < MOST_NS:
            continue
        if kept >= MOST_RANGES:
            database.cut.append(RANGES)
            break
        process = processes.get(thread >> PID_SHIFT) or (processes.get(MISSING) if len(processes) == 1 else None)
        if process is None:
            continue
        if name in CALLS or name in INITS:
            kept += 1
            process.calls.append(Call(name, start + shift, thread, payload_of(blob, json_text, layout)))
            continue
        labels = ops_named(name)
        closed = end + shift if isinstance(end, int) and start <= end < MOST_NS else last
        for label in labels:
            kept += 1
            process.ranges.append(Range(label, start + shift, closed, thread if len(labels) > 1 else None))


def _trace(found: _Found, source: str) -> Trace:
    processes = [process for process in found.processes if len(process.kernels.start_ns)]
    if not processes:
        raise NoPipelineFound(
            f"{source}: no kernel of a GPU is in this recording; record with nsys profile --trace=cuda,nvtx"
        )
    ranks = _number_ranks(processes, found)
    groups = Groups(ranks)
    parts = _rank_ops(ranks, groups, found)
    if not any(op.kind is Kind.FORWARD for part in parts for op in part.ops):
        raise NoPipelineFound(_no_ops(ranks, source))
    found.warnings += _warnings(parts)
    spans = with_calls(spans_of(parts), {rank: process.synchronising for rank, process in ranks.items()})
    clocks = agree(spans, {rank: process.host or str(process.path) for rank, process in ranks.items()})
    found.warnings += missing_ranks(ranks, max((i.ranks for p in ranks.values() for i in p.inits()), default=0), spans)
    several = len(found.hosts) > 1
    if several and len(clocks.shift_ns) > 1:
        found.warnings.append(f"{clocks}; each counts from the time of day at the begin of its recording")
    return Trace(
        spans=spans,
        job=JobFacts(source=source, world_size=len(ranks)),
        ranks={rank: RankFacts(rank, host=process.host, clock=process.host) for rank, process in ranks.items()},
        groups=tuple(groups.groups) or (ProcessGroup("pipeline", tuple(sorted(ranks))),),
        clock_error_s=clocks.error_s if several else 0.0,
        warnings=tuple(found.warnings),
    )


def _rank_ops(ranks: dict[int, Process], groups: Groups, found: _Found) -> list[RankOps]:
    """Ops and messages of each rank: by the names of ranges, else by what lies between the messages."""
    best = best_detail(part.label for process in ranks.values() for part in process.ranges)
    parts, empty = [], 0
    for rank, process in sorted(ranks.items()):
        messages = messages_of(rank, process, groups)
        named = [part for part in process.ranges if part.label.kind is Kind.OPTIMIZER or detail(part.label) == best]
        ops, without = project(named, process.kernels)
        if best == NO_OPS and any(message.kind is not Kind.COLLECTIVE for message in messages):
            ops = sorted([*ops, *ops_between_messages(process)], key=lambda op: (op.start_ns, op.end_ns))
        empty += without
        parts.append(RankOps(rank, process.kernels, ops, messages))
    if empty:
        found.warnings.append(f"{empty} ranges of ops launched no kernel, and were left out")
    if best == NO_OPS:
        found.warnings.append(
            "no NVTX range names an op: forwards and backwards are what was launched between messages"
        )
    return parts


def _number_ranks(processes: Sequence[Process], found: _Found) -> dict[int, Process]:
    """Each process by its rank: as NCCL's largest communicator numbers it, else the file's name, else its place."""
    largest = max((init.ranks for process in processes for init in process.inits()), default=0)
    said = [next((i.rank for i in process.inits() if i.ranks == largest), None) for process in processes]
    named = [_RANK_IN_NAME.search(process.path.stem) for process in processes]
    by_name = [None if name is None else int(name[1]) for name in named]
    for numbers in (said, by_name):
        if None not in numbers and len(set(numbers)) == len(numbers):
            return {
                int(number): process for number, process in zip(numbers, processes, strict=True) if number is not None
            }
    files = sorted({process.path for process in processes})
    ordered = sorted(processes, key=lambda p: (files.index(p.path), p.device, p.number))
    if len(found.given) == len(set(found.given)) == len(ordered):
        return dict(zip(found.given, ordered, strict=True))
    if len(processes) > 1:
        found.warnings.append(
            "ranks are numbered by file, device and process: neither NCCL nor the files' names say them "
            "(write one file a rank: nsys profile -o 'rank%q{RANK}'; or say them with --rank)"
        )
    return dict(enumerate(ordered))


def _no_ops(ranks: dict[int, Process], source: str) -> str:
    """What a recording without a pipeline does say."""
    rows = []
    for rank, process in sorted(ranks.items())[:LISTED]:
        busy, communicated, total = process.kernels.busy_s()
        idle = max(0.0, total - busy - communicated)
        nccl = f"NCCL alone {communicated:.3f} s" if process.kernels.communicates.any() else "no kernel of NCCL"
        rows.append(
            f"rank {rank}: {len(process.kernels.start_ns)} kernels in {total:.3f} s, compute {busy:.6f} s, {nccl}, "
            f"idle {idle:.3f} s"
        )
    return (
        f"{source}: no NVTX range names a forward or backward of a pipeline (ppdiag run writes such ranges), and no"
        " sends and receives with their peers are in it (nsys export --include-blobs=true), so that idle time cannot be"
        f" split by cause; found {'; '.join(rows)}"
    )


def _warnings(parts: Sequence[RankOps]) -> list[str]:
    warnings = []
    if not any(part.messages for part in parts):
        warnings.append(
            "NCCL's calls are not in this recording with their peers (nsys export --include-blobs=true keeps them): "
            "messages are inferred from the gaps before ops, so that transfers and late senders are told apart by "
            "the ends of ops alone"
        )
    ends = [message.peer for part in parts for message in part.messages if message.kind is not Kind.COLLECTIVE]
    if NONE in ends:
        warnings.append(
            f"{ends.count(NONE)} of {len(ends)} sends and receives have their other end on ranks that are not in this "
            "recording: what was waited for there is unknown; name the exports of all ranks"
        )
    lost = sum(int((part.kernels.launch_ns == NEVER_LAUNCHED).sum()) for part in parts)
    if lost:
        warnings.append(f"{lost} kernels have no launch in the recording: they are in no op")
    return warnings
