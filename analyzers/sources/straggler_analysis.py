"""Reads the op tables of StragglerAnalysis: one Parquet file a job, with the times of every op of the recorded ranks.

The format is that of the artifact of "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI '25): a row an op, with ``dp_rank``, ``stage``, ``rank``, ``step``, ``optype``, ``start_ts`` and ``duration`` in
seconds from the step's start, ``seq_id`` among the ops of its type in the step, ``mc`` (chunk), ``gmc`` (stage counted
over all chunks) and ``mb_id``. A file ``meta-NAME.yaml`` beside ``trace-NAME.parquet`` holds the job's sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.analyzers.clock import message_bounds
from ppdiag.analyzers.messages import MISSING, match
from ppdiag.analyzers.sources import unrecorded_collective
from ppdiag.errors import BadRecord, MissingPackage
from ppdiag.model import NONE, Collective, HostCause, Kind, Payload
from ppdiag.trace import SPAN_DTYPE, JobFacts, ProcessGroup, RankFacts, Trace, sorted_spans

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ppdiag.analyzers.sources import Progress

MAGIC = b"PAR1"
LABELS = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "mb_id", "gmc")
TIMES = ("start_ts", "duration")
OPTYPE = "optype"
MOST_ROWS = 100_000_000
MOST_SECONDS = 1e6
"""A step longer than this is no step."""
JITTER_NS = 100_000
"""Ops of one rank that overlap by less follow each other: times are single-precision seconds from GPU events."""
MOST_META_BYTES = 1 << 16
MOST_NAME = 40
"""Of an unknown op type this much is shown."""


class _Word(NamedTuple):
    """What an op type means: its kind, ``op`` of the span, and which ranks take part."""

    kind: Kind
    op: int = 0
    among: str = ""


P2P = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}
"""Where the other end is, along the pipeline."""
WORDS = {
    "forward-compute": _Word(Kind.FORWARD),
    "backward-compute": _Word(Kind.BACKWARD),
    "forward-send": _Word(Kind.SEND, Payload.ACTIVATION),
    "forward-recv": _Word(Kind.RECV, Payload.ACTIVATION),
    "backward-send": _Word(Kind.SEND, Payload.GRADIENT),
    "backward-recv": _Word(Kind.RECV, Payload.GRADIENT),
    "params-all-gather": _Word(Kind.COLLECTIVE, Collective.ALL_GATHER, "stage"),
    "grads-reduce-scatter": _Word(Kind.COLLECTIVE, Collective.REDUCE_SCATTER, "stage"),
    "separate-grads-all-reduce": _Word(Kind.COLLECTIVE, Collective.ALL_REDUCE, "stage"),
    "layernorm-grads-all-reduce": _Word(Kind.COLLECTIVE, Collective.ALL_REDUCE, "rank"),
    "embedding-grads-all-reduce": _Word(Kind.COLLECTIVE, Collective.ALL_REDUCE, "ends"),
    "optimizer-clip-main-grad": _Word(Kind.COLLECTIVE, Collective.ALL_REDUCE, "world"),
    "optimizer": _Word(Kind.OPTIMIZER),
    "gc": _Word(Kind.HOST, HostCause.GC),
}
"""Collectives run among the twins of a stage, the tensor-parallel peers of a rank (of which one is in the record), the
first and last stage of a pipeline (tied embeddings), or all ranks (norm of the gradient)."""
UNRECORDED = "end-of-pipeline"
"""Name of the collective that is not in the record but shows."""


class StragglerAnalysis:
    """The op table of one job."""

    description = "op tables of StragglerAnalysis (.parquet)"

    def recognises(self, path: Path) -> bool:
        """Whether the path is a Parquet file."""
        if path.suffix != ".parquet" or not path.is_file():
            return False
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC

    def read(self, paths: Sequence[Path], progress: Progress | None) -> Trace:
        """The trace of one job.

        Raises:
            BadRecord: the file is no table of ops, or of more than one job.
            MissingPackage: pyarrow is not installed.
        """
        if len(paths) > 1:
            raise BadRecord(f"{', '.join(map(str, paths))}: each table holds a job of its own; name one")
        if progress is not None:
            progress("reading ops", 0, 1)
        table = _read_table(paths[0])
        return _Builder(table, _read_meta(paths[0]), paths[0]).trace()


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows of a file, one array a column; ``word`` is an index in ``words``."""

    labels: dict[str, np.ndarray]
    start_s: np.ndarray
    duration_s: np.ndarray
    word: np.ndarray
    words: tuple[str, ...]


def _read_table(path: Path) -> _Table:
    try:
        import pyarrow as pa  # noqa: PLC0415  (an extra)
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackage(f"{path}: reading Parquet needs pyarrow; pip install 'ppdiag[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            missing = [name for name in (*LABELS, *TIMES, OPTYPE) if name not in file.schema_arrow.names]
            if missing:
                raise BadRecord(
                    f"{path}: expected the op table of StragglerAnalysis, and columns {', '.join(missing)} are missing"
                )
            if not 0 < file.metadata.num_rows <= MOST_ROWS:
                raise BadRecord(f"{path}: expected 1 to {MOST_ROWS} rows, found {file.metadata.num_rows}")
            columns = file.read(columns=[*LABELS, *TIMES, OPTYPE])
        optype = columns.column(OPTYPE).combine_chunks().cast(pa.string()).dictionary_encode()
        return _Table(
            labels={name: _column(columns, name, pa.int64()) for name in LABELS},
            start_s=_column(columns, TIMES[0], pa.float64()),
            duration_s=_column(columns, TIMES[1], pa.float64()),
            word=optype.indices.to_numpy(zero_copy_only=False),
            words=tuple(map(str, optype.dictionary.to_pylist())),
        )
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadRecord(f"{path}: expected a table of ops in Parquet, and it cannot be read: {reason}") from error


def _column(columns: object, name: str, dtype: object) -> np.ndarray:
    """A column without gaps; raises ArrowInvalid where its values do not fit."""
    column = columns.column(name).cast(dtype)  # type: ignore[attr-defined]
    if column.null_count:
        raise OverflowError(f"column {name} has {column.null_count} empty cells")
    return column.to_numpy()


def _read_meta(path: Path) -> dict[str, int]:
    """The sizes in ``meta-NAME.yaml`` beside ``trace-NAME.parquet``: one ``name: number`` a line; empty without it."""
    meta = path.with_name(f"meta-{path.stem.removeprefix('trace-')}.yaml")
    if not meta.is_file():
        return {}
    with meta.open("rb") as stream:
        lines = stream.read(MOST_META_BYTES).decode(errors="replace").splitlines()
    pairs = (line.partition(":")[::2] for line in lines)
    return {name.strip(): int(value) for name, value in pairs if value.strip().isdecimal() and len(value) < 12}


class _Builder:
    """Turns a table into a trace."""

    def __init__(self, table: _Table, meta: dict[str, int], path: Path) -> None:
        self.meta = meta
        self.path = path
        self.warnings = ["each step of this recording has a clock of its own: the steps are laid end to end"]
        self.groups: list[ProcessGroup] = []
        self._check(table)
        table = self._known_ops(self._one_rank_a_place(table))
        self.labels, self.words, self.word = table.labels, table.words, table.word
        self.step_numbers, self.step = np.unique(self.labels["step"], return_inverse=True)
        self.start_ns, self.end_ns = _lay_end_to_end(table, self.step)
        self.stages = int(self.labels["stage"].max()) + 1
        self.replicas = int(self.labels["dp_rank"].max()) + 1
        self.rank_DS = np.full((self.replicas, self.stages), NONE, np.int64)
        self.rank_DS[self.labels["dp_rank"], self.labels["stage"]] = self.labels["rank"]

    def _check(self, table: _Table) -> None:
        labels = table.labels
        fits = all((labels[name] >= -1).all() and (labels[name] < 2**15).all() for name in LABELS if name != "step")
        times = np.isfinite(table.start_s) & np.isfinite(table.duration_s) & (table.duration_s >= 0)
        if not fits or (np.minimum(labels["dp_rank"], labels["stage"]) < 0).any():
            raise BadRecord(f"{self.path}: ranks, stages or microbatches in it are no small numbers")
        if not times.all() or np.abs(table.start_s).max() > MOST_SECONDS or table.duration_s.max() > MOST_SECONDS:
            raise BadRecord(f"{self.path}: expected times in seconds from the step's start, and some are not")
        if labels["mc"].max() > 0:
            raise BadRecord(
                f"{self.path}: the job has several chunks a rank (vpp_size > 1); the table does not say which chunk a "
                "message belongs to, so that it cannot be read"
            )

    def _one_rank_a_place(self, table: _Table) -> _Table:
        """Of the ranks at one place (replica and stage) the lowest."""
        place = table.labels["dp_rank"] * 2**15 + table.labels["stage"]
        _, place = np.unique(place, return_inverse=True)
        lowest = np.full(int(place.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(lowest, place, table.labels["rank"])
        kept = table.labels["rank"] == lowest[place]
        if not kept.all():
            self.warnings.append("several ranks hold the same stage of the same replica; the lowest of them is shown")
        return _rows(table, kept)

    def _known_ops(self, table: _Table) -> _Table:
        unknown = sorted({table.words[i][:MOST_NAME] for i in np.unique(table.word)} - set(WORDS))
        if unknown:
            self.warnings.append(f"ops of unknown types were left out: {', '.join(unknown[:8])}")
        kept = np.isin(np.array(table.words)[table.word], list(WORDS))
        if not kept.any():
            raise BadRecord(f"{self.path}: no op of a known type in it (found {', '.join(unknown[:8])})")
        return _rows(table, kept)

    def trace(self) -> Trace:
        """The trace: all ops, messages matched, and the collective at the pipeline's end that was not recorded."""
        spans = self._spans()
        spans = _without_jitter(spans)
        spans = sorted_spans(np.concatenate([spans, self._unrecorded(spans)]))
        self._say_what_is_missing()
        return Trace(
            spans=spans,
            job=self._job(),
            ranks={int(rank): self._rank_facts(int(rank)) for rank in np.unique(spans["rank"])},
            groups=tuple(self.groups),
            clock_error_s=_clock_error(spans),
            warnings=tuple(self.warnings),
        )

    def _spans(self) -> np.ndarray:
        spans = np.zeros(len(self.word), SPAN_DTYPE)
        labels = self.labels
        spans["rank"], spans["step"] = labels["rank"], self.step
        spans["start_ns"], spans["end_ns"] = self.start_ns, self.end_ns
        spans["peer"] = NONE
        spans["stage"] = labels["stage"]
        spans["chunk"] = np.where(labels["mc"] >= 0, labels["mc"], NONE)
        spans["microbatch"] = labels["mb_id"]
        spans["seq"] = labels["seq_id"]
        for index, name in enumerate(self.words):
            own = np.flatnonzero(self.word == index)
            if len(own):
                self._interpret(spans, own, name)
        spans["post_ns"] = spans["start_ns"]
        return spans

    def _interpret(self, spans: np.ndarray, own: np.ndarray, name: str) -> None:
        word = WORDS[name]
        spans["kind"][own], spans["op"][own] = word.kind, word.op
        per_step = int(spans["seq"][own].max()) + 1
        if name in P2P:
            spans["microbatch"][own] = spans["seq"][own]  # in 1F1B the n-th message is that of the n-th microbatch
            spans["peer"][own] = self._peers(own, P2P[name])
            spans["tag"][own] = word.op
            spans["seq"][own] += self.step[own] * per_step
            spans["group"][own] = self._group("pipeline", tuple(sorted(self.rank_DS.ravel().tolist())))
        elif word.among:
            spans["seq"][own] += self.step[own] * per_step
            self._place_in_groups(spans, own, name)

    def _peers(self, own: np.ndarray, direction: int) -> np.ndarray:
        stage = self.labels["stage"][own] + direction
        if (stage < 0).any() or (stage >= self.stages).any():
            raise BadRecord(f"{self.path}: a message goes beyond the {self.stages} stages of the pipeline")
        return self.rank_DS[self.labels["dp_rank"][own], stage]

    def _place_in_groups(self, spans: np.ndarray, own: np.ndarray, name: str) -> None:
        """Each collective's group: an op type has groups of its own, so that its numbering is its own."""
        replica, stage = self.labels["dp_rank"][own], self.labels["stage"][own]
        ends = self.rank_DS[:, [0, -1]]
        for d, s in np.unique(np.stack([replica, stage], axis=1), axis=0).tolist():
            members = {
                "stage": self.rank_DS[:, s],
                "rank": self.rank_DS[d : d + 1, s],
                "ends": ends[d],
                "world": self.rank_DS.ravel(),
            }[WORDS[name].among]
            group = self._group(name, tuple(sorted({int(rank) for rank in members if rank != NONE})))
            spans["group"][own[(replica == d) & (stage == s)]] = group

    def _group(self, name: str, members: tuple[int, ...]) -> int:
        group = ProcessGroup(name, members)
        if group not in self.groups:
            self.groups.append(group)
        return self.groups.index(group)

    def _unrecorded(self, spans: np.ndarray) -> np.ndarray:
        """Spans of the collective for which the last stage waits before its tail, where the ranks' times show one.

        Megatron averages the loss among the twins of the last stage there.
        """
        found = unrecorded_collective.find(spans, self.rank_DS[:, -1])
        if found is None:
            return spans[:0]
        self.warnings.append(
            f"a collective of {len(found.ranks)} ranks (the last stage's, first of all) between the last backward and "
            "the gradients' reduction is not in the record: inferred from the moment at which they all go on"
        )
        return found.spans(self._group(UNRECORDED, tuple(found.ranks.tolist())))

    def _say_what_is_missing(self) -> None:
        world = self.meta.get("world_size", 0)
        recorded = int((self.rank_DS != NONE).sum())
        if world > recorded:
            self.warnings.append(
                f"{recorded} of {world} ranks are in the record: of ranks that share a stage and a replica (tensor or "
                "sequence parallel) one"
            )
        if not self.meta:
            self.warnings.append(f"no meta-*.yaml beside {self.path.name}: the job's sizes are taken from its ops")

    def _job(self) -> JobFacts:
        return JobFacts(
            source=str(self.path),
            world_size=self.meta.get("world_size") or int((self.rank_DS != NONE).sum()),
            framework="megatron",
            pp=self.stages,
            vpp=1,
            tp=self.meta.get("tp_size"),
            dp=self.replicas,
        )

    def _rank_facts(self, rank: int) -> RankFacts:
        facts = {"step_numbers": self.step_numbers.tolist(), "dsp_size": self.meta.get("dsp_size", 1)}
        return RankFacts(rank, clock="aligned by the recorder", facts=facts)


def _rows(table: _Table, kept: np.ndarray) -> _Table:
    labels = {name: column[kept] for name, column in table.labels.items()}
    return _Table(labels, table.start_s[kept], table.duration_s[kept], table.word[kept], table.words)


def _lay_end_to_end(table: _Table, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of each op in ns where each step begins when the one before has ended on all ranks."""
    start_ns = np.rint(table.start_s * 1e9).astype(np.int64)
    end_ns = np.rint((table.start_s + table.duration_s) * 1e9).astype(np.int64)
    steps = int(step.max()) + 1
    first, last = np.full(steps, np.iinfo(np.int64).max), np.full(steps, np.iinfo(np.int64).min)
    np.minimum.at(first, step, start_ns)
    np.maximum.at(last, step, end_ns)
    begin = np.append(0, np.cumsum(last - first)[:-1])
    return start_ns + (begin - first)[step], end_ns + (begin - first)[step]


def _without_jitter(spans: np.ndarray) -> np.ndarray:
    """Sorted spans in which an op of a rank begins when the one before has ended, where they overlapped by a hair.

    The two halves of a batched send and receive have equal times, and keep them.
    """
    spans = sorted_spans(spans)
    _, rank = np.unique(spans["rank"], return_inverse=True)
    far = int(spans["end_ns"].max() - spans["start_ns"].min()) + 1
    shift = rank.astype(np.int64) * far - int(spans["start_ns"].min())
    reach = np.maximum.accumulate(spans["end_ns"] + shift) - shift
    same = np.zeros(len(spans), bool)
    same[1:] = (spans["start_ns"][1:] == spans["start_ns"][:-1]) & (rank[1:] == rank[:-1])
    same[1:] &= spans["end_ns"][1:] == spans["end_ns"][:-1]
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(spans))))  # of the batch that the span is in
    before = np.maximum(first - 1, 0)
    overlap = np.where((first > 0) & (rank[before] == rank), reach[before] - spans["start_ns"], 0)
    moved = (overlap > 0) & (overlap <= JITTER_NS)
    spans["start_ns"][moved] = reach[before][moved]
    spans["end_ns"] = np.maximum(spans["end_ns"], spans["start_ns"])
    spans["post_ns"] = spans["start_ns"]
    return spans


def _clock_error(spans: np.ndarray) -> float:
    """How far a receive ends before its send began, at worst."""
    partner = match(Trace(spans)).partner
    received = np.flatnonzero((spans["kind"] == Kind.RECV) & (partner != MISSING))
    return message_bounds(spans["post_ns"][partner[received]], spans["end_ns"][received])
