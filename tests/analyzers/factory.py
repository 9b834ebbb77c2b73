"""Makes traces from exact durations: an independent simulation, a few lines of its own.

Two layers. A *program* is what one rank does, action by action; :func:`simulate` runs the programs of all ranks against
each other. :class:`Pipeline` writes the programs of a pipeline schedule. Times are whole nanoseconds, so that hand
calculations are exact.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.model import Collective, Flag, Kind
from ppdiag.trace import SPAN_DTYPE, JobFacts, ProcessGroup, RankFacts, Trace, sorted_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ppdiag.analyzers.schedules import Op

US = 1_000
MS = 1_000_000
SIZE_BYTES = 1024


class Stall(NamedTuple):
    """Host time: the rank does nothing that is recorded."""

    duration: int


class Compute(NamedTuple):
    """One op."""

    kind: Kind
    duration: int
    stage: int = -1
    microbatch: int = -1
    flags: int = 0


class Post(NamedTuple):
    """Posts a send, a receive or a collective under a name that is unique on its rank, and goes on."""

    name: object
    kind: Kind
    peer: int = -1
    stage: int = -1
    microbatch: int = -1
    tag: int = 0
    group: int = 0
    rendezvous: bool = False
    """Of a send: the wait for it ends when the message has arrived, else at once."""
    flags: int = 0


class Wait(NamedTuple):
    """Waits for a post by its name. A post that is never waited for is recorded as such."""

    name: object


Action = Stall | Compute | Post | Wait


@dataclass
class _Rank:
    """One rank of the simulation: what it has still to do, and how far it is."""

    number: int
    actions: list[Action]
    now: int
    at: int = 0
    step: int = 0
    after_optimizer: bool = False
    posts: dict[object, _Posted] = field(default_factory=dict)
    """Those not waited for yet, by name."""


class _Posted(NamedTuple):
    """A post: when it was made, in which step, and as which message of its channel."""

    post: Post
    when: int
    step: int
    channel: tuple[int, ...]
    number: int

    @property
    def key(self) -> tuple[int, ...]:
        """Under which its other ends find it."""
        return (*self.channel, self.number)


class _Simulation:
    def __init__(
        self, ranks: list[_Rank], groups: Sequence[tuple[int, ...]], transfer: Callable[[int, int], int], tail: int
    ) -> None:
        self.ranks = ranks
        self.groups = groups
        self.transfer = transfer
        self.collective_ns = tail
        self.sequence: dict[object, int] = defaultdict(int)
        self.posted: dict[object, int] = {}
        self.rows: list[dict[str, int]] = []

    def run(self) -> None:
        while any(rank.at < len(rank.actions) for rank in self.ranks):
            before = sum(rank.at for rank in self.ranks)
            for rank in self.ranks:
                while rank.at < len(rank.actions) and self._act(rank, rank.actions[rank.at]):
                    rank.at += 1
            assert sum(rank.at for rank in self.ranks) > before, "the programs deadlock"
        for rank in self.ranks:
            for posted in rank.posts.values():
                self._message(rank, posted, posted.when, posted.when, Flag.NEVER_WAITED)

    def _act(self, rank: _Rank, action: Action) -> bool:
        """Whether the action could be done; a wait whose other ends are not posted yet cannot."""
        if isinstance(action, Stall):
            rank.now += action.duration
        elif isinstance(action, Compute):
            self._compute(rank, action)
        elif isinstance(action, Post):
            self._post(rank, action)
        else:
            return self._wait(rank, action)
        return True

    def _compute(self, rank: _Rank, action: Compute) -> None:
        self._count_step(rank, action.kind)
        start = rank.now
        rank.now += action.duration
        row = {"rank": rank.number, "step": rank.step, "kind": action.kind, "start_ns": start, "end_ns": rank.now}
        row |= {"stage": action.stage, "microbatch": action.microbatch, "flags": action.flags}
        self.rows.append(row)

    def _count_step(self, rank: _Rank, kind: Kind) -> None:
        """A step is counted by its rank: up at the first op after an optimizer step."""
        if rank.after_optimizer and kind is not Kind.OPTIMIZER:
            rank.step += 1
        rank.after_optimizer = kind is Kind.OPTIMIZER

    def _post(self, rank: _Rank, post: Post) -> None:
        self._count_step(rank, post.kind)
        src, dst = (rank.number, post.peer) if post.kind is Kind.SEND else (post.peer, rank.number)
        channel = (post.group,) if post.kind is Kind.COLLECTIVE else (src, dst, post.tag)
        number = self.sequence[channel, post.kind, rank.number]
        self.sequence[channel, post.kind, rank.number] += 1
        posted = _Posted(post, rank.now, rank.step, channel, number)
        self.posted[posted.key, rank.number] = rank.now
        rank.posts[post.name] = posted

    def _wait(self, rank: _Rank, wait: Wait) -> bool:
        posted = rank.posts[wait.name]
        post = posted.post
        end = rank.now
        if post.kind is not Kind.SEND or post.rendezvous:
            members = self.groups[post.group] if post.kind is Kind.COLLECTIVE else (rank.number, post.peer)
            if any((posted.key, member) not in self.posted for member in members):
                return False
            ready = max(self.posted[posted.key, member] for member in members)
            src, dst = (rank.number, post.peer) if post.kind is Kind.SEND else (post.peer, rank.number)
            took = self.collective_ns if post.kind is Kind.COLLECTIVE else self.transfer(src, dst)
            end = max(rank.now, ready + took)
        del rank.posts[wait.name]
        self._message(rank, posted, rank.now, end, 0)
        rank.now = end
        return True

    def _message(self, rank: _Rank, posted: _Posted, start: int, end: int, flags: int) -> None:
        post = posted.post
        row = {"rank": rank.number, "step": posted.step, "kind": post.kind, "group": post.group, "peer": post.peer}
        row |= {"start_ns": start, "end_ns": end, "post_ns": posted.when, "flags": flags | post.flags}
        row |= {"stage": post.stage, "microbatch": post.microbatch, "tag": post.tag, "size_bytes": SIZE_BYTES}
        row["seq"] = posted.number
        if post.kind is Kind.COLLECTIVE:
            row["op"] = Collective.ALL_REDUCE
        self.rows.append(row)


def simulate(
    programs: Mapping[int, Sequence[Action]],
    *,
    groups: Sequence[tuple[int, ...]] = (),
    transfer: Callable[[int, int], int] = lambda src, dst: 0,  # noqa: ARG005
    collective: int = 0,
    origin: int = 1_000 * MS,
) -> Trace:
    """The trace of all programs run against each other.

    Args:
        programs: what each rank does.
        groups: members of each process group.
        transfer: ns from when both ends of a message are posted to its arrival, of (source, destination).
        collective: ns from the last post of a collective to its end.
        origin: when every rank begins.
    """
    ranks = [_Rank(number, list(actions), origin) for number, actions in programs.items()]
    groups = groups or [tuple(sorted(programs))]
    simulation = _Simulation(ranks, groups, transfer, collective)
    simulation.run()
    return trace_of(spans_of(simulation.rows), groups)


def spans_of(rows: Sequence[Mapping[str, int]]) -> np.ndarray:
    """Sorted spans of rows, as the hooks write them: labels that do not apply are -1, other fields 0."""
    labels = ("stage", "chunk", "microbatch", "peer", "seq", "group")
    default = dict.fromkeys(SPAN_DTYPE.names or (), 0) | dict.fromkeys(labels, -1)
    filled = [{**default, "post_ns": row["start_ns"], **row} for row in rows]
    return sorted_spans(np.array([tuple(row.values()) for row in filled], SPAN_DTYPE))


def trace_of(spans: np.ndarray, groups: Sequence[tuple[int, ...]] = ()) -> Trace:
    """A trace of these spans: every rank on a host of its own, all on one clock."""
    ranks = sorted({int(rank) for rank in spans["rank"]})
    facts = {rank: RankFacts(rank, host=f"host{rank}", clock="one", status="finished") for rank in ranks}
    named = tuple(ProcessGroup(f"group{index}", tuple(members)) for index, members in enumerate(groups))
    return Trace(spans, JobFacts(source="synthetic", world_size=len(ranks)), facts, named)


def ten_and_twenty(op: Op, rank: int, step: int) -> int:  # noqa: ARG001
    """F takes 10 ms, B 20 ms (10 and 10 where W is split off)."""
    return {"F": 10 * MS, "B": 20 * MS, "W": 10 * MS}[op.kind.name[0]]


@dataclass
class Pipeline:
    """A pipeline to simulate, alike in every step but for its durations. Times in ns, steps counted from 0."""

    orders: Sequence[Sequence[Op]] = field(repr=False)
    """Ops of each rank of one replica."""
    stage_rank: Sequence[int]
    """Stage -> position of its rank along the pipeline."""
    duration: Callable[[Op, int, int], int] = ten_and_twenty
    """Of (op, rank, step)."""
    transfer: Callable[[int, int], int] = lambda src, dst: 0  # noqa: ARG005
    """Of (source rank, destination rank)."""
    before_optimizer: Callable[[int, int], int] = lambda rank, step: 0  # noqa: ARG005
    """Host time of (rank, step) before the tail; likewise ``between`` the optimizer and the next step."""
    between: Callable[[int, int], int] = lambda rank, step: 0  # noqa: ARG005
    host_gap: int | Callable[[Op, int, int], int] = 0
    """Host time before an op, before its receive is posted; of (op, rank, step)."""
    optimizer: int = 1 * MS
    steps: int = 4
    origin: int = 1_000 * MS
    rendezvous: bool = False
    """A send is posted together with the next receive and waited for before it, until it is taken (NCCL, gloo)."""
    replicas: int = 1
    """Data-parallel copies: rank = replica x P + position."""
    tail: int | None = None
    """ns of an all-reduce over the ranks of the same position before the optimizer; None for none."""
    tail_of_all: bool = False
    """The all-reduce of the tail is over all ranks (the gradients' norm): no rank runs ahead into the next step."""

    def trace(self) -> Trace:
        """Simulates and returns the trace."""
        ranks = len(self.orders)
        replicas = range(self.replicas)
        groups = [tuple(replica * ranks + p for p in range(ranks)) for replica in replicas]
        groups += [tuple(replica * ranks + p for replica in replicas) for p in range(ranks)]
        groups += [tuple(range(ranks * self.replicas))]
        programs = {rank: list(self._program(rank)) for rank in range(ranks * self.replicas)}
        return simulate(programs, groups=groups, transfer=self.transfer, collective=self.tail or 0, origin=self.origin)

    def _program(self, rank: int) -> Iterator[Action]:
        group = self.replicas + (len(self.orders) if self.tail_of_all else rank % len(self.orders))
        for step in range(self.steps):
            yield from self._pipeline(rank, step)
            yield Stall(self.before_optimizer(rank, step))
            if self.tail is not None:
                yield Post("tail", Kind.COLLECTIVE, group=group)
                yield Wait("tail")
            yield Compute(Kind.OPTIMIZER, self.optimizer)
            yield Stall(self.between(rank, step))

    def _pipeline(self, rank: int, step: int) -> Iterator[Action]:
        replica, position = divmod(rank, len(self.orders))
        ops = self.orders[position]
        ahead = None  # the receive of the next op, where it was posted along with a send
        for op, following in zip(ops, [*ops[1:], None], strict=True):
            gap = self.host_gap if isinstance(self.host_gap, int) else self.host_gap(op, rank, step)
            yield Stall(gap)
            receive = ahead or self._receive(op, replica, step)
            if receive is not None:
                if ahead is None:
                    yield receive
                yield Wait(receive.name)
            yield Compute(op.kind, self.duration(op, rank, step), op.stage, op.microbatch)
            ahead = None
            send = self._send(op, replica, step)
            if send is not None:
                yield send
            if send is not None and self.rendezvous:
                ahead = following and self._receive(following, replica, step)
                if ahead is not None:
                    yield ahead
                yield Wait(send.name)

    def _receive(self, op: Op, replica: int, step: int) -> Post | None:
        """The message that an op needs from another rank."""
        return self._message(Kind.RECV, op, op.stage - _direction(op.kind), replica, step, source=-_direction(op.kind))

    def _send(self, op: Op, replica: int, step: int) -> Post | None:
        """The message that an op makes for another rank."""
        return self._message(Kind.SEND, op, op.stage + _direction(op.kind), replica, step, source=0)

    def _message(self, kind: Kind, op: Op, other: int, replica: int, step: int, *, source: int) -> Post | None:
        """A message between the op's stage and another; its tag is the stage that made it and the direction."""
        outside = op.kind is Kind.WEIGHT or not 0 <= other < len(self.stage_rank)
        if outside or self.stage_rank[other] == self.stage_rank[op.stage]:
            return None
        peer = replica * len(self.orders) + self.stage_rank[other]
        return Post(
            name=(kind, *op, step),
            kind=kind,
            peer=peer,
            stage=op.stage,
            microbatch=op.microbatch,
            tag=2 * (op.stage + source) + int(op.kind is Kind.BACKWARD),
            group=replica,
            rendezvous=self.rendezvous,
        )


def _direction(kind: Kind) -> int:
    return 1 if kind is Kind.FORWARD else -1
