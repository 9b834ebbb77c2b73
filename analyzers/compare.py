"""What changed from one run to another: the step, its parts by cause, its places, and whether it is more than noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers import places
from ppdiag.analyzers.diagnose import explain
from ppdiag.analyzers.spread import LEAST_STEPS, interval_of_difference
from ppdiag.comparison import WORK, Change, Comparison, Side, StageChange
from ppdiag.diagnosis import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ppdiag.analyzers.diagnose import Analysis
    from ppdiag.diagnosis import Diagnosis, Job

SHAPE = {
    "world_size": "ranks",
    "pp": "P (ranks along the pipeline)",
    "vpp": "V (stages a rank)",
    "tp": "tensor-parallel size",
    "dp": "data-parallel size",
    "microbatches": "M (microbatches)",
    "schedule_name": "schedule",
}
WORK_OF_A_STEP = ("dp", "microbatches")
"""A step with more of these does more."""
OTHER_SIZE = 0.1
"""Messages that differ by more of their size than this carry other microbatches."""


def compare(a: Analysis, b: Analysis) -> Comparison:
    """How B differs from A."""
    found_a, found_b = explain(a), explain(b)
    differing = [name for name in SHAPE if getattr(found_a.job, name) != getattr(found_b.job, name)]
    replayable = not any(graph.excess_EK is not None for run in (a, b) for graph in run.graphs)
    same_places = not differing and a.shape.stages == b.shape.stages and a.shape.accumulation == b.shape.accumulation
    return Comparison(
        a=_side(a, found_a),
        b=_side(b, found_b),
        step=_change("step", a.shares.duration_K, b.shares.duration_K),
        parts=tuple(_parts(a, b)),
        places=tuple(places.place_changes(a, b)) if same_places and replayable else (),
        stages=tuple(_stages(found_a, found_b)) if found_a.job.pp == found_b.job.pp else (),
        same_work=not set(differing) & set(WORK_OF_A_STEP) and a.shape.accumulation == b.shape.accumulation,
        notes=tuple(_notes(found_a, found_b, differing, replayable=replayable)),
    )


def _side(run: Analysis, found: Diagnosis) -> Side:
    return Side(found.source, found.job, found.steps.count, float(run.shares.duration_K.mean()), found.steps.median_s)


def _change(name: str, a_K: np.ndarray, b_K: np.ndarray) -> Change:
    return Change(name, float(np.mean(a_K)), float(np.mean(b_K)), *interval_of_difference(a_K, b_K))


def _parts(a: Analysis, b: Analysis) -> Iterator[Change]:
    """Work and each cause: the step's own shares, which sum to it. A share below zero is left as it is."""
    yield _change(WORK, a.shares.busy_K, b.shares.busy_K)
    for cause in Cause:
        yield _change(cause.value, a.shares.cause_K[cause], b.shares.cause_K[cause])


def _stages(a: Diagnosis, b: Diagnosis) -> Iterator[StageChange]:
    times = {row.stage: (row.forward_s, row.backward_s, row.weight_s) for row in b.stages}
    for row in a.stages:
        if row.stage in times:
            yield StageChange(row.stage, (row.forward_s, row.backward_s, row.weight_s), times[row.stage])


def _notes(a: Diagnosis, b: Diagnosis, differing: list[str], *, replayable: bool) -> Iterator[str]:
    if differing:
        what = "; ".join(f"{SHAPE[name]} {_shown(a.job, name)} and {_shown(b.job, name)}" for name in differing)
        yield f"the jobs are of different shape ({what}), so that the change cannot be laid to places"
    if set(differing) & set(WORK_OF_A_STEP):
        yield f"a step does not do the same work in both: {_per_microbatch(a, b)} a microbatch, over all replicas"
    if not differing and not replayable:
        yield "the messages of one of them were inferred, so that the change cannot be laid to places"
    if (sizes := _message_sizes(a, b)) is not None:
        yield f"messages of {sizes[0]} bytes and of {sizes[1]}: their microbatches are not of one size"
    for name, found in (("A", a), ("B", b)):
        if found.steps.count < LEAST_STEPS:
            yield f"{name} has too few steps ({found.steps.count}) to know its noise; record at least {LEAST_STEPS}"
        if found.verdict.confidence == "undecided":
            yield f"the causes of {name} are undecided: {found.verdict.text}"


def _shown(job: Job, name: str) -> str:
    value = getattr(job, name)
    return "unknown" if value is None else str(value)


def _per_microbatch(a: Diagnosis, b: Diagnosis) -> str:
    times = [1e3 * found.steps.median_s / (found.job.microbatches * (found.job.dp or 1)) for found in (a, b)]
    return f"{times[0]:.2f} ms in A and {times[1]:.2f} ms in B"


def _message_sizes(a: Diagnosis, b: Diagnosis) -> tuple[int, int] | None:
    """The largest messages of each where they differ in size; None where they do not, or there are none."""
    sizes = [max((link.bytes for link in found.links), default=0) for found in (a, b)]
    differ = min(sizes) > 0 and max(sizes) > (1 + OTHER_SIZE) * min(sizes)
    return (sizes[0], sizes[1]) if differ else None
