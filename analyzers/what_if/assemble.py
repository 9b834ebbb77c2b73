"""From the events of all ranks, as another order would have them, to a graph that can be replayed.

Shape letters: N events, J joins, E edges, K steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppdiag.analyzers.edges import Edges, levels
from ppdiag.analyzers.graph import Graph, Link
from ppdiag.analyzers.messages import MISSING
from ppdiag.analyzers.program import END, START, WAIT

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence


class Event(NamedTuple):
    """An event of a rank (its index), as ``graph.Graph`` has them; times of None are 0."""

    rank: int
    what: int
    kind: int = -1
    stage: int = -1
    microbatch: int = -1
    work: np.ndarray | None = None
    host: np.ndarray | None = None


@dataclass
class Ends:
    """Events of a message: posts and waits of both ends; ``MISSING`` where there is none."""

    send_post: int = MISSING
    send_wait: int = MISSING
    recv_post: int = MISSING
    recv_wait: int = MISSING
    time: np.ndarray | None = None
    """What it takes (K); None for what is usual on its link."""

    @property
    def whole(self) -> bool:
        """Whether it is sent and received."""
        return MISSING not in (self.send_post, self.recv_post, self.recv_wait)


@dataclass
class Meeting:
    """A collective: the events of its posts, and event, link and time (K) of each wait."""

    posts: list[int] = field(default_factory=list)
    waits: list[tuple[int, int, np.ndarray]] = field(default_factory=list)


@dataclass
class Script:
    """What all ranks do: events, rank by rank in order, and how they belong together."""

    events: list[Event] = field(default_factory=list)
    messages: dict[Hashable, Ends] = field(default_factory=dict)
    meetings: list[Meeting] = field(default_factory=list)

    def add(self, event: Event) -> int:
        """Appends an event and returns its index."""
        self.events.append(event)
        return len(self.events) - 1

    def ends(self, name: Hashable) -> Ends:
        """The ends of the message of this name, made when first asked for."""
        return self.messages.setdefault(name, Ends())

    def of_ranks(self, ranks: Sequence[int]) -> Script:
        """The same with the ranks counted among these alone; no other may have an event."""
        number = {rank: i for i, rank in enumerate(ranks)}
        return replace(self, events=[event._replace(rank=number[event.rank]) for event in self.events])


def assemble(
    script: Script, measured: Graph, link_time: Mapping[tuple[int, int], np.ndarray], *, overlap: bool
) -> Graph:
    """The graph of a script, for the ranks and steps of the measured one.

    Args:
        script: what the ranks do.
        measured: the graph of the run.
        link_time: time of a message in each step (K) on each link of two ranks; others take the mean of these.
        overlap: a message travels as soon as it is sent, though its receive may not be posted yet.

    Raises:
        CyclicOrder: the events wait for each other in a circle.
    """
    what_N = np.array([event.what for event in script.events], np.uint8)
    is_join = np.isin(what_N, (START, WAIT, END))
    join_N, joins_J = np.cumsum(is_join) - 1, np.flatnonzero(is_join)
    steps = len(measured.steps_K)
    ends = [message for message in script.messages.values() if message.whole]
    links = list(measured.links)
    parts = [_chain(what_N, join_N, joins_J, steps)]
    if ends:
        parts += _message_edges(
            _Wires(script, measured, links, link_time).of(ends), ends, join_N, joins_J, overlap=overlap
        )
    parts += _meeting_edges(script.meetings, join_N, joins_J, steps)
    joins_J = np.append(joins_J, np.full(len(script.meetings), MISSING))
    edges = Edges.join(parts)
    order, level_starts = levels(edges.src, edges.dst, len(joins_J))
    edges = edges.take(order)
    return replace(
        measured,
        **_event_columns(script.events, steps),
        what_N=what_N,
        join_N=join_N,
        joins_J=joins_J,
        **edges.as_fields(),
        level_starts=level_starts,
        links=tuple(links),
        excess_EK=None,
        host_parts={},
    )


def _event_columns(events: Sequence[Event], steps: int) -> dict[str, Any]:
    rank, _, kind, stage, microbatch = np.array([event[:5] for event in events]).T
    work_NK, host_NK = np.zeros((len(events), steps)), np.zeros((len(events), steps))
    for i, event in enumerate(events):
        if event.work is not None:
            work_NK[i] = event.work
        if event.host is not None:
            host_NK[i] = event.host
    span_NK = np.repeat(np.arange(len(events))[:, None], steps, axis=1)
    return {"rank_N": rank, "kind_N": kind, "stage_N": stage, "microbatch_N": microbatch, "span_NK": span_NK,
            "work_NK": work_NK, "host_NK": host_NK}  # fmt: skip


def _chain(what_N: np.ndarray, join_N: np.ndarray, joins_J: np.ndarray, steps: int) -> Edges:
    """From each join of a rank to its next."""
    later = joins_J[what_N[joins_J] != START]
    src = join_N[later] - 1
    return Edges.of(src=src, dst=join_N[later], first=joins_J[src], last=later, steps=steps)


class _Wires:
    """The link of each message, and what it takes there."""

    def __init__(
        self, script: Script, measured: Graph, links: list[Link], link_time: Mapping[tuple[int, int], np.ndarray]
    ) -> None:
        self.events, self.ranks_R, self.links, self.time = script.events, measured.ranks_R, links, link_time
        nothing = np.zeros(len(measured.steps_K))
        self.usual = np.mean(np.stack(list(link_time.values())), axis=0) if link_time else nothing
        self.number = {link: i for i, link in enumerate(links)}

    def of(self, ends: Sequence[Ends]) -> tuple[np.ndarray, np.ndarray]:
        """Index of the link, and the time (K), of each message."""
        rank_N = self.ranks_R[np.array([event.rank for event in self.events])]
        pairs = [(int(rank_N[message.send_post]), int(rank_N[message.recv_post])) for message in ends]
        for src, dst in dict.fromkeys(pairs):
            if Link(src, dst) not in self.number:
                self.number[Link(src, dst)] = len(self.links)
                self.links.append(Link(src, dst))
        usual = (self.time.get(pair, self.usual) for pair in pairs)
        times = np.stack([own if m.time is None else m.time for m, own in zip(ends, usual, strict=True)])
        return np.array([self.number[Link(*pair)] for pair in pairs]), times


def _message_edges(
    wires: tuple[np.ndarray, np.ndarray],
    ends: Sequence[Ends],
    join_N: np.ndarray,
    joins_J: np.ndarray,
    *,
    overlap: bool,
) -> list[Edges]:
    """From the posts of both ends to the receiver's wait, and to the sender's where it waits."""
    link, time = wires
    send_post, send_wait, recv_post, recv_wait = np.array(
        [(m.send_post, m.send_wait, m.recv_post, m.recv_wait) for m in ends]
    ).T
    waited = np.flatnonzero(send_wait != MISSING)
    every = np.arange(len(ends))
    chosen = [(every, send_post, recv_wait, False)]
    if not overlap:
        chosen += [(every, recv_post, recv_wait, False)]
        chosen += [(waited, post, send_wait, True) for post in (send_post, recv_post) if len(waited)]
    return [
        Edges(
            src=join_N[post[rows]],
            dst=join_N[wait[rows]],
            first=joins_J[join_N[post[rows]]],
            last=post[rows],
            link=link[rows],
            optional=np.full(len(rows), optional),
            transfer=time[rows],
            inferred=np.zeros(len(rows), bool),
        )
        for rows, post, wait, optional in chosen
    ]


def _meeting_edges(meetings: Sequence[Meeting], join_N: np.ndarray, joins_J: np.ndarray, steps: int) -> list[Edges]:
    """From the posts of each collective to a join of its own, and from there to its members' waits."""
    parts = []
    for join, meeting in enumerate(meetings, start=len(joins_J)):
        posts = np.array(meeting.posts)
        src, dst = join_N[posts], np.full(len(posts), join)
        parts.append(Edges.of(src=src, dst=dst, first=joins_J[src], last=posts, steps=steps))
        waits = [wait for wait, _, _ in meeting.waits]
        here, none = np.zeros(len(waits), np.int64), np.zeros(len(waits), bool)
        link, time = (
            np.array([number for _, number, _ in meeting.waits]),
            np.stack([row for _, _, row in meeting.waits]),
        )
        parts.append(Edges(np.full(len(waits), join), join_N[waits], here, here, link, none, time, none))
    return parts
