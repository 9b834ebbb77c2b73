"""The orders that a run has or could have, as plans that can be laid out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers import schedules
from ppdiag.analyzers.planning import orders
from ppdiag.analyzers.schedules import SPLIT_SUFFIX, Op
from ppdiag.analyzers.what_if.layout import Plan
from ppdiag.analyzers.what_if.measured_layers import measured_layers
from ppdiag.analyzers.what_if.run import AHEAD, AT_ONCE, FUSED, PLAIN, TORCH, is_op, messaging, sends_late
from ppdiag.errors import BadShape
from ppdiag.model import Kind

if TYPE_CHECKING:
    from ppdiag.analyzers.what_if.change import Change
    from ppdiag.analyzers.what_if.run import Run

LEAST_MATCH = 0.95
"""A measured order that is less like a known schedule than this is a schedule of its own."""
MOST_OPS = 1_000_000
"""Ops of a pipeline beyond which a plan would take minutes and gigabytes."""
TORCH_MESSAGING = {"1f1b": FUSED, "gpipe": PLAIN}
"""How torch's schedules pass messages; those with several stages a rank post their receives ahead."""
PAIRED = "DualPipeV"
"""The schedule in which a forward and a backward overlap."""
ALIASES = {"zbv": "zb-v", "dualpipev": "dualpipe-v", "zbh1": "zb-h1", "zbh2": "zb-h2", "loopedbfs": "looped-bfs",
           "zb-1p": "zb-h1", "zb1p": "zb-h1"}  # fmt: skip
SEARCHED = ("zb-2p", "zb2p")
"""Has no order of its own: the Zero Bubble paper's scheduler searches one for each model's times."""


def known_schedule(name: str) -> str:
    """The schedule's name in ``planning.orders``.

    Raises:
        BadShape: there is none, or it has no fixed order.

    >>> known_schedule("ZBV"), known_schedule("1f1b")
    ('zb-v', '1f1b')
    """
    plain = ALIASES.get(name.lower(), name.lower())
    if plain in SEARCHED:
        raise BadShape(f"{name} is found by a search for each model's times and has no order here; try zb-h2 or zb-v")
    if plain not in orders.SCHEDULES:
        raise BadShape(f"{name!r} is no schedule; choose from {', '.join(orders.SCHEDULES)}")
    return plain


def measured_plan(run: Run) -> Plan:
    """The order that the run's first pipeline had, in one call of the schedule."""
    graph, shape = run.graph, run.shape
    stage_rank = [0] * run.stages
    found = []
    for position, rank in enumerate(shape.pipelines[0]):
        for stage in shape.stages[rank]:
            stage_rank[stage] = position
        own = np.flatnonzero(is_op(graph) & (graph.rank_N == np.searchsorted(graph.ranks_R, rank)))
        rows = zip(
            graph.kind_N[own].tolist(), graph.stage_N[own].tolist(), graph.microbatch_N[own].tolist(), strict=True
        )
        ops = (Op(Kind(kind), stage, microbatch) for kind, stage, microbatch in rows)
        found.append([op for op in dict.fromkeys(ops) if op.microbatch < shape.microbatches])
    runtime = run.job.framework == TORCH and shape.vpp > 1
    ways = AHEAD if runtime else messaging(graph)
    pairs = run.job.schedule_name == PAIRED and sends_late(graph)
    return Plan(found, stage_rank, ways, pairs=pairs, same_messages=True)


def plan_of(run: Run, change: Change) -> Plan:
    """The order that the change asks for.

    Raises:
        BadShape: there is no such schedule of this shape, or the run's own is not known.
    """
    microbatches = change.microbatches or run.shape.microbatches
    size = run.shape.microbatches / microbatches if change.keep_batch else 1.0
    if change.schedule is None:
        found = _same_schedule(run, microbatches)
    else:
        found = _other_schedule(run, change.schedule, change.chunks, microbatches)
        layers = measured_layers(run.trace, run.shape) if change.layers is None else None
        if layers is not None and len(found.stage_rank) != run.stages:
            found = found._replace(mix=layers.mix(len(found.stage_rank)))
    return found._replace(size=size, overlap=change.overlap)


def check_whole(run: Run) -> None:
    """Ops can be laid out anew only where every stage of every pipeline left a record.

    Raises:
        BadShape: one did not.
    """
    for ranks in run.shape.pipelines:
        held = sorted(stage for rank in ranks for stage in run.shape.stages[rank])
        missing = sorted(set(range(run.stages)) - set(held))
        if missing or len(held) != run.stages or len(ranks) != run.shape.pp:
            found = f"has no record of stage {missing[0]}" if missing else "is of another shape than others"
            raise BadShape(f"the pipeline of rank {ranks[0]} {found}: its ops cannot be laid out in another order")


def _same_schedule(run: Run, microbatches: int) -> Plan:
    measured = measured_plan(run)
    if microbatches == run.shape.microbatches:
        return measured
    name = run.job.schedule_name.removesuffix(SPLIT_SUFFIX) if run.job.vpp > 1 else run.job.schedule_name
    if name not in schedules.NAMES or run.job.schedule_match < LEAST_MATCH:
        raise BadShape(
            f"the run's order of ops is that of no known schedule ({run.job.schedule_name}, "
            f"{run.job.schedule_match:.0%} alike): say with --schedule which one should run {microbatches} microbatches"
        )
    ranks, chunks = run.shape.pp, run.shape.vpp
    _check_size(ranks, chunks, microbatches)
    try:
        found = schedules.order(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    except ValueError as error:
        raise BadShape(str(error)) from error
    return measured._replace(orders=found)


def _other_schedule(run: Run, name: str, chunks: int | None, microbatches: int) -> Plan:
    known = orders.SCHEDULES[name]
    stages_a_rank = chunks or known.chunks or max(2, run.shape.vpp)
    ranks = run.shape.pp
    _check_size(ranks, stages_a_rank, microbatches)
    try:
        found = orders.order(name, ranks=ranks, chunks=stages_a_rank, microbatches=microbatches)
    except ValueError as error:
        raise BadShape(str(error)) from error
    ways = TORCH_MESSAGING.get(name, AHEAD) if run.job.framework == TORCH else messaging(run.graph)
    if stages_a_rank > 1 and ways in (AT_ONCE, FUSED):  # with several stages a rank nobody waits for each send
        ways = AHEAD
    pairs = known.known_as == PAIRED
    return Plan(found, orders.stage_ranks(name, ranks, stages_a_rank), ways, pairs=pairs)


def _check_size(ranks: int, chunks: int, microbatches: int) -> None:
    if 3 * ranks * chunks * microbatches > MOST_OPS:
        raise BadShape(f"P x V x M = {ranks * chunks * microbatches} is too large to replay")
