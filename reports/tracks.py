"""The tracks of an export, the same for Chrome's and Perfetto's format: for each rank its ops, messages and idle time.

Slices on one lane never overlap: where they would, a track has several lanes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.exported import CAUSES, PLACES
from ppdiag.model import Collective, Flag, HostCause, Kind
from ppdiag.reports.words import CAUSES as CAUSE_WORDS
from ppdiag.reports.words import rank_list, visible
from ppdiag.trace import rank_slices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.WEIGHT: "W"}
LEAST_NS = 1
"""A slice of no length is not drawn, and no arrow can start at it."""


@dataclass(frozen=True, slots=True)
class Track:
    """One lane of one track of a rank.

    Attributes:
        name: of the track.
        lane: 0 for the first.
        start_ns, end_ns: of each slice, sorted.
        names: of each slice.
        span: index of each slice's span; -1 for idle time.
        idle: index in the export's idle time; -1 for spans.
        waits: whether the slice is the part of a receive in which the sender had not sent.
    """

    name: str
    lane: int
    start_ns: np.ndarray
    end_ns: np.ndarray
    names: Sequence[str]
    span: np.ndarray
    idle: np.ndarray
    waits: np.ndarray


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
    names = [CAUSE_WORDS[CAUSES[cause]].label for cause in rows["cause"].tolist()]
    index = np.arange(own.start, own.stop)
    nothing, no = np.full(len(rows), -1), np.zeros(len(rows), bool)
    return [Track("idle", 0, rows["start_ns"], rows["end_ns"], names, nothing, index, no)]


def _lanes(exported: Exported, name: str, index: np.ndarray, *, several: bool) -> Iterator[Track]:
    """A track's spans (indices), spread over lanes."""
    spans = exported.spans[index]
    # A send is drawn from its post: then it left. Other spans are drawn as they were waited for.
    start_ns = np.where(spans["kind"] == Kind.SEND, np.minimum(spans["post_ns"], spans["start_ns"]), spans["start_ns"])
    end_ns = np.maximum(spans["end_ns"], start_ns + LEAST_NS)
    index, start_ns, end_ns, waits = _cut_where_sent(exported, index, start_ns, end_ns)
    order = np.lexsort((end_ns, start_ns))
    index, start_ns, end_ns, waits = index[order], start_ns[order], end_ns[order], waits[order]
    lane_of = _lane_of(start_ns, end_ns)
    for lane in range(int(lane_of.max(initial=-1)) + 1):
        own = np.flatnonzero(lane_of == lane)
        rows = zip(exported.spans[index[own]], waits[own].tolist(), strict=True)
        names = [f"wait for rank {span['peer']}" if wait else _name(span, several=several) for span, wait in rows]
        yield Track(name, lane, start_ns[own], end_ns[own], names, index[own], np.full(len(own), -1), waits[own])


def _cut_where_sent(
    exported: Exported, index: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The slices with each receive cut in two where its sender sent: the wait for the sender, then the transfer.

    An arrow cannot lead to a slice that began before its own beginning: viewers would turn it round.
    """
    partner = exported.partner[index]
    received = (exported.spans["kind"][index] == Kind.RECV) & (partner >= 0)
    sent_ns = np.where(received, exported.spans["post_ns"][partner], start_ns)
    cut = received & (start_ns < sent_ns) & (sent_ns < end_ns)
    begin_ns = np.where(cut, sent_ns, start_ns)
    waits = np.append(np.zeros(len(index), bool), np.ones(int(cut.sum()), bool))
    return (
        np.append(index, index[cut]),
        np.append(begin_ns, start_ns[cut]),
        np.append(end_ns, sent_ns[cut]),
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


def _name(span: np.ndarray, *, several: bool) -> str:
    """What a slice is called. Viewers give slices whose names differ in numbers only one colour."""
    kind = Kind(int(span["kind"]))
    if kind in LETTERS:
        stage = f" s{span['stage']}" if several and span["stage"] >= 0 else ""
        evaluation = " evaluation" if span["flags"] & Flag.EVALUATION else ""
        return f"{LETTERS[kind]} {span['microbatch']}{stage}{evaluation}"
    if kind is Kind.COLLECTIVE:
        known = int(span["op"]) in Collective._value2member_map_
        return Collective(int(span["op"])).name.lower() if known else "collective"
    if kind is Kind.HOST:
        known = int(span["op"]) in HostCause._value2member_map_
        return {HostCause.GC: "garbage collection", HostCause.DATA: "waits for data"}.get(
            HostCause(int(span["op"])) if known else HostCause.OTHER, "host"
        )
    words = {Kind.SEND: "send to rank", Kind.RECV: "receive from rank"}
    return f"{words[kind]} {span['peer']}" if kind in words else kind.name.lower()


def arguments(exported: Exported, track: Track, i: int) -> dict[str, int | str]:
    """What a viewer shows of a slice when it is clicked."""
    if track.span[i] < 0:
        row = exported.idle[track.idle[i]]
        return {"stood in": PLACES[row["place"]].value.replace("_", " ")}
    span = exported.spans[track.span[i]]
    shown: dict[str, int | str] = {name: int(span[name]) for name in ("step", "stage", "microbatch") if span[name] >= 0}
    if span["kind"] in (Kind.SEND, Kind.RECV):
        shown |= {name: int(span[name]) for name in ("peer", "tag", "seq", "size_bytes")}
    if span["kind"] == Kind.COLLECTIVE:
        shown |= {"group": int(span["group"]), "size_bytes": int(span["size_bytes"])}
    return shown


def arrow(exported: Exported, track: Track, i: int) -> int | None:
    """The number of the arrow from a send to its receive, the same at both ends; None for slices without one."""
    span = int(track.span[i])
    if span < 0 or track.waits[i] or exported.partner[span] < 0:
        return None
    return min(span, int(exported.partner[span])) + 1
