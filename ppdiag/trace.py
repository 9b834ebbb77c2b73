"""Many spans as typed numpy columns, with what is known of the job: what sources give and the analysis takes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.stated import StatedLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pandas as pd

    from ppdiag.model import Kind

SPAN_DTYPE = np.dtype(
    [
        ("rank", np.int32),
        ("kind", np.uint8),
        ("op", np.uint8),
        ("flags", np.uint16),
        ("stage", np.int16),
        ("chunk", np.int16),
        ("microbatch", np.int32),
        ("step", np.int32),
        ("peer", np.int32),
        ("tag", np.int32),
        ("group", np.int32),  # index in Trace.groups, common to all ranks
        ("seq", np.int64),
        ("size_bytes", np.int64),
        ("start_ns", np.int64),
        ("end_ns", np.int64),
        ("post_ns", np.int64),
        ("thread", np.int16),
        ("launch_ns", np.int64),  # with Flag.DEVICE: when the host launched the op, or the wait; else without meaning
    ]
)
"""The columns of a trace; their meaning is that of ``model.SPAN_FIELDS``."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process group seen in the job: its name and its members as global ranks."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """The message that a rank was waiting for when it was last seen."""

    is_send: bool
    """It waited for its own send to be taken; else for a receive."""
    peer: int
    """Global rank of the other end."""
    seq: int
    """The nth message of (group, source, destination, tag)."""
    tag: int
    size_bytes: int
    step: int


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What is known of one rank beside its spans."""

    rank: int
    host: str = ""
    clock: str = ""
    """Ranks with equal ``clock`` share one clock (same boot, same time namespace)."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """``fact`` lines and header of the record: framework, torch version, schedule, argv, NCCL variables, ..."""
    clock_probes: tuple[Mapping[str, Any], ...] = ()
    status: str = "unknown"
    """running | finished | raised | interrupted | killed | unknown, as far as the record shows."""
    inside: str = ""
    """The op that the rank was inside of when it was last seen, in words; empty where it was in none."""
    inside_s: float = 0.0
    """For how long it had been inside of it by then."""
    waiting: Waiting | None = None
    """The message, where it was inside the wait for one."""
    last_seen_ns: int = 0
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What is known of the job as a whole. None or empty where the record does not say."""

    source: str = ""
    """What was read, in words a user knows (a path)."""
    world_size: int | None = None
    framework: str = ""
    schedule: str = ""
    """The schedule's name as the framework gives it."""
    microbatches: int | None = None
    pp: int | None = None
    vpp: int | None = None
    tp: int | None = None
    dp: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """All spans of a job on one time axis, sorted by rank, then start.

    Attributes:
        spans: structured array of ``SPAN_DTYPE``.
        job: facts of the job.
        ranks: facts of each rank that left a record, by rank.
        groups: process groups, indexed by the ``group`` column.
        clock_error_s: bound on the error between any two ranks' clocks after alignment; 0 on one clock.
        warnings: what was left out or looks wrong, one sentence each.
        transports: what NCCL's logs say of the connections: rows of ``analyzers.nccl.transports.transports_of``.
        nccl: what else they say: ``analyzers.nccl.digest.digest_of``; empty without logs.
        layout: as the user states it; all None where the record is to tell.
    """

    spans: np.ndarray
    job: JobFacts = field(default_factory=JobFacts)
    ranks: Mapping[int, RankFacts] = field(default_factory=dict)
    groups: tuple[ProcessGroup, ...] = ()
    clock_error_s: float = 0.0
    warnings: tuple[str, ...] = ()
    transports: tuple[Mapping[str, Any], ...] = ()
    nccl: Mapping[str, Any] = field(default_factory=dict)
    layout: StatedLayout = field(default_factory=StatedLayout)

    def __post_init__(self) -> None:
        if self.spans.dtype != SPAN_DTYPE:
            raise ValueError(f"spans must have SPAN_DTYPE, got {self.spans.dtype}")

    def __len__(self) -> int:
        return len(self.spans)

    def of_kind(self, *kinds: Kind) -> Trace:
        """The spans of these kinds."""
        return self.where(np.isin(self.spans["kind"], [int(kind) for kind in kinds]))

    def where(self, mask: np.ndarray) -> Trace:
        """The spans under a boolean mask; facts stay."""
        return replace(self, spans=self.spans[mask])

    def by_rank(self) -> dict[int, np.ndarray]:
        """Each rank's spans, in order of start."""
        return {rank: self.spans[own] for rank, own in rank_slices(self.spans["rank"]).items()}

    def to_pandas(self) -> pd.DataFrame:
        """The spans as a DataFrame, for notebooks."""
        import pandas as pd  # noqa: PLC0415  (heavy, and only notebooks need it)

        return pd.DataFrame({name: self.spans[name] for name in SPAN_DTYPE.names or ()})


def rank_slices(ranks: np.ndarray) -> dict[int, slice]:
    """Where each rank's rows lie among rows that are sorted by rank.

    >>> rank_slices(np.array([0, 0, 3]))
    {0: slice(0, 2, None), 3: slice(2, 3, None)}
    """
    first = np.flatnonzero(np.diff(ranks, prepend=ranks[:1] - 1))
    bounds = [*first.tolist(), len(ranks)]
    return {int(ranks[first]): slice(first, end) for first, end in pairwise(bounds)}


def sorted_spans(spans: np.ndarray) -> np.ndarray:
    """Spans in the order that :class:`Trace` keeps: by rank, then start, then end."""
    return spans[np.lexsort((spans["end_ns"], spans["start_ns"], spans["rank"]))]


def make_spans(rows: Iterable[Mapping[str, int]]) -> np.ndarray:
    """Spans from dicts; missing fields are -1 for labels (stage, chunk, microbatch, peer) and 0 for the rest.

    ``post_ns`` defaults to ``start_ns``.
    """
    rows = list(rows)
    spans = np.zeros(len(rows), SPAN_DTYPE)
    for name in ("stage", "chunk", "microbatch", "peer"):
        spans[name] = -1
    for i, row in enumerate(rows):
        for name, value in row.items():
            spans[i][name] = value
        if "post_ns" not in row:
            spans[i]["post_ns"] = spans[i]["start_ns"]
    return sorted_spans(spans)


def fact_names() -> tuple[str, ...]:
    """Names of the fields of :class:`JobFacts` (a record's facts of these names fill them)."""
    return tuple(f.name for f in fields(JobFacts))
