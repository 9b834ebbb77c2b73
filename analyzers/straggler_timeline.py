"""The ops of a job as StragglerAnalysis sees them: a table, and the order in which a step's ops run.

What the numbers made of it mean is in :mod:`ppdiag.analyzers.stragglers`, with the source of these definitions.

Shape letters: O ops of one replica in one step, S steps, D replicas, P stages.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.analyzers.messages import number_rows
from ppdiag.errors import BadRecord
from ppdiag.model import HostCause, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ppdiag.trace import Trace

BUFFERED_S = 10e-3
"""A message that ends this long before the last of its ends began was buffered: it took no time of its own."""
TYPES = {
    (Kind.FORWARD, 0): "forward-compute",
    (Kind.BACKWARD, 0): "backward-compute",
    (Kind.SEND, Payload.ACTIVATION): "forward-send",
    (Kind.RECV, Payload.ACTIVATION): "forward-recv",
    (Kind.SEND, Payload.GRADIENT): "backward-send",
    (Kind.RECV, Payload.GRADIENT): "backward-recv",
    (Kind.OPTIMIZER, 0): "optimizer",
    (Kind.HOST, HostCause.GC): "gc",
}
"""Type of the spans that are no collectives; a collective's is the name of its group."""
GATHER, SCATTER, CLIP = "params-all-gather", "grads-reduce-scatter", "optimizer-clip-main-grad"
EMBEDDING, LAYERNORM = "embedding-grads-all-reduce", "layernorm-grads-all-reduce"
TAIL = ("gc", LAYERNORM, EMBEDDING, SCATTER, CLIP, "optimizer")
"""Order of a step's tail on a stage."""
WITH_TWINS = (GATHER, SCATTER, CLIP)
"""Collectives of all replicas."""


class Op(NamedTuple):
    """One op of a replica: the n-th of its type on its stage in a step."""

    type: str
    number: int
    stage: int


@dataclass(frozen=True, slots=True)
class Table:
    """The ops of a replica, and when each began and ended in every step and replica, in seconds."""

    ops: tuple[Op, ...]
    steps: tuple[int, ...]
    rank_DP: np.ndarray
    start_OSD: np.ndarray
    end_OSD: np.ndarray


def tabulate(trace: Trace) -> Table:
    """The table of a job.

    Raises:
        BadRecord: the steps and replicas do not all have the same ops.
    """
    types, type_of = _types(trace)
    if (np.isin(trace.spans["kind"], (Kind.SEND, Kind.RECV)) & (type_of < 0)).any():
        raise BadRecord(f"{trace.job.source}: its messages do not say whether they carry activations or gradients")
    spans, type_of = trace.spans[type_of >= 0], type_of[type_of >= 0]
    rank_DP = _places(trace)
    replica, stage = _place_of_each(spans["rank"], rank_DP)
    number = _position(number_rows(spans["rank"], spans["step"], type_of))
    op_of = number_rows(stage, type_of, number)
    steps, step_of = np.unique(spans["step"], return_inverse=True)
    shape = (int(op_of.max(initial=-1)) + 1, len(steps), len(rank_DP))
    counts = np.zeros(shape, np.int64)
    np.add.at(counts, (op_of, step_of, replica), 1)
    if not counts.size or (counts != 1).any():
        raise BadRecord(f"{trace.job.source}: its steps and replicas do not all have the same ops")
    start, end = np.empty(shape), np.empty(shape)
    start[op_of, step_of, replica] = spans["start_ns"] / 1e9
    end[op_of, step_of, replica] = spans["end_ns"] / 1e9
    first = np.unique(op_of, return_index=True)[1]
    ops = tuple(Op(types[type_of[i]], int(number[i]), int(stage[i])) for i in first)
    facts = trace.ranks[int(spans["rank"][0])].facts
    return Table(ops, tuple(facts.get("step_numbers", steps.tolist())), rank_DP, start, end)


def _types(trace: Trace) -> tuple[list[str], np.ndarray]:
    """Names of types, and the index of each span's type among them; -1 for spans of no type known here."""
    spans = trace.spans
    groups = sorted({group.name for group in trace.groups} & {*TAIL, GATHER})
    types = [*TYPES.values(), *groups]
    type_of = np.full(len(spans), -1, np.int64)
    for index, (kind, op) in enumerate(TYPES):
        type_of[(spans["kind"] == kind) & (spans["op"] == op)] = index
    of_group = np.array([types.index(g.name) if g.name in groups else -1 for g in trace.groups] or [-1])
    collective = spans["kind"] == Kind.COLLECTIVE
    type_of[collective] = of_group[spans["group"][collective]]
    return types, type_of


def _places(trace: Trace) -> np.ndarray:
    """The rank at each place (replicas x stages): the n-th rank of every stage is the n-th replica's."""
    spans = trace.spans
    work = np.isin(spans["kind"], (Kind.FORWARD, Kind.BACKWARD))
    pairs = np.unique(np.stack([spans["stage"][work], spans["rank"][work]], axis=1), axis=0)
    holders = [pairs[pairs[:, 0] == stage, 1] for stage in np.unique(pairs[:, 0])]
    if len({len(ranks) for ranks in holders}) != 1 or len(np.unique(pairs[:, 1])) != len(pairs):
        raise BadRecord(f"{trace.job.source}: expected one stage a rank and as many ranks of each stage")
    return np.stack(holders, axis=1)


def _place_of_each(rank: np.ndarray, rank_DP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(rank_DP, axis=None)
    flat = order[np.searchsorted(rank_DP.ravel()[order], rank)]
    return flat // rank_DP.shape[1], flat % rank_DP.shape[1]


def _position(numbers: np.ndarray) -> np.ndarray:
    """For each row how many rows with its number came before."""
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    position = np.empty(len(numbers), np.int64)
    position[order] = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    return position


class Timeline:
    """The order in which a step's ops run, and what each waits for."""

    def __init__(self, table: Table, source: str) -> None:
        self.ops = table.ops
        self.index = {op: i for i, op in enumerate(table.ops)}
        self.stages = table.rank_DP.shape[1]
        self.after: dict[int, set[int]] = defaultdict(set)
        self.first_start_O = table.start_OSD[:, 0, 0]
        for stage in range(self.stages):
            self._compute_and_messages(stage)
            self._tail(stage)
        self.meetings = self._meetings()
        self.order = self._order(source)

    def own_times(self, table: Table) -> np.ndarray:
        """What each op takes by itself (O x S x D): a message since the last of its ends began."""
        own = table.end_OSD - table.start_OSD
        for members in self.meetings:
            if self._meets(members):
                ready = self._ready(members, table.start_OSD)
                since = table.end_OSD[list(members)] - ready
                own[list(members)] = np.where(since <= -BUFFERED_S, 0.0, since)
        return own

    def step_times(self, own_OSD: np.ndarray) -> np.ndarray:
        """When each step's last op ends, all starting at 0 (S)."""
        start, end = np.zeros_like(own_OSD), np.zeros_like(own_OSD)
        for members in self.order:
            for op in members:
                for before in self.after[op]:
                    np.maximum(start[op], end[before], out=start[op])
            ready = self._ready(members, start)
            for op in members:
                np.add(ready, own_OSD[op], out=end[op])
        return end.max(axis=(0, 2))

    def _ready(self, members: Sequence[int], start_OSD: np.ndarray) -> np.ndarray:
        """When all members of a meeting have begun (S x D)."""
        ready = start_OSD[list(members)].max(axis=0)
        return np.broadcast_to(ready.max(axis=1, keepdims=True), ready.shape) if self._of_twins(members) else ready

    def _of_twins(self, members: Sequence[int]) -> bool:
        return self.ops[members[0]].type in WITH_TWINS

    def _meets(self, members: Sequence[int]) -> bool:
        return len(members) > 1 or self._of_twins(members)

    def _of(self, stage: int, *types: str) -> list[int]:
        """The stage's ops of these types, in order of start."""
        found = [i for i, op in enumerate(self.ops) if op.stage == stage and op.type in types]
        return sorted(found, key=lambda i: (self.first_start_O[i], self.ops[i].number))

    def _chain(self, ops: Iterable[int]) -> None:
        before = None
        for op in ops:
            if before is not None:
                self.after[op].add(before)
            before = op

    def _compute_and_messages(self, stage: int) -> None:
        compute = self._of(stage, "forward-compute", "backward-compute")
        self._chain(compute)
        for direction in ("forward", "backward"):
            ops = self._of(stage, f"{direction}-compute")
            received, sent = self._of(stage, f"{direction}-recv"), self._of(stage, f"{direction}-send")
            self._chain(received)
            self._chain(sent)
            for i, op in enumerate(received):
                self.after[ops[i]].add(op)
                self.after[op].update(ops[i - 1 : i] if i else ())
            for i, op in enumerate(sent):
                self.after[op].add(ops[i])
        self._first_gradients(stage, compute)

    def _first_gradients(self, stage: int, compute: Sequence[int]) -> None:
        """The first gradients are not asked for before the last forward but one of the warm-up has ended."""
        first = next((i for i, op in enumerate(compute) if self.ops[op].type == "backward-compute"), 0)
        for name in ("backward-recv", "backward-send"):
            for op in self._of(stage, name)[:1]:
                self.after[op].update(compute[first - 2 : first - 1] if first >= 2 else ())

    def _tail(self, stage: int) -> None:
        compute = self._of(stage, "forward-compute", "backward-compute")
        tail = [op for name in TAIL for op in self._of(stage, name)]
        self._chain([*compute[-1:], *tail])
        gathered = self._of(stage, GATHER)
        self._chain([*gathered, *self._of(stage, SCATTER)])
        if gathered:
            self.after[self._of(stage, "forward-compute")[0]].add(gathered[-1])

    def _meetings(self) -> list[tuple[int, ...]]:
        """Ops that end together: both ends of a message, the members of a collective; any other op alone."""
        met: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            direction, _, what = op.type.partition("-")
            if what in ("send", "recv"):
                receiver = op.stage + {"forward": 1, "backward": -1}[direction] * (what == "send")
                met[direction, receiver, op.number].append(i)
            elif op.type in (CLIP, EMBEDDING):
                met[op.type, op.number].append(i)
            else:
                met[op].append(i)
        return [tuple(members) for members in met.values()]

    def _order(self, source: str) -> list[tuple[int, ...]]:
        """The meetings such that each comes after all that its members wait for."""
        meeting_of = {op: members for members in self.meetings for op in members}
        open_of = {members: {meeting_of[b] for op in members for b in self.after[op]} for members in self.meetings}
        order: list[tuple[int, ...]] = []
        done: set[tuple[int, ...]] = set()
        while len(order) < len(self.meetings):
            ready = [members for members, before in open_of.items() if members not in done and before <= done]
            if not ready:
                raise BadRecord(f"{source}: its messages contradict the order of its ops")
            order += ready
            done.update(ready)
        return order
