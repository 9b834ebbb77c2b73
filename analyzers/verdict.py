"""The one thing to know first: which cause, at which place, how much of the step, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers import blame
from ppdiag.analyzers.program import COMPUTE, WAIT
from ppdiag.diagnosis import WORTH_A_WARNING, WORTH_SAYING, Cause, ImbalanceSplit, Verdict, Why, percent
from ppdiag.model import Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.shape import Shape
    from ppdiag.analyzers.why import Shares
    from ppdiag.trace import Trace

MOST_UNEXPLAINED = 0.05
"""With more of the step unexplained than this no verdict is given."""
HEAVY = 1.3
"""A stage this many times as long as the others comes before any other tuning."""
LEAST_COVERED = 0.8
"""A place is named only where repairing it alone gains this much of what removing the whole cause would."""
MOST_CLOCK_ERROR = 0.05
"""With a clock error above this share of the step the causes cannot be told apart."""
LEAST_WAITS = 0.5
"""Waits in a step for each op whose input another rank makes: with fewer, waiting cannot be told from the host."""
MOST_OF_IT, FEW_STEPS = 0.8, 0.25
"""Where so much of a cause lies in so few of the steps, this is said: the others are another story."""
LEAST_AGREEING = 0.75
"""Share of the steps in which the first cause must be the larger one, for the two to be told apart."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the verdict rests on."""

    trace: Trace
    shape: Shape
    graph: Graph
    """Of the most frequent structure: in it places are looked for."""
    own_K: np.ndarray
    """Mask of its steps among those of ``shares``, which are all."""
    shares: Shares
    why: Why
    imbalance: ImbalanceSplit
    candidates: dict[Cause, list[blame.Candidate]] = field(default_factory=dict)
    """Places of each cause that was asked for, so that they are replayed once."""


def decide(context: Context) -> Verdict:
    """The verdict of a run."""
    why = {Cause(part.name): getattr(context.why, part.name) for part in fields(Why)}
    unexplained = why.pop(Cause.UNEXPLAINED)
    cause = max(why, key=lambda name: why[name])
    if _comes_first(context, why[Cause.IMBALANCE]):
        cause = Cause.IMBALANCE
    doubt = _doubt(context, cause, why, unexplained)
    if why[cause] < WORTH_SAYING:
        return _nothing(context, why[cause], cause, doubt)
    place = _place(context, cause)
    inferred = context.shape.inferred or _messages_are_inferred(context.trace)
    confidence = "undecided" if doubt else "inferred" if inferred else "measured"
    text = f"{_headline(context, cause, place, why[cause])}{_in_few_steps(context, cause)}{doubt}"
    return Verdict(
        cause=cause.value,
        stage=place.stage,
        link=_stages_of_link(context, place.link),
        rank=place.rank,
        share=why[cause],
        confidence=confidence,
        text=text,
    )


def _messages_are_inferred(trace: Trace) -> bool:
    """Whether the waits are a source's guess: some recordings hold no messages."""
    received = trace.of_kind(Kind.RECV).spans
    return bool((received["flags"] & np.uint16(Flag.INFERRED)).any())


def _comes_first(context: Context, imbalance: float) -> bool:
    """Whether one heavy stage or rank is to be named before any larger cause: that comes before any other tuning.

    A bubble or a transfer is worth looking at only once the stages are of a length.
    """
    if imbalance < WORTH_A_WARNING:
        return False
    place = _place(context, Cause.IMBALANCE)
    if place.rank is not None:
        own, others = _rank_times(context.graph, place.rank)
        return own >= HEAVY * others
    return place.stage is not None and _heavy_stage(context.graph) is not None


def _heavy_stage(graph: Graph) -> int | None:
    """The stage with the most work, where it is ``HEAVY`` times that of the others."""
    total = blame.work_of_stages(graph)
    heaviest = max(total, key=lambda stage: total[stage])
    own, others = _stage_times(graph, heaviest)
    return heaviest if len(total) > 1 and own >= HEAVY * others else None


def gains(context: Context) -> Mapping[Cause, float]:
    """For each factor, the share of the step time that would go if it alone went."""
    shares = context.shares
    total = float(shares.duration_K.sum())
    return {factor: float((shares.kept_K - time).sum()) / total for factor, time in shares.without_K.items()}


def _nothing(context: Context, share: float, cause: Cause, doubt: str) -> Verdict:
    idle = context.why.total
    text = (
        f"no cause of idle time reaches 5 % of the step (idle {percent(idle)} in all, "
        f"the largest cause {cause.value} {percent(share)}){doubt}"
    )
    return Verdict(None, None, None, None, share, "undecided" if doubt else "measured", text)


def _doubt(context: Context, cause: Cause, why: Mapping[Cause, float], unexplained: float) -> str:
    """Why the verdict cannot be relied on; empty where it can."""
    reason = next(_reasons(context, cause, why, unexplained), None)
    return "" if reason is None else f"; undecided, since {reason}"


def _reasons(context: Context, cause: Cause, why: Mapping[Cause, float], unexplained: float) -> Iterator[str]:
    if context.shape.doubt:
        yield context.shape.doubt
    waits, needed = _waits(context)
    if waits < LEAST_WAITS * needed:
        yield (
            f"the record has {waits} waits for messages or collectives in a step whose ops need {needed} inputs from "
            "other ranks: without them, waiting looks like the host"
        )
    if unexplained > MOST_UNEXPLAINED:
        yield f"the replay leaves {percent(unexplained)} of the step unexplained"
    error_s = context.trace.clock_error_s
    if error_s > MOST_CLOCK_ERROR * float(np.median(context.shares.duration_K)):
        yield f"the clocks may be off by {error_s * 1e3:.1f} ms"
    second = max((name for name in why if name is not cause), key=lambda name: why[name])
    first_anyway = cause is Cause.IMBALANCE and _comes_first(context, why[cause])
    if not first_anyway and why[second] >= WORTH_SAYING and not _told_apart(context, cause, second):
        yield f"{second.value} ({percent(why[second])}) is as large within the spread of the steps"


def _waits(context: Context) -> tuple[int, int]:
    """How often the ranks waited for a receive or a collective in a step, and how many ops needed another's output."""
    graph, stages = context.graph, context.shape.stages
    waits = (graph.what_N == WAIT) & np.isin(graph.kind_N, (Kind.RECV, Kind.COLLECTIVE))
    order = sorted({stage for own in stages.values() for stage in own})
    source = {Kind.FORWARD: dict(pairwise(order[::-1])), Kind.BACKWARD: dict(pairwise(order))}
    columns = (graph.rank_N, graph.kind_N, graph.stage_N, graph.microbatch_N)
    ops = np.unique(np.stack(columns)[:, graph.what_N == COMPUTE], axis=1)  # a message inside an op cuts it
    held = [stages[rank] for rank in graph.ranks_R.tolist()]
    fed_by = [source.get(kind, {}).get(stage) for kind, stage in ops[1:3].T.tolist()]
    needed = sum(stage is not None and stage not in held[r] for r, stage in zip(ops[0].tolist(), fed_by, strict=True))
    return int(waits.sum()), needed


def _told_apart(context: Context, first: Cause, second: Cause) -> bool:
    """Whether most steps agree on which is larger; a count of steps, since one odd step may outweigh all others.

    The steps' own shares are those before negative ones are moved: their spread is laid around the shares shown.
    """
    shares = context.shares
    difference_K = (shares.cause_K[first] - shares.cause_K[second]) / shares.duration_K
    shown = getattr(context.why, first.value) - getattr(context.why, second.value)
    return bool((difference_K - difference_K.mean() + shown > 0).mean() >= LEAST_AGREEING)


NOWHERE = blame.Candidate(gain_s=0.0)


def _place(context: Context, cause: Cause) -> blame.Candidate:
    """The stage, rank or link that the cause sits at; ``NOWHERE`` where no single one covers it."""
    if cause is Cause.BUBBLE or context.shape.doubt:
        return NOWHERE
    if cause not in context.candidates:
        context.candidates[cause] = blame.candidates(cause, context.graph)
    found = context.candidates[cause]
    shares = context.shares
    blamed_s = float((shares.kept_K - shares.without_K[cause])[context.own_K].mean())
    covering = [candidate for candidate in found if candidate.gain_s >= LEAST_COVERED * blamed_s]
    if cause is Cause.IMBALANCE:
        covering = _of_the_largest_part(covering, context.imbalance)
    # one link or group is a better place than all collectives
    return next((place for place in covering if not place.collectives), covering[0] if covering else NOWHERE)


def _of_the_largest_part(places: list[blame.Candidate], split: ImbalanceSplit) -> list[blame.Candidate]:
    """The places at which the largest part of an imbalance can sit, best first.

    Unequal stages: a stage, or a rank where that explains clearly more, since it holds several. Unequal twins: a rank.
    Unequal microbatches: nowhere.
    """
    if split.microbatch > max(split.stage, split.rank):
        return []
    if split.rank > split.stage:
        return [place for place in places if place.rank is not None]
    least_s = LEAST_COVERED * max((place.gain_s for place in places), default=0.0)
    return sorted(places, key=lambda place: place.stage is None or place.gain_s < least_s)


def _stages_of_link(context: Context, link: tuple[int, int] | None) -> tuple[int, int] | None:
    """The stages at the ends of a link of two ranks."""
    return None if link is None else context.shape.stages_of_link(*link)


def _headline(context: Context, cause: Cause, place: blame.Candidate, share: float) -> str:
    return f"{percent(share)} of the step is lost to {_PHRASES[cause](context, place)}"


def _in_few_steps(context: Context, cause: Cause) -> str:
    """Says so where a few steps have most of a cause; empty else."""
    own_K = np.sort(np.maximum(context.shares.cause_K[cause], 0.0))[::-1]
    total = float(own_K.sum())
    few = int(np.searchsorted(np.cumsum(own_K), MOST_OF_IT * total)) + 1
    if total <= 0 or few > FEW_STEPS * len(own_K):
        return ""
    return f"; {percent(float(own_K[:few].sum()) / total)} of it in {few} of {len(own_K)} steps"


def _bubble(context: Context, _place: blame.Candidate) -> str:
    microbatches = context.shape.microbatches
    return (
        f"the pipeline bubble: {microbatches} microbatch{'es' if microbatches > 1 else ''} over {context.shape.pp} "
        f"ranks leave{'' if microbatches > 1 else 's'} the schedule itself with idle time"
    )


def _imbalance(context: Context, place: blame.Candidate) -> str:
    if place.rank is not None:
        own, others = _rank_times(context.graph, place.rank)
        return f"load imbalance: rank {place.rank} computes {own / others:.2f} times as long as the others on average"
    if place.stage is None:
        split = {"stages": context.imbalance.stage, "microbatches": context.imbalance.microbatch}
        split["ranks that hold the same stage"] = context.imbalance.rank
        heavy = None if context.shape.doubt else _heavy_stage(context.graph)
        besides = "" if heavy is None else f"; besides, {_heavier(context.graph, heavy)}"
        return f"load imbalance between {max(split, key=lambda name: split[name])}{besides}"
    return f"load imbalance: {_heavier(context.graph, place.stage)}"


def _heavier(graph: Graph, stage: int) -> str:
    own, others = _stage_times(graph, stage)
    return f"stage {stage} computes {own / others:.2f} times as long as the others on average"


def _stage_times(graph: Graph, stage: int) -> tuple[float, float]:
    """Mean work of one stage, and mean work of the others, in seconds a step."""
    total = blame.work_of_stages(graph)
    others = [time for s, time in total.items() if s != stage] or [total[stage]]
    return total[stage], float(np.mean(others)) or 1.0


def _rank_times(graph: Graph, rank: int) -> tuple[float, float]:
    """Work of one rank, and mean work of the others that hold its stages (of all others where none does), in seconds.

    Over all steps.
    """
    index = int(np.searchsorted(graph.ranks_R, rank))
    work_R = graph.work_R
    own_stages = graph.stage_N[(graph.rank_N == index) & (graph.stage_N >= 0)]
    sharing = np.unique(graph.rank_N[np.isin(graph.stage_N, own_stages)])
    others = sharing[sharing != index]
    others = others if len(others) else np.flatnonzero(np.arange(len(work_R)) != index)
    mean = float(work_R[others].mean()) if len(others) else float(work_R[index])
    return float(work_R[index]), mean or 1.0


def _communication(context: Context, place: blame.Candidate) -> str:
    if place.link is not None:
        a, b = context.shape.stages_of_link(*place.link)
        return f"communication between stages {a} and {b} (rank {place.link[0]} to rank {place.link[1]})"
    if place.group is not None:
        return f"collectives of process group {context.trace.groups[place.group].name!r}"
    if place.collectives:
        return "collectives, of several process groups"
    return "communication, spread over several links"


def _host(_context: Context, place: blame.Candidate) -> str:
    if place.rank is not None:
        return f"the host on rank {place.rank}: its inputs were there, and its next op was not started"
    return "the host, spread over the ranks: inputs were there, and the next ops were not started"


_PHRASES = {
    Cause.BUBBLE: _bubble,
    Cause.IMBALANCE: _imbalance,
    Cause.COMMUNICATION: _communication,
    Cause.HOST: _host,
}
