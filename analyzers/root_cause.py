"""Where idle time began: each wait is followed back along those that kept it waiting.

A rank that stands at a join arrived there over one chain of ops, host gaps and messages (its own), and was released
over another: that of the late sender, which may itself have waited for a third. Both chains are followed backward until
they meet. The wait is as long as the second chain since then is longer than the first, so that what lies on both sides
alike cancels, and what is left are the delays and their origins: a sender that only passes a delay on is charged
nothing.

What the schedule itself makes a rank wait at this join (as in the world without host time and transfers, with equal
work) is charged to the schedule. The rest of the wait is shared out over what the releasing chain has over that world
and over the waiter's own chain: work over the mean of its kind, host time, transfers.

Source of the model: the delay analysis of Scalasca, in which a wait costs its origins their own excess and passes the
rest on to the waits before: D. Boehme, M. Geimer, F. Wolf, L. Arnold, "Identifying the root causes of wait states in
large-scale parallel applications" (ICPP 2010).

Shape letters: R ranks, N events, J joins, E edges, K steps, C classes of origins (numbers; ``_Classes``), O ops of one
rank that are told apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.critical_path import bindings, critical_path, waits
from ppdiag.analyzers.edges import CHAIN
from ppdiag.analyzers.messages import MISSING
from ppdiag.analyzers.program import COMPUTE, START
from ppdiag.analyzers.replay import World, replay
from ppdiag.analyzers.why import equal_work
from ppdiag.model import Kind
from ppdiag.origins import Origin, RootCause

if TYPE_CHECKING:
    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.shape import Shape
    from ppdiag.trace import Trace

MOST_CELLS = 4_000_000
"""Bound on events x steps x ops told apart on a rank: of more, steps are left out."""
MOST_WAITS = 100_000
"""Waits that are followed back at once."""
MOST_STEPS_BACK = 2
"""Chains that lead through more steps than this are charged to the step before."""
SHORTEST_S = 1e-9
"""Shorter waits are the rounding of sums of doubles."""
ROUNDING = 1e-12
"""Less of the step than this is the rounding of sums of doubles."""
MOSTLY = 0.8
"""Share of an origin's time that must lie on one rank for the rank to be named."""


def root_cause(graph: Graph, trace: Trace, shape: Shape, *, idle: float, step_of: np.ndarray) -> RootCause:
    """The origins of the idle time, and the critical path of the median step.

    Args:
        graph: the most frequent structure.
        trace: for the names of process groups.
        shape: which rank holds which stage.
        idle: the idle fraction; what no origin explains of it is an origin of its own.
        step_of: the number that the record gives each step.
    """
    median = int(np.argsort(graph.duration_K)[len(graph.duration_K) // 2])
    one = graph.only([median])
    measured = replay(one, [World()], keep_joins=True).join_JWK
    assert measured is not None
    path = critical_path(one, measured[:, 0], int(step_of[graph.steps_K[median]]))
    chosen = graph.only(_steps_to_follow(graph))
    classes = _Classes.of(chosen)
    waited_C, own_C = _charge(chosen, classes)
    total_s = float(chosen.duration_K.sum()) * len(chosen.ranks_R)
    origins = _Naming(chosen, trace, shape).origins(classes, waited_C / total_s, own_C / total_s)
    return RootCause(_summing_to(idle, origins), len(chosen.steps_K), path)


def _steps_to_follow(graph: Graph) -> np.ndarray:
    """Steps in a row where all are too many, so that what a step leaves to the next can be followed."""
    ops = max(1, _ops_told_apart(graph)[1])
    most = max(1, MOST_CELLS // (ops * len(graph.rank_N)))
    first = max(0, (len(graph.steps_K) - most) // 2)
    return np.arange(first, min(first + most, len(graph.steps_K)))


def _ops_told_apart(graph: Graph) -> tuple[np.ndarray, int]:
    """The number of each event's (stage, kind) on its rank, else ``MISSING``; and the most that any rank has."""
    events = np.flatnonzero(graph.what_N == COMPUTE)
    kind = graph.kind_N[events]
    stage = np.where(kind == Kind.OPTIMIZER, -1, graph.stage_N[events])
    rows, number = np.unique(np.stack([graph.rank_N[events], stage, kind]), axis=1, return_inverse=True)
    first = np.searchsorted(rows[0], np.arange(len(graph.ranks_R)))
    op_N = np.full(len(graph.rank_N), MISSING)
    op_N[events] = number.ravel() - first[graph.rank_N[events]]
    return op_N, int(op_N.max(initial=MISSING)) + 1


@dataclass(frozen=True, slots=True)
class _Classes:
    """Numbers of origins: ops by rank, then host time by rank, then messages by link, and three more.

    Attributes:
        op_N: op of each event among those of its rank.
        ops: ops told apart on each rank (O).
        host, link: first number of host time and of messages.
        schedule, before, count: number of the schedule and of the steps before; how many there are.
    """

    op_N: np.ndarray
    ops: int
    host: int
    link: int
    schedule: int
    before: int
    count: int

    @classmethod
    def of(cls, graph: Graph) -> _Classes:
        op_N, ops = _ops_told_apart(graph)
        host = len(graph.ranks_R) * ops
        link = host + len(graph.ranks_R)
        schedule = link + len(graph.links)
        return cls(op_N, ops, host, link, schedule, schedule + 1, schedule + 2)


def _charge(graph: Graph, classes: _Classes) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of waiting that began at each class, and seconds in which the class's own rank stood still (C each)."""
    equal_NK = equal_work(graph)
    nothing = World(equal_NK, np.zeros(len(graph.ranks_R)), np.zeros(len(graph.links)))
    join_JWK = replay(graph, [World(), nothing], keep_joins=True).join_JWK
    assert join_JWK is not None
    chains = _Chains(graph, classes, join_JWK[:, 0], equal_NK)
    wait_JK = chains.found.wait_JK
    scheduled_JK = _of_the_schedule(graph, wait_JK, waits(graph, join_JWK[:, 1], equal_NK))
    delayed_JK = wait_JK - scheduled_JK
    waited_C = np.zeros(classes.count)
    waited_C[classes.schedule] = scheduled_JK.sum()
    join, step = np.nonzero(delayed_JK > SHORTEST_S)
    for at in range(0, len(join), MOST_WAITS):
        part = slice(at, at + MOST_WAITS)
        waited_C += chains.charge(join[part], step[part], delayed_JK[join[part], step[part]])
    own_C = np.zeros(classes.count)
    own_C[classes.host : classes.link] = np.bincount(graph.rank_N, graph.host_NK.sum(axis=1), len(graph.ranks_R))
    return waited_C, own_C


def _of_the_schedule(graph: Graph, wait_JK: np.ndarray, equal_JK: np.ndarray) -> np.ndarray:
    """As much of each wait as the equal world (``equal_JK``) has between the same two ops.

    Waits with no op in between are compared together: where a send is waited for before the next receive, it is the
    send that waits for the peer, and where transfers are free the receive.
    """
    between_N = np.cumsum(np.isin(graph.what_N, (COMPUTE, START)))
    number_J = np.where(graph.joins_J == MISSING, 0, between_N[graph.joins_J])
    count = int(between_N[-1]) + 1
    waited, equal = np.zeros((count, wait_JK.shape[1])), np.zeros((count, wait_JK.shape[1]))
    np.add.at(waited, number_J, wait_JK)
    np.add.at(equal, number_J, equal_JK)
    share = np.divide(np.minimum(waited, equal), waited, out=np.zeros_like(waited), where=waited > 0)
    return np.asarray(share[number_J] * wait_JK)


class _Chains:
    """Follows chains of binding edges backward, many at once."""

    def __init__(self, graph: Graph, classes: _Classes, join_JK: np.ndarray, equal_NK: np.ndarray) -> None:
        self.graph, self.classes = graph, classes
        self.found = bindings(graph, join_JK)
        self.host_NK = np.cumsum(graph.host_NK, axis=0)
        excess_NK = graph.work_NK - equal_NK
        own = [np.where((classes.op_N == op)[:, None], excess_NK, 0.0) for op in range(classes.ops)]
        self.work_ONK = np.stack([np.cumsum(excess, axis=0) for excess in own])
        self.level_J = np.zeros(len(graph.joins_J), np.int64)
        level_E = np.repeat(np.arange(1, len(graph.level_starts)), np.diff(graph.level_starts))
        self.level_J[graph.dst_E] = level_E
        self.end_of_start_J = np.full(len(graph.joins_J), MISSING)
        self.end_of_start_J[graph.start_joins] = graph.end_joins
        before = np.searchsorted(graph.steps_K, graph.steps_K - 1)
        follows = graph.steps_K[np.minimum(before, len(graph.steps_K) - 1)] == graph.steps_K - 1
        self.before_K = np.where(follows, before, np.arange(len(graph.steps_K)))  # else a step follows itself

    def charge(self, join: np.ndarray, step: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """The seconds of these waits by the classes at which they began (C)."""
        amounts = _Amounts(len(join), self.classes)
        late, own = _Ends(join.copy(), step.copy()), _Ends(join.copy(), step.copy())
        everyone = np.arange(len(join))
        self._cross(late, everyone, self.found.binding_JK[join, step], amounts.late)
        self._cross(own, everyone, self.found.chain_J[join], amounts.own)
        apart = everyone[late.join != own.join]
        while len(apart):
            ahead = self._key(late, apart) - self._key(own, apart)
            going = self._go_back(late, apart[ahead >= 0], amounts.late)
            going &= self._go_back(own, apart[ahead <= 0], amounts.own)
            apart = apart[going[apart] & ~late.meets(own, apart)]
        return amounts.shared_out(seconds)

    def _key(self, ends: _Ends, which: np.ndarray) -> np.ndarray:
        """Falls along every chain."""
        return self.level_J[ends.join[which]] - len(self.graph.level_starts) * ends.steps_back[which]

    def _go_back(self, ends: _Ends, which: np.ndarray, amounts: _Column) -> np.ndarray:
        """Moves these ends one edge back, over the start of a step to the end of the one before.

        Returns a mask of all waits: false where the end stands at a start beyond which nothing is followed.
        """
        going = np.ones(len(ends.join), bool)
        edge = self.found.binding_JK[ends.join[which], ends.step[which]]
        at_start = edge == MISSING
        wrapped = which[at_start]
        going[wrapped] = ends.steps_back[wrapped] < MOST_STEPS_BACK
        ends.steps_back[wrapped] += 1
        ends.join[wrapped] = self.end_of_start_J[ends.join[wrapped]]
        ends.step[wrapped] = self.before_K[ends.step[wrapped]]
        self._cross(ends, which[~at_start], edge[~at_start], amounts)
        return going

    def _cross(self, ends: _Ends, which: np.ndarray, edge: np.ndarray, amounts: _Column) -> None:
        """Notes what lies on these edges, and moves the ends to where they come from."""
        graph, classes = self.graph, self.classes
        step, first, last = ends.step[which], graph.first_E[edge], graph.last_E[edge]
        rank = graph.rank_N[last]
        for op in range(classes.ops):
            work_NK = self.work_ONK[op]
            amounts.add(which, rank * classes.ops + op, work_NK[last, step] - work_NK[first, step])
        amounts.add(which, classes.host + rank, self.host_NK[last, step] - self.host_NK[first, step])
        message = graph.link_E[edge] != CHAIN
        transfer = np.maximum(graph.transfer_EK[edge[message], step[message]], 0.0)
        amounts.add(which[message], classes.link + graph.link_E[edge[message]], transfer)
        ends.join[which] = graph.src_E[edge]


class _Ends:
    """How far each of many chains has been followed."""

    def __init__(self, join: np.ndarray, step: np.ndarray) -> None:
        self.join, self.step = join, step
        self.steps_back = np.zeros(len(join), np.int64)

    def meets(self, other: _Ends, which: np.ndarray) -> np.ndarray:
        """Whether these stand at the same join of the same step as the other's."""
        return (self.join[which] == other.join[which]) & (self.steps_back[which] == other.steps_back[which])


class _Column:
    """What was noted along chains: (wait, class, seconds)."""

    def __init__(self) -> None:
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, wait: np.ndarray, number: np.ndarray, seconds: np.ndarray) -> None:
        """Notes seconds of a class for each of these waits."""
        some = np.abs(seconds) > SHORTEST_S
        if some.any():
            self.parts.append((wait[some], number[some], seconds[some]))

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All of it, joined."""
        nothing = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        wait, number, seconds = (np.concatenate(column) for column in zip(nothing, *self.parts, strict=True))
        return wait, number, seconds


class _Amounts:
    """What the two chains of each wait consist of, by class."""

    def __init__(self, count: int, classes: _Classes) -> None:
        self.count, self.classes = count, classes
        self.late, self.own = _Column(), _Column()

    def shared_out(self, seconds: np.ndarray) -> np.ndarray:
        """Each wait's seconds in proportion to what the late chain has of a class over the schedule and over the own.

        Where it has nothing over them, an earlier step is to blame: the chains did not meet (C).
        """
        late, own = self.late.rows(), self.own.rows()
        keys, index = np.unique(
            np.concatenate([late[0] * self.classes.count + late[1], own[0] * self.classes.count + own[1]]),
            return_inverse=True,
        )
        late_s = np.bincount(index[: len(late[0])], late[2], len(keys))
        own_s = np.bincount(index[len(late[0]) :], own[2], len(keys))
        wait, number = np.divmod(keys, self.classes.count)
        over = np.maximum(np.minimum(late_s, late_s - own_s), 0.0)
        total = np.bincount(wait, over, self.count)
        scale = np.divide(seconds, total, out=np.zeros(self.count), where=total > 0)
        charged = np.bincount(number, over * scale[wait], self.classes.count)
        charged[self.classes.before] += seconds[total <= 0].sum()
        return charged


class _Naming:
    """Names the classes, and joins those that are one place to the reader: the replicas of a stage or a link."""

    def __init__(self, graph: Graph, trace: Trace, shape: Shape) -> None:
        self.graph, self.trace, self.shape = graph, trace, shape

    def origins(self, classes: _Classes, waited_C: np.ndarray, own_C: np.ndarray) -> list[Origin]:
        """One row for each place, from fractions by class."""
        events = np.flatnonzero(classes.op_N != MISSING)
        number, first = np.unique(self.graph.rank_N[events] * classes.ops + classes.op_N[events], return_index=True)
        named: list[tuple[int, tuple[Origin, int | None]]]
        named = [(int(c), self._op(int(n))) for c, n in zip(number, events[first], strict=True)]
        ranks = self.graph.ranks_R.tolist()
        named += [(classes.host + r, (_origin("host", rank=rank), rank)) for r, rank in enumerate(ranks)]
        named += [(classes.link + i, self._link(i)) for i in range(len(self.graph.links))]
        named += [(classes.schedule, (_origin("schedule"), None)), (classes.before, (_origin("step before"), None))]
        groups: dict[Origin, list[tuple[int, int | None]]] = {}
        for number_of_class, (place, rank) in named:
            groups.setdefault(place, []).append((number_of_class, rank))
        return [_joined(place, members, waited_C, own_C) for place, members in groups.items()]

    def _op(self, event: int) -> tuple[Origin, int | None]:
        kind = Kind(int(self.graph.kind_N[event]))
        stage = int(self.graph.stage_N[event])
        place = _origin("work", op=kind.name.lower(), stage=None if kind is Kind.OPTIMIZER or stage < 0 else stage)
        return place, int(self.graph.ranks_R[self.graph.rank_N[event]])

    def _link(self, index: int) -> tuple[Origin, int | None]:
        link = self.graph.links[index]
        if link.dst is None:
            return _origin("collective", group=self.trace.groups[link.src].name), None
        return _origin("message", link=self.shape.stages_of_link(link.src, link.dst)), link.src


def _origin(what: str, **place: object) -> Origin:
    """A place, without its share."""
    nowhere = {"stage": None, "op": None, "rank": None, "link": None, "group": None}
    return Origin(what=what, fraction=0.0, own_fraction=0.0, **{**nowhere, **place})  # type: ignore[arg-type]


def _joined(place: Origin, members: list[tuple[int, int | None]], waited_C: np.ndarray, own_C: np.ndarray) -> Origin:
    numbers = [number for number, _ in members]
    share = waited_C[numbers] + own_C[numbers]
    total = float(share.sum())
    largest = int(np.argmax(share))
    rank = members[largest][1] if share[largest] >= MOSTLY * total else None
    return replace(place, rank=rank, fraction=total, own_fraction=float(own_C[numbers].sum()))


def _summing_to(idle: float, origins: list[Origin]) -> tuple[Origin, ...]:
    """The origins that cost anything, the largest first, with what they leave of the idle time as one of their own.

    They come from the replay of some steps; where they are more than was measured over all, they are scaled down.
    """
    total = sum(origin.fraction for origin in origins)
    scale = min(1.0, idle / total) if total > 0 else 0.0
    scaled = [
        replace(origin, fraction=scale * origin.fraction, own_fraction=scale * origin.own_fraction)
        for origin in origins
        if origin.fraction > 0
    ]
    left = idle - scale * total
    if left > ROUNDING:
        scaled.append(replace(_origin("unexplained"), fraction=left))
    return tuple(sorted(scaled, key=lambda origin: -origin.fraction))
