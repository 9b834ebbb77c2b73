"""The tracks of an export, the same for Chrome's and Perfetto's format: for each rank its ops, messages and idle time.

Slices on one lane never overlap: where they would, a track has several lanes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.exported import CAUSES, PLACES
from ppdiag.model import Collective, Flag, HostCause, Kind
from ppdiag.reports.words import CAUSES as CAUSE_WORDS
from ppdiag.reports.words import rank_list, visible
from ppdiag.trace import rank_slices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ppdiag.exported import Exported

TRACKS = {
    "compute": (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT, Kind.OPTIMIZER),
    "idle": (),
    "receives": (Kind.RECV,),
    "sends": (Kind.SEND,),
    "collectives": (Kind.COLLECTIVE,),
    "host": (Kind.HOST,),
    "framework": (Kind.SCHEDULE,),
    "initialisation": (Kind.INIT,),
}
"""The tracks of a rank, from top to bottom."""
OPS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight"}
PEERS = {Kind.SEND: "send to rank", Kind.RECV: "receive from rank"}
OTHERS: dict[tuple[int, int], str] = {
    **{(Kind.COLLECTIVE, op): op.name.lower() for op in Collective},
    (Kind.COLLECTIVE, Collective.OTHER): "collective",
    (Kind.HOST, HostCause.OTHER): "host",
    (Kind.HOST, HostCause.GC): "garbage collection",
    (Kind.HOST, HostCause.DATA): "waits for data",
    (Kind.HOST, HostCause.SYNCHRONISING): "synchronising call",
    **{(kind, 0): kind.name.lower() for kind in (Kind.OPTIMIZER, Kind.SCHEDULE, Kind.INIT)},
}
"""By kind and op; an op that is not here is called as the kind's op 0."""
LABELS = ("step", "stage", "microbatch")
MESSAGE_FIELDS = ("peer", "tag", "seq", "size_bytes")
COLLECTIVE_FIELDS = ("group", "size_bytes")
AT_ONCE = 1 << 14
"""Slices described at once."""
LEAST_NS = 1
"""A slice of no length is not drawn, and no arrow can start at it."""


Notes = dict[str, "int | str"]


class Slice(NamedTuple):
    """One slice of a track."""

    name: str
    start_ns: int
    end_ns: int
    notes: Notes
    """What a viewer shows when it is clicked."""
    arrow: int
    """Number of the arrow from a send to its receive, the same at both ends; 0 for slices without one."""


@dataclass(frozen=True, slots=True)
class Track:
    """One lane of one track of a rank.

    Attributes:
        name: of the track.
        lane: 0 for the first.
        start_ns, end_ns: of each slice, in order of their begin.
        describe: names, notes and arrows of some of the slices.
    """

    name: str
    lane: int
    start_ns: np.ndarray
    end_ns: np.ndarray
    describe: Callable[[slice], tuple[list[str], list[Notes], list[int]]]

    def slices(self) -> Iterator[Slice]:
        """The slices, made a part at a time: one takes ten times the memory of its span."""
        for first in range(0, len(self.start_ns), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            names, notes, arrows = self.describe(part)
            times = self.start_ns[part].tolist(), self.end_ns[part].tolist()
            yield from map(Slice, names, *times, notes, arrows)


def first_moment_ns(exported: Exported) -> int:
    """When the first span was posted or began; 0 where there is none."""
    spans = exported.spans
    return int(min(spans["post_ns"].min(), spans["start_ns"].min())) if len(spans) else 0


def process_name(exported: Exported, rank: int, stages: Sequence[int]) -> str:
    """How a rank is called: its number, stages and host."""
    held = f" stage {rank_list(stages)}" if stages else ""
    facts = exported.trace.ranks.get(rank)
    return f"rank {rank}{held}" + (f" on {visible(facts.host)}" if facts is not None and facts.host else "")


def ranks_of(exported: Exported) -> Iterator[tuple[int, str, list[Track]]]:
    """Each rank with its name and its tracks, one rank at a time."""
    idle_of = rank_slices(exported.idle["rank"])
    for rank, own in rank_slices(exported.spans["rank"]).items():
        spans = exported.spans[own]
        stages = np.unique(spans["stage"][spans["stage"] >= 0]).tolist()
        tracks: list[Track] = []
        for name, kinds in TRACKS.items():
            if name == "idle":
                tracks += _idle(exported, idle_of.get(rank, slice(0)))
                continue
            index = own.start + np.flatnonzero(np.isin(spans["kind"], [int(kind) for kind in kinds]))
            tracks += _lanes(exported, name, index, several=len(stages) > 1)
        yield rank, process_name(exported, rank, stages), tracks


def _idle(exported: Exported, own: slice) -> list[Track]:
    rows = exported.idle[own]
    if not len(rows):
        return []
    places = [place.value.replace("_", " ") for place in PLACES]
    causes = [CAUSE_WORDS[cause].label for cause in CAUSES]

    def describe(part: slice) -> tuple[list[str], list[Notes], list[int]]:
        some = rows[part]
        notes: list[Notes] = [{"stood in": places[place]} for place in some["place"].tolist()]
        return [causes[cause] for cause in some["cause"].tolist()], notes, [0] * len(some)

    return [Track("idle", 0, rows["start_ns"], rows["end_ns"], describe)]


def _lanes(exported: Exported, name: str, index: np.ndarray, *, several: bool) -> Iterator[Track]:
    """A track's spans (indices), spread over lanes."""
    spans = exported.spans[index]
    # A send is drawn from its post to the end of its receive: often it is waited for long after that. Other spans are
    # drawn as they were waited for.
    sends, partner = spans["kind"] == Kind.SEND, exported.partner[index]
    arrived_ns = np.where(sends & (partner >= 0), exported.spans["end_ns"][partner], spans["end_ns"])
    start_ns = np.where(sends, np.minimum(spans["post_ns"], spans["start_ns"]), spans["start_ns"])
    end_ns = np.maximum(np.minimum(spans["end_ns"], arrived_ns), start_ns + LEAST_NS)
    index, start_ns, end_ns, waits = _cut_where_sent(exported, index, start_ns, end_ns)
    order = np.lexsort((end_ns, start_ns))
    index, start_ns, end_ns, waits = index[order], start_ns[order], end_ns[order], waits[order]
    lane_of = _lane_of(start_ns, end_ns)
    for lane in range(int(lane_of.max(initial=-1)) + 1):
        own = np.flatnonzero(lane_of == lane)
        describe = partial(_describe, exported, index[own], waits[own], several)
        yield Track(name, lane, start_ns[own], end_ns[own], describe)


def _describe(
    exported: Exported,
    index: np.ndarray,
    waits: np.ndarray,
    several: bool,  # noqa: FBT001  (of a partial)
    part: slice,
) -> tuple[list[str], list[Notes], list[int]]:
    """Names, notes and arrows of some of the slices whose spans (indices) these are."""
    index, waits = index[part], waits[part]
    spans, partner = exported.spans[index], exported.partner[index]
    arrows = np.where((partner >= 0) & ~waits, np.minimum(partner, index) + 1, 0).tolist()
    return _names(spans, waits, several=several), _notes(spans), arrows


def _cut_where_sent(
    exported: Exported, index: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The slices with each receive cut in two where its sender sent: the wait for the sender, then the transfer.

    An arrow cannot lead to a slice that began before its own beginning: viewers would turn it round. So a transfer that
    took no time has a slice too.
    """
    partner = exported.partner[index]
    received = (exported.spans["kind"][index] == Kind.RECV) & (partner >= 0)
    sent_ns = np.where(received, exported.spans["post_ns"][partner], start_ns)
    cut = received & (start_ns < sent_ns) & (sent_ns <= end_ns)
    begin_ns = np.where(cut, sent_ns, start_ns)
    waits = np.append(np.zeros(len(index), bool), np.ones(int(cut.sum()), bool))
    return (
        np.append(index, index[cut]),
        np.append(begin_ns, start_ns[cut]),
        np.append(np.maximum(end_ns, begin_ns + LEAST_NS), sent_ns[cut]),
        waits,
    )


def _lane_of(start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """The first lane that is free when each slice begins (slices in order of their begin)."""
    lane_of = np.zeros(len(start_ns), np.int64)
    if (start_ns[1:] >= np.maximum.accumulate(end_ns)[:-1]).all():
        return lane_of
    busy: list[tuple[int, int]] = []  # (end, lane)
    free: list[int] = []
    for i, (start, end) in enumerate(zip(start_ns.tolist(), end_ns.tolist(), strict=True)):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane_of[i] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, int(lane_of[i])))
    return lane_of


def _names(spans: np.ndarray, waits: np.ndarray, *, several: bool) -> list[str]:
    """What slices are called. Viewers give slices whose names differ in numbers only one colour."""
    columns = (spans[name].tolist() for name in ("kind", "op", "stage", "microbatch", "peer"))
    evaluation = ((spans["flags"] & np.uint16(Flag.EVALUATION)) != 0).tolist()
    found = []
    for kind, op, stage, microbatch, peer, waiting, evaluated in zip(*columns, waits.tolist(), evaluation, strict=True):
        if waiting:
            found.append(f"wait for rank {peer}")
        elif kind in OPS:
            where = f" s{stage}" if several and stage >= 0 else ""
            found.append(f"{OPS[kind]} {microbatch}{where}{' evaluation' if evaluated else ''}")
        elif kind in PEERS:
            found.append(f"{PEERS[kind]} {peer}")
        else:
            found.append(OTHERS.get((kind, op)) or OTHERS[kind, 0])
    return found


def _notes(spans: np.ndarray) -> list[Notes]:
    columns = {name: spans[name].tolist() for name in (*LABELS, *MESSAGE_FIELDS, *COLLECTIVE_FIELDS)}
    found: list[Notes] = []
    for i, kind in enumerate(spans["kind"].tolist()):
        notes: Notes = {name: columns[name][i] for name in LABELS if columns[name][i] >= 0}
        more = MESSAGE_FIELDS if kind in PEERS else COLLECTIVE_FIELDS if kind == Kind.COLLECTIVE else ()
        found.append(notes | {name: columns[name][i] for name in more})
    return found
