"""Lays the ops of a run out in the order of another schedule: the graph that the run would have had, of its own times.

Each rank's ops are replaced; what follows them in the step (collectives of the gradients, the optimizer, data) stays.

Shape letters: N events, K steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.analyzers.edges import CHAIN
from ppdiag.analyzers.messages import MISSING
from ppdiag.analyzers.program import COMPUTE, END, POST, START, WAIT
from ppdiag.analyzers.what_if.assemble import Event, Meeting, Script, assemble
from ppdiag.analyzers.what_if.layers import layer_times
from ppdiag.analyzers.what_if.op_times import OpKey, op_times, source_microbatch, stage_mix
from ppdiag.analyzers.what_if.receives import direction, receives_ahead, with_gaps
from ppdiag.analyzers.what_if.run import (
    AHEAD,
    AT_ONCE,
    FUSED,
    collective_time,
    is_op,
    link_time,
    message_time,
    stage_seconds,
)
from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.schedules import Op
    from ppdiag.analyzers.what_if.run import Run


MOST_OPS = 10_000
"""Ops that are laid out, of all replicas together, but for one replica at least: a second."""


class Plan(NamedTuple):
    """What the ranks of one pipeline are to run.

    Attributes:
        orders: the ops of each rank along the pipeline, of one call of the schedule.
        stage_rank: position along the pipeline of each stage's rank.
        messaging: how ranks pass messages, of ``run.AT_ONCE``, ``run.FUSED``, ``run.PLAIN``, ``run.AHEAD``.
        overlap: no rank waits until a send is taken, and a message travels as soon as it is there.
        size: how many times as large as measured each microbatch is.
        same_messages: each message takes what the measured one that it is like took, not what is usual on its link.
        mix: for each stage, which measured stages it takes its layers from, and how much of each; None for equal parts.
        pairs: a forward and a whole backward of another stage after it run as one op, and send when both are done.
    """

    orders: Sequence[Sequence[Op]]
    stage_rank: Sequence[int]
    messaging: str
    overlap: bool = False
    size: float = 1.0
    pairs: bool = False
    same_messages: bool = False
    mix: Sequence[Sequence[tuple[int, float]]] | None = None


def lay_out(run: Run, graph: Graph, plan: Plan, replicas: Sequence[int] | None = None) -> Graph:
    """The graph of the plan, with the times of ``graph`` (the run's own, or one of the same events and other times).

    Args:
        run: the run.
        graph: where the times are from.
        plan: the ops of one pipeline.
        replicas: which of the run's pipelines are laid out; None for all.

    Raises:
        CyclicOrder: the ops of the plan wait for each other in a circle.
    """
    script = Script()
    ops, tails = _Ops(run, graph, plan, script), _Tails(graph, script)
    pipelines = run.shape.pipelines
    index = {int(rank): i for i, rank in enumerate(graph.ranks_R)}
    chosen = range(len(pipelines)) if replicas is None else replicas
    place = {index[rank]: (d, p) for d in chosen for p, rank in enumerate(pipelines[d])}
    for rank in sorted(place):
        script.add(Event(rank, START))
        ops.add(rank, *place[rank])
        tails.add(rank)
    script.meetings = tails.meetings()
    times = {link: time * plan.size for link, time in link_time(graph).items()}
    return assemble(script.of_ranks(sorted(place)), _of_ranks(graph, sorted(place)), times, overlap=plan.overlap)


def _of_ranks(graph: Graph, ranks: Sequence[int]) -> Graph:
    """The graph with what it says of ranks for these alone (indices); its events are not touched."""
    sources = np.flatnonzero(np.isin(ranks, graph.sources))
    first = sources if len(sources) else np.zeros(1, np.int64)
    return replace(graph, ranks_R=graph.ranks_R[ranks], start_RK=graph.start_RK[ranks], sources=first)


def slowest_replicas(run: Run, plans: Sequence[Plan]) -> list[int]:
    """Which pipelines are laid out: of very many ops those alone that work longest, as they set the pace of all."""
    ops = run.shape.accumulation * max(sum(len(own) for own in plan.orders) for plan in plans)
    work_R = np.zeros(len(run.graph.ranks_R))
    np.add.at(work_R, run.graph.rank_N, run.graph.work_NK.sum(axis=1))
    longest = [work_R[np.searchsorted(run.graph.ranks_R, ranks)].max() for ranks in run.shape.pipelines]
    return sorted(np.argsort(-np.array(longest), kind="stable")[: max(1, MOST_OPS // ops)].tolist())


class _Times:
    """Times of the plan's ops, from those of the measured ops that they are like."""

    def __init__(self, run: Run, graph: Graph, plan: Plan) -> None:
        self.run, self.plan = run, plan
        self.measured = op_times(run, graph)
        self.ranks_R = graph.ranks_R
        self.messages = message_time(graph) if plan.same_messages else {}
        self.same_stages = len(plan.stage_rank) == run.stages
        self.mix = plan.mix or stage_mix(len(plan.stage_rank), run.stages, _ends(stage_seconds(graph, run.stages)))
        self.microbatches = 1 + max(op.microbatch for ops in plan.orders for op in ops)
        self.split = {op[1:] for ops in plan.orders for op in ops if op.kind is Kind.WEIGHT}
        ranks = plan.stage_rank
        self.chunk = [sum(ranks[s] == ranks[stage] for s in range(stage)) for stage in range(len(ranks))]

    def work(self, replica: int, op: Op) -> np.ndarray:
        """Work of an op (K): that of the layers which its stage takes from the measured stages."""
        split = (op.stage, op.microbatch % self.microbatches) in self.split
        if split and self.same_stages:
            measured = self.measured.split_work(self.measured.holder[replica, op.stage], op, self._source(op))
            if measured is not None:
                return measured * self.plan.size
        part = self.measured.share_of(op.kind, op.stage) if split and op.kind is not Kind.FORWARD else 1.0
        total = self.measured.nothing
        for stage, share in self.mix[op.stage]:
            rank = self.measured.holder[replica, stage]
            total = total + share * self.measured.work(rank, stage, self._source(op), op.kind)
        return total * part * self.plan.size

    def _source(self, op: Op) -> int:
        """The measured microbatch that the op's takes after."""
        call, microbatch = divmod(op.microbatch, self.microbatches)
        per_call = self.measured.per_call
        return call * per_call + source_microbatch(microbatch, self.microbatches, per_call)

    def message(self, rank: int, op: Op) -> np.ndarray | None:
        """Time of the message that an op waits for (K); None where none like it was measured."""
        time = self.messages.get((rank, int(op.kind), op.stage, self._source(op)))
        return None if time is None else time * self.plan.size

    def host(self, rank: int, op: Op) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Host time around, on entering and on leaving an op (see ``op_times.Times``), as measured on its rank."""
        key = self._like(rank, op)
        if key is None:
            return (self.measured.nothing,) * 3
        times = self.measured.times[key]
        # what came before a rank's first op of a step is not repeated before others that take after it
        repeated = self.measured.first[rank] == key and op.microbatch > 0
        around = self.measured.usual_around.get((rank, key.kind), times.around) if repeated else times.around
        return around, times.enter, times.leave

    def _like(self, rank: int, op: Op) -> OpKey | None:
        """The measured op of the rank that is most like this one: of its stage, else of any; a W like a backward."""
        kinds = (op.kind, Kind.BACKWARD) if op.kind is Kind.WEIGHT else (op.kind,)
        own = self.run.shape.stages[int(self.ranks_R[rank])]
        same = self.same_stages and op.stage in own
        stages = (op.stage,) if same else (own[self.chunk[op.stage] % len(own)], *own)
        keys = (OpKey(rank, int(kind), stage, self._source(op)) for kind in kinds for stage in stages)
        return next((key for key in keys if key in self.measured.times), None)


def _ends(stage_S: np.ndarray) -> tuple[float, float]:
    """Share of the first stage's time that is no layer (embedding), and of the last's (head and loss)."""
    if len(stage_S) < 2:
        return 0.0, 0.0
    times = layer_times(stage_S, [1] * len(stage_S))
    return times.before / max(stage_S[0], 1e-12), times.after / max(stage_S[-1], 1e-12)


class _Ops:
    """Writes the ops of each rank into a script, with their messages."""

    def __init__(self, run: Run, graph: Graph, plan: Plan, script: Script) -> None:
        self.run, self.plan, self.script = run, plan, script
        self.times = _Times(run, graph, plan)
        self.has_backward = bool(self.times.measured.kinds & {int(Kind.BACKWARD), int(Kind.WEIGHT)})
        self.posted: set[Op] = set()
        self.due = self.times.measured.nothing
        self.turns = [self._turns(ops) for ops in plan.orders]
        self.ahead: list[dict[int, list[Op]]] = [{} for _ in plan.orders]
        if plan.messaging == AHEAD:
            self.ahead = receives_ahead([with_gaps(turns) for turns in self.turns], plan.stage_rank)

    def _turns(self, ops: Sequence[Op]) -> list[list[Op]]:
        """The ops of a rank that there are, those together that run as one."""
        turns: list[list[Op]] = []
        for op in ops:
            if turns and self._is_pair(turns[-1][-1], op):
                turns[-1].append(op)
            elif op.kind is Kind.FORWARD or self.has_backward:
                turns.append([op])
        return turns

    def add(self, rank: int, replica: int, position: int) -> None:
        """All ops of one rank, of every call of the schedule in a step."""
        self.rank, self.replica, self.posted = rank, replica, set()
        calls, per_call = range(self.run.shape.accumulation), self.times.microbatches
        turns = [_moved(turn, call * per_call) for call in calls for turn in self.turns[position]]
        following = [turn[0] for turn in turns[1:]]
        sending: list[Op] = []  # of which the sends are still to be waited for
        for number, (turn, after) in enumerate(zip(turns, [*following, None], strict=True)):
            self._begin(turn[0])
            self._post_ahead(position, number)
            self._compute(turn[0])
            for op in turn[1:]:
                self._begin(op)
                self._compute(op)
            self._wait_for_sends(sending)
            sending += self._send(turn, after)
        self._wait_for_sends(sending)

    def _begin(self, op: Op) -> None:
        """The host's time between the ops before and the messages of this one."""
        self.due, _, _ = self.times.host(self.rank, op)

    def _post_ahead(self, position: int, turns_done: int) -> None:
        """Posts the receives that come after so many turns."""
        call, done = divmod(turns_done, len(self.turns[position]))
        for op in _moved(self.ahead[position].get(done, ()), call * self.times.microbatches):
            self._post_receive(op)

    def _send(self, done: Sequence[Op], following: Op | None) -> list[Op]:
        """Posts the sends of the ops; returns those that are to be waited for after the following op."""
        sent = [op for op in done if self._post_send(op)]
        kinds = {op.kind for op in done}
        if self.plan.messaging not in (FUSED, AT_ONCE) or self.plan.overlap:
            return []
        if sent and following is not None and (self.plan.messaging == AT_ONCE or following.kind not in kinds):
            self._post_receive(following)
            self._wait_for_sends(sent)
        return sent

    def _is_pair(self, op: Op, following: Op) -> bool:
        if not self.plan.pairs or (op.kind, following.kind) != (Kind.FORWARD, Kind.BACKWARD):
            return False
        return following[1:] not in self.times.split and following.stage != op.stage

    def _event(self, what: int, kind: Kind, op: Op, **times: np.ndarray) -> int:
        return self.script.add(Event(self.rank, what, int(kind), op.stage, op.microbatch, **times))

    def _compute(self, op: Op) -> None:
        _, enter, _ = self.times.host(self.rank, op)
        self._post_receive(op)
        if op in self.posted:
            message = self.script.ends(self._input(op))
            message.recv_wait = self._event(WAIT, Kind.RECV, op, host=self._take_due())
            message.time = self.times.message(self.rank, op) if self.plan.same_messages else None
        work = self.times.work(self.replica, op)
        self._event(COMPUTE, op.kind, op, work=work, host=enter + self._take_due())

    def _take_due(self) -> np.ndarray:
        """Host time that the next event is to take."""
        due, self.due = self.due, self.times.measured.nothing
        return due

    def _post_receive(self, op: Op) -> None:
        if op in self.posted or self._input(op) is None:
            return
        self.posted.add(op)
        self.script.ends(self._input(op)).recv_post = self._event(POST, Kind.RECV, op, host=self._take_due())

    def _post_send(self, op: Op) -> bool:
        name = self._output(op)
        if name is None:
            return False
        _, _, leave = self.times.host(self.rank, op)
        self.script.ends(name).send_post = self._event(POST, Kind.SEND, op, host=leave)
        return True

    def _wait_for_sends(self, sent: list[Op]) -> None:
        for op in sent:
            self.script.ends(self._output(op)).send_wait = self._event(WAIT, Kind.SEND, op)
        sent.clear()

    def _input(self, op: Op) -> tuple[int, Op] | None:
        """Name of the message that an op needs: the replica, and the op of another rank that makes it."""
        if op.kind is Kind.WEIGHT:
            return None
        return self._crossing(op.stage - direction(op), op.stage, op)

    def _output(self, op: Op) -> tuple[int, Op] | None:
        """Name of the message that an op makes for another rank."""
        if op.kind is Kind.WEIGHT:
            return None
        return self._crossing(op.stage, op.stage + direction(op), op)

    def _crossing(self, source: int, target: int, op: Op) -> tuple[int, Op] | None:
        ranks = self.plan.stage_rank
        if min(source, target) < 0 or max(source, target) >= len(ranks) or ranks[source] == ranks[target]:
            return None
        return self.replica, op._replace(stage=source)


def _moved(ops: Sequence[Op], by: int) -> list[Op]:
    """The same ops of later microbatches."""
    return [op._replace(microbatch=op.microbatch + by) for op in ops]


class _Tails:
    """Copies what follows the last op of each rank: collectives of which all wait there, and the optimizer.

    Times of what is left out go to the next event.
    """

    def __init__(self, graph: Graph, script: Script) -> None:
        self.graph, self.script = graph, script
        ranks, ops = np.arange(len(graph.ranks_R)), np.flatnonzero(is_op(graph))
        self.start = np.searchsorted(graph.rank_N, ranks).tolist()
        self.end = (np.searchsorted(graph.rank_N, ranks, "right") - 1).tolist()
        self.last = ops[np.searchsorted(graph.rank_N[ops], ranks, "right") - 1].tolist()
        self.collective_NK = collective_time(graph)
        self.kept = _tail_meetings(graph, np.array(self.last))
        self.events = {e for m in self.kept for e in (*m.posts, *(wait for wait, _, _ in m.waits))}
        self.moved: dict[int, int] = {}

    def add(self, rank: int) -> None:
        """The tail of one rank, to its end."""
        graph, last, end = self.graph, self.last[rank], self.end[rank]
        assert graph.what_N[end] == END
        early = [event for event in range(self.start[rank], last) if event in self.events]  # posts during the last ops
        due = np.zeros(len(graph.steps_K))
        for event in early + list(range(last + 1, end)):
            sends = graph.what_N[event] == POST and graph.kind_N[event] == Kind.SEND  # counted with its op
            if event > last and not sends:
                due = due + graph.host_NK[event]
            if event in self.events or (event > last and graph.what_N[event] == COMPUTE):
                self.moved[event] = self._copy(rank, event, due)
                due = np.zeros(len(graph.steps_K))
            elif event > last:
                due = due + self.collective_NK[event]
        self.script.add(Event(rank, END, host=due + graph.host_NK[end]))

    def _copy(self, rank: int, event: int, host: np.ndarray) -> int:
        graph = self.graph
        labels = int(graph.kind_N[event]), int(graph.stage_N[event]), int(graph.microbatch_N[event])
        return self.script.add(Event(rank, int(graph.what_N[event]), *labels, graph.work_NK[event], host))

    def meetings(self) -> list[Meeting]:
        """The collectives, with the events that now stand for theirs."""
        moved = self.moved
        found = [
            Meeting(
                [moved[e] for e in m.posts if e in moved],
                [(moved[wait], link, time) for wait, link, time in m.waits if wait in moved],
            )
            for m in self.kept
        ]
        return [meeting for meeting in found if meeting.posts and meeting.waits]


def _tail_meetings(graph: Graph, last: np.ndarray) -> list[Meeting]:
    """The measured collectives of which every wait comes after its rank's last op."""
    found: dict[int, Meeting] = {}
    source, target = graph.joins_J[graph.src_E], graph.joins_J[graph.dst_E]
    for edge in np.flatnonzero((target == MISSING) & (graph.link_E == CHAIN)).tolist():
        found.setdefault(int(graph.dst_E[edge]), Meeting()).posts.append(int(graph.last_E[edge]))
    for edge in np.flatnonzero(source == MISSING).tolist():
        wait = int(target[edge]), int(graph.link_E[edge]), np.maximum(graph.transfer_EK[edge], 0.0)
        found[int(graph.src_E[edge])].waits.append(wait)
    return [m for m in found.values() if m.waits and all(w > last[graph.rank_N[w]] for w, _, _ in m.waits)]
