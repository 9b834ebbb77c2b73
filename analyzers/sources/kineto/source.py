"""Puts the files of a job together: which rank each is, who talks to whom, one numbering of messages and groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.sources.host_clocks import agree
from ppdiag.analyzers.sources.kineto import neighbours
from ppdiag.analyzers.sources.kineto.blocks import head
from ppdiag.analyzers.sources.kineto.workers import read_ranks
from ppdiag.analyzers.sources.missing_ranks import missing_ranks
from ppdiag.analyzers.sources.sorting import some
from ppdiag.analyzers.validation import plausible
from ppdiag.errors import BadRecord, NoPipelineFound
from ppdiag.model import PIPELINE_KINDS, Kind
from ppdiag.trace import JobFacts, ProcessGroup, RankFacts, Trace, sorted_spans

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ppdiag.analyzers.sources import Progress
    from ppdiag.analyzers.sources.kineto.rank import RankRecord

SUFFIXES = (".json", ".json.gz")
HEAD_BYTES = 1 << 16
_MARKS = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"')
_ARRAY_MARKS = (b'"ph"', b'"cat"', b'"ts"')
MOST_SAID = 8
NOTHING_TO_SPLIT = (
    "neither labels of forwards and backwards nor work between sends and receives, so that bubble and imbalance of "
    "stages cannot be told"
)


class Kineto:
    """The traces of one job: files of one rank each, or their directory."""

    description = "traces of torch.profiler (.json, .json.gz), one a rank"

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        """``ranks``: those of the files that do not say it themselves, in the order of the files."""
        self.ranks = tuple(ranks)

    def recognises(self, path: Path) -> bool:
        """Whether the path is such a file, or a directory with one in it."""
        return bool(_files([path])[0])

    def read(self, paths: Sequence[Path], progress: Progress | None) -> Trace:
        """The trace of one job.

        Raises:
            BadRecord: none of the files can be read.
            NoPipelineFound: there is no pipeline in them; the message says what each rank did.
        """
        files, others = _files(paths)
        records, failures = read_ranks(files, progress)
        if not records:
            raise failures[0] if failures else BadRecord(f"{paths[0]}: holds no trace of torch.profiler")
        warnings = [str(failure) for failure in failures]
        if others:
            warnings.append(f"left out, no traces of torch.profiler: {_some(path.name for path in others)}")
        by_rank = _one_file_a_rank(records, self.ranks, warnings)
        return _trace(by_rank, source=some(paths), warnings=warnings)


def _some(words: Iterable[str]) -> str:
    """The first few of some words, and how many more there are."""
    found = list(words)
    more = f" and {len(found) - MOST_SAID} more" if len(found) > MOST_SAID else ""
    return ", ".join(found[:MOST_SAID]) + more


def _files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The traces among the paths and in directories, and the other files of their kind."""
    found: list[Path] = []
    others: list[Path] = []
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        named = [file for file in inside if file.name.endswith(SUFFIXES) and file.is_file()]
        for file in named:
            (found if _looks_like_one(file) else others).append(file)
    return found, others


def _looks_like_one(path: Path) -> bool:
    start = head(path, HEAD_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"["):
        return all(mark in start for mark in _ARRAY_MARKS)
    return start.startswith(b"{") and any(mark in start for mark in _MARKS)


def _one_file_a_rank(records: list[RankRecord], given: Sequence[int], warnings: list[str]) -> dict[int, RankRecord]:
    """The records by rank: the file's own, else that of its name, else the one given, else the first that is free."""
    silent = [record for record in records if record.rank is None]
    if given and len(given) != len(silent):
        warnings.append(f"{len(given)} ranks were given for {len(silent)} files that do not say theirs")
    for record, rank in zip(silent, given, strict=False):
        record.rank = rank
    taken = {record.rank for record in records}
    by_rank: dict[int, RankRecord] = {}
    for record in records:
        if record.rank is None:
            rank = next(n for n in range(len(records) + 1) if n not in taken)
            taken.add(rank)
            warnings.append(f"{record.name}: says no rank, taken for rank {rank}; say which with --rank")
        else:
            rank = record.rank
        if rank in by_rank:
            warnings.append(
                f"{record.name}: rank {rank} again (first in {by_rank[rank].name}), left out; "
                "name the files of one recording, one a rank"
            )
            continue
        record.rank = rank
        by_rank[rank] = record
    return dict(sorted(by_rank.items()))


def _trace(records: dict[int, RankRecord], *, source: str, warnings: list[str]) -> Trace:
    for rank, record in records.items():
        warnings += [f"rank {rank}: {text}" for text in record.warnings]
    spans, groups = _joined(records)
    warnings += missing_ranks(records, _world_size(records) or 0, spans)
    if not np.isin(spans["kind"], PIPELINE_KINDS).any():
        raise NoPipelineFound(_without_pipeline(records, source, warnings))
    warnings += neighbours.fill_peers(spans)
    sizes = spans["size_bytes"][np.isin(spans["kind"], (Kind.SEND, Kind.RECV))]
    if len(sizes) and not sizes.any():
        warnings.append("messages do not say their bytes (record_shapes=True of torch.profiler would)")
    kept = plausible(spans)
    if not kept.all():
        warnings.append(f"{int((~kept).sum())} ops and messages with impossible values were left out")
    spans = sorted_spans(spans[kept])
    neighbours.number_messages(spans)
    hosts, assumed = _hosts(records)
    clocks = agree(spans, hosts)
    warnings += [f"{clocks}{assumed}"] if len(clocks.shift_ns) > 1 else []
    return Trace(
        spans=spans,
        job=JobFacts(source=source, world_size=_world_size(records), framework=_framework(spans)),
        ranks={rank: _rank_facts(rank, record, hosts[rank]) for rank, record in records.items()},
        groups=groups,
        clock_error_s=clocks.error_s,
        warnings=tuple(warnings),
    )


def _joined(records: dict[int, RankRecord]) -> tuple[np.ndarray, tuple[ProcessGroup, ...]]:
    """All spans, with groups known by their members; ``group`` is an index of them."""
    groups: dict[tuple[int, ...], int] = {}
    names: list[str] = []
    parts = []
    for rank, record in records.items():
        mapping = np.full(len(record.groups) + 1, -1, np.int32)
        for local, (name, members) in enumerate(record.groups):
            if members not in groups:
                groups[members] = len(groups)
                names.append(name)
            mapping[local] = groups[members]
        record.spans["rank"] = rank
        record.spans["group"] = mapping[record.spans["group"]]
        parts.append(record.spans)
    found = tuple(ProcessGroup(name, members) for name, members in zip(names, groups, strict=True))
    return np.concatenate(parts), found


def _framework(spans: np.ndarray) -> str:
    named = spans["stage"][np.isin(spans["kind"], PIPELINE_KINDS)] >= 0
    return "torch.distributed.pipelining" if named.all() else ""


def _world_size(records: dict[int, RankRecord]) -> int | None:
    sizes = [record.facts["world_size"] for record in records.values() if "world_size" in record.facts]
    return max(sizes) if sizes else len(records)


def _hosts(records: dict[int, RankRecord]) -> tuple[dict[int, str], str]:
    """Each rank's host, and what was assumed of it: where no file names one, ranks fill the devices of each in turn."""
    named = {rank: str(record.facts.get("host", "")) for rank, record in records.items()}
    devices = max(int(record.facts.get("devices", 1)) for record in records.values())
    if any(named.values()):
        return {rank: host or "unnamed" for rank, host in named.items()}, ""
    if not 1 < devices < len(records):
        return named, ""
    hosts = {}
    for rank in records:
        first = rank - rank % devices
        hosts[rank] = f"that of ranks {first} to {first + devices - 1}"
    return hosts, f" (no file names its host; each has {devices} devices, so that so many ranks are taken for one host)"


def _rank_facts(rank: int, record: RankRecord, host: str) -> RankFacts:
    facts = {name: value for name, value in record.facts.items() if name not in ("pg_config", "devices")}
    return RankFacts(rank, host=host, clock=host, facts={**facts, "sums": record.sums})


def _without_pipeline(records: dict[int, RankRecord], source: str, warnings: Sequence[str]) -> str:
    """What can be said of a job without forwards and backwards of microbatches."""
    steps = max(record.sums.steps for record in records.values())
    said = [
        f"{source}: no pipeline in this recording",
        NOTHING_TO_SPLIT,
        *(f"rank {rank} in {record.sums}" for rank, record in list(records.items())[:MOST_SAID]),
        *([] if steps else ["no step was marked (schedule= and prof.step() of torch.profiler)"]),
        *warnings[:MOST_SAID],
    ]
    return "; ".join(said)
