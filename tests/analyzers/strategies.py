"""Hypothesis strategies: random pipelines for the factory, every duration drawn.

Times are multiples of ``TICK``, and no op is longer than 51 of them: a wait shorter than a hundredth of the median op
counts as a call that returned at once, and here none is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from ppdiag.analyzers import schedules
from ppdiag.model import Kind
from tests.analyzers.factory import Pipeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.analyzers.schedules import Op

TICK = 200_000
"""ns."""
CHUNKS = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}
ONE_STAGE = ("GPipe", "1F1B")


def times(most: int = 50) -> st.SearchStrategy[list[int]]:
    """A handful of durations, in ns; ops pick from them by their labels."""
    return st.lists(st.integers(0, most).map(lambda ticks: ticks * TICK), min_size=1, max_size=7)


@dataclass(frozen=True)
class OfOp:
    """A duration for each (op, rank, step)."""

    values: Sequence[int]
    least: int = 0

    def __call__(self, op: Op, rank: int, step: int) -> int:
        index = 31 * op.kind + 7 * op.stage + 3 * op.microbatch + rank + 5 * step
        return self.least + self.values[index % len(self.values)]


@dataclass(frozen=True)
class OfKind:
    """F takes one unit, a backward of the input two, W three, and a whole backward five."""

    unit: int
    split: frozenset[tuple[int, int]] = frozenset()
    """(stage, microbatch) whose W is an op of its own."""

    def __call__(self, op: Op, _rank: int, _step: int) -> int:
        whole = op.kind is Kind.BACKWARD and (op.stage, op.microbatch) not in self.split
        return self.unit * (5 if whole else int(op.kind))


def equal_stages(pipeline: Pipeline, unit: int) -> OfKind:
    """Durations by which all stages and microbatches of the pipeline are equal."""
    every = [op for ops in pipeline.orders for op in ops]
    return OfKind(unit, frozenset((op.stage, op.microbatch) for op in every if op.kind is Kind.WEIGHT))


@dataclass(frozen=True)
class OfPair:
    """A duration for each pair of numbers."""

    values: Sequence[int]

    def __call__(self, first: int, second: int) -> int:
        return self.values[(3 * first + second) % len(self.values)]


@st.composite
def pipelines(draw: st.DrawFn, names: tuple[str, ...] = tuple(CHUNKS), most_replicas: int = 2) -> Pipeline:
    """A pipeline with random times everywhere."""
    name = draw(st.sampled_from(names))
    ranks = draw(st.integers(2, 4))
    least = {"1F1B": ranks, "DualPipeV": 2 * ranks}.get(name, ranks)
    microbatches = draw(st.sampled_from((least, 2 * least)))
    chunks = CHUNKS[name]
    replicas = draw(st.integers(1, most_replicas))
    tail = st.integers(0, 20).map(lambda ticks: ticks * TICK)
    return Pipeline(
        schedules.order(name, ranks=ranks, chunks=chunks, microbatches=microbatches),
        schedules.stage_ranks(name, ranks, chunks),
        duration=OfOp(draw(times()), least=TICK),
        transfer=OfPair(draw(times())),
        host_gap=OfOp(draw(times(10))),
        before_optimizer=OfPair(draw(times())),
        between=OfPair(draw(times())),
        optimizer=draw(st.integers(1, 5)) * TICK,
        steps=draw(st.integers(2, 5)),
        rendezvous=name in ONE_STAGE and draw(st.booleans()),
        replicas=replicas,
        tail=draw(tail if replicas > 1 else st.none() | tail),  # replicas without one would drift apart
    )
