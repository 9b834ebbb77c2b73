"""Why the ranks stood idle: the step replayed in eight worlds, and the difference shared out.

The three factors are host time, transfers and work; a world keeps each or takes it away (host time and transfers to
zero, work to the mean of its kind). The share of a factor is its Shapley value over the eight worlds: its mean effect
over all orders in which the three can be taken away, so that the shares do not depend on an order and sum exactly.

Source: L. S. Shapley, "A value for n-person games" (1953).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.program import COMPUTE
from ppdiag.analyzers.replay import World, replay
from ppdiag.diagnosis import Cause
from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ppdiag.analyzers.graph import Graph

FACTORS = (Cause.HOST, Cause.COMMUNICATION, Cause.IMBALANCE)
PYTHON = "python"
HOST = (PYTHON, "data", "gc", "launch", "synchronising")
"""Causes of host time; the first is what no other takes."""
HIDDEN = 0.1
"""Where making one thing equal gains less than this of the imbalance, slow links or a late host hide its worth."""
CHOICES = tuple(product((True, False), repeat=len(FACTORS)))
"""Which factors each of the eight worlds keeps; the first keeps all, the last none."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The job's step time in seconds, split. K steps.

    Attributes:
        duration_K: measured step times.
        busy_K: mean busy time of the ranks.
        cause_K: for each cause its time; with ``busy_K`` they sum to ``duration_K``.
        kept_K: step times of the world that keeps all.
        without_K: for each factor, step times of the world that takes only it away.
        equalised_K: step times with only stages, only microbatches, or only twin ranks made equal; where the rest hides
            what that gains, shorter by what it gains without the rest.
        prompt_K: step times without the host time of one cause of ``HOST``; python is all the rest.
    """

    duration_K: np.ndarray
    busy_K: np.ndarray
    cause_K: Mapping[Cause, np.ndarray]
    kept_K: np.ndarray
    without_K: Mapping[Cause, np.ndarray]
    equalised_K: Mapping[str, np.ndarray]
    prompt_K: Mapping[str, np.ndarray]


def share_out(graph: Graph, busy_K: np.ndarray) -> Shares:
    """Replays the eight worlds (and three that equalise one thing each) and shares out the step time.

    Args:
        graph: a structure and its steps.
        busy_K: measured mean busy time of the ranks in each step, in seconds.
    """
    ops = Ops.of(graph)
    eight = eight_worlds(graph, ops)
    worlds = [eight[choice] for choice in CHOICES]
    single = {name: World(work_NK=work) for name, work in equalised_work(graph, ops).items()}
    prompt = {name: World(host_NK=host) for name, host in _without_each_cause(graph).items()}
    duration_WK = replay(graph, [*worlds, *single.values(), *prompt.values()]).duration_WK
    time = dict(zip(CHOICES, duration_WK, strict=False))
    kept, none = time[CHOICES[0]], time[CHOICES[-1]]
    cause = shapley(time)
    cause[Cause.BUBBLE] = none - busy_K
    cause[Cause.UNEXPLAINED] = graph.duration_K - kept
    without = {factor: time[tuple(other is not factor for other in FACTORS)] for factor in FACTORS}
    others = dict(zip((*single, *prompt), duration_WK[len(worlds) :], strict=True))
    equalised = {name: others[name] for name in single}
    if _gained_s(kept, equalised) < HIDDEN * float(cause[Cause.IMBALANCE].sum()):
        equalised = _behind_the_rest(graph, time, single)
    prompt_K = {name: others.get(name, without[Cause.HOST] if name == PYTHON and not prompt else kept) for name in HOST}
    return Shares(graph.duration_K, busy_K, cause, kept, without, equalised, prompt_K)


def _gained_s(kept_K: np.ndarray, without_K: Mapping[str, np.ndarray]) -> float:
    return sum(max(0.0, float((kept_K - time_K).sum())) for time_K in without_K.values())


def _behind_the_rest(
    graph: Graph, time: Mapping[tuple[bool, ...], np.ndarray], single: Mapping[str, World]
) -> dict[str, np.ndarray]:
    """Step times with one thing made equal, by what that gains where transfers and the host are not in its way."""
    free = World(host_R=np.zeros(len(graph.ranks_R)), transfer_L=np.zeros(len(graph.links)))
    worlds = [replace(free, work_NK=world.work_NK) for world in single.values()]
    gain_WK = time[False, False, True] - replay(graph, worlds).duration_WK
    return dict(zip(single, time[CHOICES[0]] - gain_WK, strict=True))


def _without_each_cause(graph: Graph) -> dict[str, np.ndarray]:
    """Host time of each event (N x K) without one cause, for each; empty where the record knows no cause."""
    parts = dict(graph.host_parts)
    if not parts:
        return {}
    parts[PYTHON] = graph.host_NK - np.sum(list(parts.values()), axis=0)
    return {name: np.maximum(graph.host_NK - part, 0.0) for name, part in parts.items()}


def eight_worlds(graph: Graph, ops: Ops | None = None) -> dict[tuple[bool, ...], World]:
    """The eight worlds, by which of ``FACTORS`` they keep."""
    equal_NK = equal_work(graph, ops)
    no_host, no_transfer = np.zeros(len(graph.ranks_R)), np.zeros(len(graph.links))
    return {
        choice: World(
            host_R=None if choice[0] else no_host,
            transfer_L=None if choice[1] else no_transfer,
            work_NK=None if choice[2] else equal_NK,
        )
        for choice in CHOICES
    }


def shapley(time: Mapping[tuple[bool, ...], np.ndarray]) -> dict[Cause, np.ndarray]:
    """Each factor's share of ``time[all kept] - time[none kept]``.

    For three factors the weight of a difference is 1/3 where none or both of the others are kept, else 1/6.

    >>> times = {choice: np.array(float(sum(choice))) for choice in CHOICES}
    >>> {cause.value: float(share) for cause, share in shapley(times).items()}
    {'host': 1.0, 'communication': 1.0, 'imbalance': 1.0}
    """
    shares = {}
    for i, factor in enumerate(FACTORS):
        total = 0.0
        for others in product((True, False), repeat=len(FACTORS) - 1):
            weight = 1 / 6 if sum(others) == 1 else 1 / 3
            with_factor = (*others[:i], True, *others[i:])
            without = (*others[:i], False, *others[i:])
            total = total + weight * (time[with_factor] - time[without])
        shares[factor] = np.asarray(total)
    return shares


def equal_work(graph: Graph, ops: Ops | None = None) -> np.ndarray:
    """Work of each event (N x K) where every op takes the mean of its kind over all stages and microbatches.

    An op that a message cut into several events keeps its total: the events take their op's share in proportion.
    """
    ops = ops or Ops.of(graph)
    return ops.work(graph, _mean_by(ops, ops.kind))


def equalised_work(graph: Graph, ops: Ops | None = None) -> dict[str, np.ndarray]:
    """Work of each event where one thing at a time is made equal.

    ``stage``: the stages' means, keeping how microbatches differ; ``rank``: ranks that hold the same stage (data-
    parallel twins) lose what makes one slower than the other over all steps; ``microbatch``: the ops of a stage take
    its mean of the step, but for that lasting slowness, since what changes from step to step is the data.
    """
    ops = ops or Ops.of(graph)
    mean_OK, slowness = _mean_by(ops, ops.kind_stage), _lasting_slowness(ops)
    return {
        "stage": ops.work(graph, ops.time_OK * _ratio(_mean_by(ops, ops.kind), mean_OK)),
        "microbatch": ops.work(graph, mean_OK * slowness),
        "rank": ops.work(graph, ops.time_OK / slowness),
    }


def _lasting_slowness(ops: Ops) -> np.ndarray:
    """How many times as long as its twins the rank of each op takes, over all steps (O x 1)."""
    of_rank = _mean_by(ops, ops.kind_stage_rank).sum(axis=1, keepdims=True)
    slowness = _ratio(of_rank, _mean_by(ops, ops.kind_stage).sum(axis=1, keepdims=True))
    return np.where(slowness > 0, slowness, 1.0)


def repaired_stage(graph: Graph, stage: int, ops: Ops | None = None) -> np.ndarray:
    """Work of each event where one stage's ops take the mean of the other stages' ops of their kind."""
    ops = ops or Ops.of(graph)
    here = ops.stage == stage
    others = _mean_by(ops, ops.kind, among=~here)[here]
    ratio = np.where(np.isnan(others), 1.0, _ratio(others, _mean_by(ops, ops.kind_stage, among=here)[here]))
    time_OK = ops.time_OK.copy()
    time_OK[here] *= ratio
    return ops.work(graph, time_OK)


def repaired_rank(graph: Graph, rank: int, ops: Ops | None = None) -> np.ndarray:
    """Work of each event where the ops of one rank (an index) take the mean of their kind on the other ranks.

    The mean of those that hold the same stage, where there are any: they do the same work.
    """
    ops = ops or Ops.of(graph)
    here = ops.rank == rank
    twins, others = (_mean_by(ops, number, among=~here)[here] for number in (ops.kind_stage, ops.kind))
    wanted = np.where(np.isnan(twins), others, twins)
    own = _mean_by(ops, ops.kind_stage_rank, among=here)[here]
    time_OK = ops.time_OK.copy()
    time_OK[here] *= np.where(np.isnan(wanted), 1.0, _ratio(wanted, own))
    return ops.work(graph, time_OK)


@dataclass(frozen=True, slots=True)
class Ops:
    """The compute ops of a graph. O ops, C events that are compute, K steps.

    Attributes:
        time_OK: compute time.
        stage, rank: stage of each op, and the index of its rank.
        kind, kind_stage, kind_stage_rank: class numbers of each op.
        events_C, op_C: the events, and the op of each: a message inside an op cuts it.
        share_CK: the event's share of its op's time.
    """

    time_OK: np.ndarray
    stage: np.ndarray
    rank: np.ndarray
    kind: np.ndarray
    kind_stage: np.ndarray
    kind_stage_rank: np.ndarray
    events_C: np.ndarray
    op_C: np.ndarray
    share_CK: np.ndarray

    @classmethod
    def of(cls, graph: Graph) -> Ops:
        """The ops of a graph."""
        events = np.flatnonzero(graph.what_N == COMPUTE)
        _, first, op = np.unique(graph.span_NK[events, 0], return_index=True, return_inverse=True)
        op, first = op.ravel(), events[first]
        time_OK = np.zeros((len(first), len(graph.steps_K)))
        np.add.at(time_OK, op, graph.work_NK[events])
        kind, rank = _kinds(graph, first), graph.rank_N[first]
        stage = np.where(kind == Kind.OPTIMIZER, -1, graph.stage_N[first])
        numbers = _numbered(kind), _numbered(kind, stage), _numbered(kind, stage, rank)
        return cls(time_OK, stage, rank, *numbers, events, op, _ratio(graph.work_NK[events], time_OK[op]))

    def work(self, graph: Graph, time_OK: np.ndarray) -> np.ndarray:
        """Work of each event (N x K) when the ops take these times."""
        work_NK = graph.work_NK.copy()
        work_NK[self.events_C] = self.share_CK * time_OK[self.op_C]
        return work_NK


INPUT_ONLY = 100
"""Kind of a backward whose weight gradient is an op of its own: DualPipeV and ZB-V mix these with whole backwards."""


def _kinds(graph: Graph, ops: np.ndarray) -> np.ndarray:
    """Kind of each op (events ``ops``), such that ops of one kind do the same work where stages are equal."""
    kind = graph.kind_N[ops]
    labels = np.stack([graph.rank_N[ops], graph.stage_N[ops], graph.microbatch_N[ops]])
    number = _numbered(*labels)
    has_weight = np.isin(number, number[kind == Kind.WEIGHT])
    return np.where((kind == Kind.BACKWARD) & has_weight, INPUT_ONLY, kind)


def _numbered(*columns: np.ndarray) -> np.ndarray:
    """Numbers rows so that equal rows, and only they, have equal numbers: small integers, made one."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        least = int(column.min(initial=0))
        key = key * (int(column.max(initial=0)) - least + 1) + (column - least)
    _, number = np.unique(key, return_inverse=True)
    return number.ravel()


def _mean_by(ops: Ops, number: np.ndarray, among: np.ndarray | None = None) -> np.ndarray:
    """For each op and step the mean time of the ops of its class (of those in ``among``; nan where there is none)."""
    among = np.ones(len(number), bool) if among is None else among
    count = int(number.max(initial=-1)) + 1
    sums = np.zeros((count, ops.time_OK.shape[1]))
    np.add.at(sums, number[among], ops.time_OK[among])
    members = np.bincount(number[among], minlength=count)[:, None]
    means = np.divide(sums, members, out=np.full_like(sums, np.nan), where=members > 0)
    return means[number]


def _ratio(value: np.ndarray, of: np.ndarray) -> np.ndarray:
    """``value / of``, and 1 where ``of`` is zero."""
    return np.divide(value, of, out=np.ones_like(value), where=of > 0)
