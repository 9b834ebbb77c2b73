"""The dependency graph of a step, with the measured durations of all steps that have the same structure.

Shape letters: R ranks, N events (a start and an end of each rank included), J joins, E edges, K steps, W worlds.

A *join* is a point at which a rank may have to wait: its start, each wait for a message, its end. Between two joins a
rank only adds up host time and work, so that every edge runs from a join ``src`` over the rank's events ``first`` to
``last`` to a join ``dst``. An edge of a message adds what the message took.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppdiag.analyzers.edges import CyclicOrder, Edges, excess, levels
from ppdiag.analyzers.measured_times import measure
from ppdiag.analyzers.messages import MISSING, number_rows
from ppdiag.analyzers.program import END, POST, START, WAIT, Program
from ppdiag.analyzers.step_blocks import Positions, positions_of, signature
from ppdiag.model import Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ppdiag.analyzers.steps import Steps


class Link(NamedTuple):
    """What a message travels on: a pair of ranks, or (``dst`` None) the process group of index ``src``."""

    src: int
    dst: int | None


@dataclass(frozen=True, slots=True)
class Graph:
    """One structure and all steps that have it. Times in seconds, from the step's start.

    Attributes:
        steps_K: step numbers.
        duration_K: measured length of each step.
        ranks_R: the ranks.
        sources: indices of the ranks that begin the step.
        rank_N: rank index of each event.
        what_N: COMPUTE, POST, WAIT, START or END.
        kind_N, stage_N, microbatch_N: of the event's span.
        span_NK: index of the event's span in the trace, ``MISSING`` for START and END.
        host_NK: host time before the event (and of calls that returned at once).
        work_NK: compute time of the event.
        start_RK: when each rank began its step.
        join_N: index of the last join at or before the event, on its rank.
        joins_J: event of each join; ``MISSING`` for the meeting point of a collective.
        src_E, dst_E: joins; edges are sorted by the level of ``dst``, then ``dst``.
        first_E, last_E: events between which the edge adds up (exclusive of ``first``, inclusive of ``last``).
        link_E: index in ``links``, or ``edges.CHAIN`` where the edge is no message.
        optional_E: a send's wait for its receiver, which does not exist where transfers are free.
        transfer_EK: time of the message in seconds; -inf where it bound nobody.
        level_starts: bounds of the levels in the edges.
        excess_EK: the part of ``transfer_EK`` that is no transfer where the message is a source's guess: a wait whose
            cause the recording does not tell, over the link's usual time. None where there is no such message.
        host_parts: of ``host_NK`` what has a known cause (see ``measured_times``; N x K each); those that occur.
    """

    steps_K: np.ndarray
    duration_K: np.ndarray
    ranks_R: np.ndarray
    sources: np.ndarray
    rank_N: np.ndarray
    what_N: np.ndarray
    kind_N: np.ndarray
    stage_N: np.ndarray
    microbatch_N: np.ndarray
    span_NK: np.ndarray
    host_NK: np.ndarray
    work_NK: np.ndarray
    start_RK: np.ndarray
    join_N: np.ndarray
    joins_J: np.ndarray
    src_E: np.ndarray
    dst_E: np.ndarray
    first_E: np.ndarray
    last_E: np.ndarray
    link_E: np.ndarray
    optional_E: np.ndarray
    transfer_EK: np.ndarray
    level_starts: np.ndarray
    links: tuple[Link, ...]
    excess_EK: np.ndarray | None = None
    host_parts: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def start_joins(self) -> np.ndarray:
        """The joins at which the ranks start (R)."""
        return self.join_N[self.what_N == START]

    @property
    def end_joins(self) -> np.ndarray:
        """The joins at which the ranks end (R)."""
        return self.join_N[self.what_N == END]

    @property
    def work_R(self) -> np.ndarray:
        """Work of each rank over all steps, in seconds."""
        return np.bincount(self.rank_N, weights=self.work_NK.sum(axis=1), minlength=len(self.ranks_R))

    def only(self, columns: Sequence[int] | np.ndarray) -> Graph:
        """The same structure with only these of its steps (indices)."""
        times: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name[-1] == "K"}
        chosen: dict[str, Any] = {name: None if t is None else t[..., columns] for name, t in times.items()}
        return replace(self, **chosen, host_parts={name: t[:, columns] for name, t in self.host_parts.items()})


def build_graphs(program: Program, steps: Steps) -> tuple[list[Graph], int]:
    """One graph for each structure among the analysed steps, largest first; and the steps that had to be left out."""
    events = program.events
    lo = np.searchsorted(events["step"], steps.kept, "left")
    hi = np.searchsorted(events["step"], steps.kept, "right")
    positions = positions_of(program, lo, hi)
    groups: dict[bytes, list[int]] = {}
    for k in range(len(steps.kept)):
        groups.setdefault(signature(program, positions, slice(lo[k], hi[k])), []).append(k)
    graphs, left_out = [], 0
    for members in sorted(groups.values(), key=len, reverse=True):
        try:
            graphs.append(
                _Builder(program, positions, steps, members=np.array(members), blocks_2K=np.stack([lo, hi])).graph()
            )
        except CyclicOrder:
            left_out += len(members)
    return graphs, left_out


class _Builder:
    """Builds the graph of the steps ``members`` (indices into ``steps.kept``), whose blocks have the same structure."""

    def __init__(
        self, program: Program, positions: Positions, steps: Steps, *, members: np.ndarray, blocks_2K: np.ndarray
    ) -> None:
        lo, hi = blocks_2K
        self.program = program
        self.steps_K = steps.kept[members]
        self.zero_K = steps.start_ns[members]
        self.duration_K = steps.duration_s[members]
        self.ranks_R = steps.ranks
        template = slice(int(lo[members[0]]), int(hi[members[0]]))
        self.index_MK = lo[members][None, :] + np.arange(template.stop - template.start)[:, None]
        self.own_post = positions.own_post[template]
        self.partner_post = positions.partner_post[template]
        self.collective = positions.collective[template]
        self._place_events(template)
        self.times = measure(program, self)
        self.host_NK = self.times.host_NK  # calls are added to it

    def _place_events(self, template: slice) -> None:
        """Positions of the block's events among all N events, each rank's between its START and its END."""
        events = self.program.events[template]
        rank = np.searchsorted(self.ranks_R, events["rank"])
        count = len(self.ranks_R)
        self.at_M = np.arange(len(events)) + 2 * rank + 1
        total = len(events) + 2 * count
        self.rank_N = np.repeat(np.arange(count), np.bincount(rank, minlength=count) + 2)
        self.what_N = np.full(total, START, np.uint8)
        self.what_N[self.at_M] = events["what"]
        last = np.append(np.flatnonzero(np.diff(self.rank_N)), total - 1)
        self.what_N[last] = END
        spans = self.program.trace.spans[events["span"]]
        self.fields = {}
        for name in ("kind", "stage", "microbatch", "size_bytes", "flags"):
            self.fields[name] = np.full(total, -1, np.int64)
            self.fields[name][self.at_M] = spans[name]

    def graph(self) -> Graph:
        """Joins, edges and levels."""
        self._number_joins()
        parts = [self._chain_edges(), *self._message_edges(Kind.RECV), *self._message_edges(Kind.SEND)]
        parts += self._collective_edges()
        edges = Edges.join(parts)
        order, level_starts = levels(edges.src, edges.dst, len(self.joins_J))
        edges = edges.take(order)
        return Graph(
            steps_K=self.steps_K,
            duration_K=self.duration_K,
            ranks_R=self.ranks_R,
            sources=np.searchsorted(self.ranks_R, self.program.sources),
            rank_N=self.rank_N,
            what_N=self.what_N,
            kind_N=self.fields["kind"],
            stage_N=self.fields["stage"],
            microbatch_N=self.fields["microbatch"],
            span_NK=self._span_NK(),
            host_NK=self.host_NK,
            work_NK=self.times.work_NK,
            start_RK=self.times.begin_NK[self.what_N == START],
            join_N=self.join_N,
            joins_J=self.joins_J,
            **edges.as_fields(),
            level_starts=level_starts,
            links=tuple(self.links),
            excess_EK=excess(edges) if edges.inferred.any() else None,
            host_parts=self.times.host_parts,
        )

    def _span_NK(self) -> np.ndarray:
        span_NK = np.full(self.times.begin_NK.shape, MISSING, np.int64)
        span_NK[self.at_M] = self.program.events["span"][self.index_MK]
        return span_NK

    def _number_joins(self) -> None:
        is_join = np.isin(self.what_N, (START, WAIT, END))
        self.join_N = np.cumsum(is_join) - 1
        self.joins_J = np.flatnonzero(is_join)
        self.links: list[Link] = []
        self._link_index: dict[Link, int] = {}

    def _link(self, link: Link) -> int:
        if link not in self._link_index:
            self._link_index[link] = len(self.links)
            self.links.append(link)
        return self._link_index[link]

    def _chain_edges(self) -> Edges:
        """From each join of a rank to its next."""
        later = self.joins_J[self.what_N[self.joins_J] != START]
        src = self.join_N[later] - 1
        return Edges.of(src=src, dst=self.join_N[later], first=self.joins_J[src], last=later, steps=len(self.steps_K))

    def _message_edges(self, kind: Kind) -> list[Edges]:
        """From the posts of a message's both ends to the wait of one end (``kind``) for it."""
        block = self.fields["kind"][self.at_M]
        waits = np.flatnonzero((self.what_N[self.at_M] == WAIT) & (block == kind))
        known = (self.partner_post[waits] != MISSING) & (self.own_post[waits] != MISSING)
        self._charge_unmatched(waits[~known])
        waits = waits[known]
        if not len(waits):
            return []
        at, own, partner = self.at_M[waits], self.at_M[self.own_post[waits]], self.at_M[self.partner_post[waits]]
        link = self._message_links(at, partner, kind)
        ready_NK = np.maximum(self.times.done_NK[own], self.times.done_NK[partner])
        transfer_NK = self._transfer(at, ready_NK, link, optional=kind == Kind.SEND)
        return [
            self._edges_from(post, at, link=link, transfer=transfer_NK, optional=kind == Kind.SEND)
            for post in (own, partner)
        ]

    def _message_links(self, at: np.ndarray, partner: np.ndarray, kind: Kind) -> np.ndarray:
        here, there = self.ranks_R[self.rank_N[at]], self.ranks_R[self.rank_N[partner]]
        src, dst = (here, there) if kind == Kind.SEND else (there, here)
        return np.array([self._link(Link(int(a), int(b))) for a, b in zip(src, dst, strict=True)], np.int64)

    def _charge_unmatched(self, waits: np.ndarray) -> None:
        """A wait whose other end is unknown: a short one is the call's cost, a long one stays unexplained."""
        at = self.at_M[waits]
        self._charge_calls(at, self.times.end_NK[at] - self.times.begin_NK[at] > self.times.at_once_s)

    def _charge_calls(self, at: np.ndarray, blocked_NK: np.ndarray) -> None:
        """Waits that returned at once cost host time only."""
        call = np.maximum(self.times.end_NK[at] - np.maximum(self.times.begin_NK[at], self.times.before_NK[at]), 0.0)
        self.host_NK[at] += np.where(blocked_NK, 0.0, call)

    def _transfer(self, at: np.ndarray, ready_NK: np.ndarray, link: np.ndarray, *, optional: bool) -> np.ndarray:
        """What a message took from when both ends were there.

        Measured where the wait blocked: end - max(post of send, post of receive). Where the message was there before
        the wait, it took at most the time since both ends were there: the link's usual time, within that bound.
        """
        begin, end = self.times.begin_NK[at], self.times.end_NK[at]
        blocked = (begin < ready_NK) | (end - begin > self.times.at_once_s)
        self._charge_calls(at, blocked)
        measured = end - ready_NK
        bound = np.maximum(begin - ready_NK, 0.0)
        usual = np.zeros_like(measured) if optional else self._usual(measured, begin < ready_NK, at, link)
        transfer = np.where(blocked, measured, np.minimum(usual, bound))
        # a send that ended before its receive was posted was buffered: it waited for nobody
        return np.where((measured < 0) & optional, -np.inf, transfer)

    def _usual(self, measured: np.ndarray, certain: np.ndarray, at: np.ndarray, link: np.ndarray) -> np.ndarray:
        """Median time of messages of the same link and size that were certainly waited for; 0 where there is none."""
        usual = np.zeros_like(measured)
        same = number_rows(link, self.fields["size_bytes"][at])
        for number in range(int(same.max(initial=-1)) + 1):
            rows = same == number
            values = measured[rows][certain[rows]]
            usual[rows] = max(0.0, float(np.median(values))) if len(values) else 0.0
        return usual

    def _edges_from(
        self, post: np.ndarray, at: np.ndarray, *, link: np.ndarray, transfer: np.ndarray, optional: bool
    ) -> Edges:
        src = self.join_N[post]
        return Edges(
            src=src,
            dst=self.join_N[at],
            first=self.joins_J[src],
            last=post,
            link=link,
            optional=np.full(len(at), optional),
            transfer=transfer,
            inferred=(self.fields["flags"][at] & int(Flag.INFERRED)) != 0,
        )

    def _collective_edges(self) -> list[Edges]:
        """All posts of a collective meet in a join of its own, from which each member's wait hangs."""
        what = self.what_N[self.at_M]
        collective = self.fields["kind"][self.at_M] == Kind.COLLECTIVE
        self._charge_unmatched(np.flatnonzero((what == WAIT) & collective & (self.collective == MISSING)))
        posts = np.flatnonzero((what == POST) & (self.collective != MISSING))
        waits = np.flatnonzero((what == WAIT) & (self.collective != MISSING))
        if not len(waits):
            return []
        _, number = np.unique(self.collective[posts], return_inverse=True)
        number = number.ravel()
        meeting = dict(zip(self.collective[posts].tolist(), number.tolist(), strict=True))
        number_of_wait = np.array([meeting[c] for c in self.collective[waits].tolist()], np.int64)
        at_post, at_wait = self.at_M[posts], self.at_M[waits]
        first_join = len(self.joins_J)
        count = int(number.max()) + 1
        self.joins_J = np.append(self.joins_J, np.full(count, MISSING))
        ready_CK = np.full((count, len(self.steps_K)), -np.inf)
        np.maximum.at(ready_CK, number, self.times.done_NK[at_post])
        link = self._group_links(waits)
        transfer = self._transfer(at_wait, ready_CK[number_of_wait], link, optional=False)
        src = self.join_N[at_post]
        here = np.zeros(len(waits), np.int64)
        to_meeting = Edges.of(
            src=src, dst=first_join + number, first=self.joins_J[src], last=at_post, steps=len(self.steps_K)
        )
        from_meeting = Edges(
            src=first_join + number_of_wait,
            dst=self.join_N[at_wait],
            first=here,
            last=here,
            link=link,
            optional=np.zeros(len(waits), bool),
            transfer=transfer,
            inferred=np.zeros(len(waits), bool),
        )
        return [to_meeting, from_meeting]

    def _group_links(self, waits: np.ndarray) -> np.ndarray:
        spans = self.program.trace.spans
        group = spans["group"][self.program.events["span"][self.index_MK[waits, 0]]]
        return np.array([self._link(Link(int(g), None)) for g in group], np.int64)
