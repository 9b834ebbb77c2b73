"""When the ranks post their receives where they do so ahead of need: as torch's schedules of several stages a rank do.

The schedule is written down in rounds. In each, every rank in turn runs its next op if its input has been made; what an
op makes for another rank is received there from the next of that rank's ops on.

Source: ``torch.distributed.pipelining``, which adds sends and receives to its orders of ops in this way.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ppdiag.analyzers.edges import CyclicOrder
from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.analyzers.schedules import Op


def receives_ahead(
    turns_of_ranks: Sequence[Sequence[Sequence[Op]]], stage_rank: Sequence[int]
) -> list[dict[int, list[Op]]]:
    """For each rank: after how many of its turns it posts which receives, named by the ops that they are for.

    Args:
        turns_of_ranks: the ops of each rank, those together that run as one; a turn without any is a gap.
        stage_rank: the rank of each stage.

    Raises:
        CyclicOrder: the ops wait for each other in a circle.
    """
    posted: list[dict[int, list[Op]]] = [{} for _ in turns_of_ranks]
    waiting = [deque(turns) for turns in turns_of_ranks]
    done = [0] * len(turns_of_ranks)
    made: set[Op] = set()
    while any(waiting):
        before = sum(map(len, waiting))
        for rank, turns in enumerate(waiting):
            if not turns or not all(_is_ready(op, made, len(stage_rank)) for op in turns[0]):
                continue
            turn = turns.popleft()
            made.update(turn)
            done[rank] += bool(turn)
            for needing in filter(None, (_elsewhere(op, stage_rank) for op in turn)):
                receiver = stage_rank[needing.stage]
                posted[receiver].setdefault(done[receiver], []).append(needing)
        if sum(map(len, waiting)) == before:
            raise CyclicOrder
    return posted


def with_gaps(turns: Sequence[Sequence[Op]]) -> list[Sequence[Op]]:
    """The turns of one rank with the gaps that torch leaves between them.

    After the last op of a stage it reduces gradients, and lets go of the stage's weights: two turns (torch 2.8: one).
    """
    last = {op.stage: number for number, turn in enumerate(turns) for op in turn}
    gapped: list[Sequence[Op]] = []
    for number, turn in enumerate(turns):
        gapped.append(turn)
        gapped += [(), ()] * sum(last[stage] == number for stage in {op.stage for op in turn})
    return gapped


def _is_ready(op: Op, made: set[Op], stages: int) -> bool:
    """Whether the input of an op has been made; that of the ends comes from nobody."""
    source = op._replace(stage=op.stage - direction(op))
    return op.kind is Kind.WEIGHT or not 0 <= source.stage < stages or source in made


def _elsewhere(op: Op, stage_rank: Sequence[int]) -> Op | None:
    """The op of another rank that needs this one's output."""
    stage = op.stage + direction(op)
    if op.kind is Kind.WEIGHT or not 0 <= stage < len(stage_rank) or stage_rank[stage] == stage_rank[op.stage]:
        return None
    return op._replace(stage=stage)


def direction(op: Op) -> int:
    """By how much the stage of the op that needs this one's output differs."""
    return 1 if op.kind is Kind.FORWARD else -1
