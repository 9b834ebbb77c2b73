"""The schedules that can be planned and drawn, by the names that their papers and frameworks give them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ppdiag.analyzers import schedules
from ppdiag.analyzers.schedules import SPLIT_1F1B, Op
from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Schedule(NamedTuple):
    """One schedule.

    Attributes:
        title: how it is written.
        known_as: its name in :mod:`ppdiag.analyzers.schedules`; None where its order is built here.
        chunks: stages a rank must have; None for any number.
        about: one line for a reader.
        splits: the weight gradient is an op of its own.
        v_shaped: the stages go down the ranks and back up.
    """

    title: str
    known_as: str | None
    chunks: int | None
    about: str
    splits: bool = False
    v_shaped: bool = False


SCHEDULES = {
    "naive": Schedule("naive", None, 1, "one microbatch at a time: one rank works, the others wait"),
    "gpipe": Schedule("GPipe", "GPipe", 1, "all forwards, then all backwards; keeps M activations"),
    "1f1b": Schedule("1F1B", "1F1B", 1, "a backward as soon as there is one; keeps P activations"),
    "interleaved": Schedule("Interleaved 1F1B", "Interleaved1F1B", None, "V stages a rank: bubble / V, messages x V"),
    "looped-bfs": Schedule("Looped BFS", "LoopedBFS", None, "all microbatches through a chunk first"),
    "zb-h1": Schedule("ZB-H1", SPLIT_1F1B, 1, "weight gradients fill the bubble; memory as 1F1B", splits=True),
    "zb-h2": Schedule("ZB-H2", None, 1, "no bubble if F = B = W; twice the activations of 1F1B", splits=True),
    "zb-v": Schedule(
        "ZB-V", "ZBVZeroBubble", 2, "no bubble if F = B = W; memory as 1F1B; stages in a V", splits=True, v_shaped=True
    ),
    "dualpipe-v": Schedule(
        "DualPipeV", "DualPipeV", 2, "forward and backward in pairs; stages in a V", splits=True, v_shaped=True
    ),
}


def refusal(name: str, *, ranks: int, chunks: int, microbatches: int) -> str | None:
    """Why the schedule has no such shape, or None."""
    try:
        order(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    except ValueError as error:
        return str(error)
    return None


def order(name: str, *, ranks: int, chunks: int, microbatches: int) -> list[list[Op]]:
    """The ops of every rank, in order.

    Raises:
        ValueError: the schedule has no such shape.
    """
    if min(ranks, chunks, microbatches) < 1:
        raise ValueError(f"P, V and M must be at least 1, not {ranks}, {chunks} and {microbatches}")
    schedule = SCHEDULES[name]
    if schedule.chunks not in (None, chunks):
        stages = f"{schedule.chunks} stage{'s' * (schedule.chunks != 1)}"
        raise ValueError(f"{schedule.title} has {stages} a rank, not {chunks}")
    if schedule.known_as is None:
        build = {"naive": _naive, "zb-h2": _zb_h2}[name]
        return [list(build(rank, ranks, microbatches)) for rank in range(ranks)]
    try:
        return schedules.order(schedule.known_as, ranks=ranks, chunks=chunks, microbatches=microbatches)
    except ValueError as error:
        raise ValueError(str(error).replace(schedule.known_as, schedule.title)) from None


def stage_ranks(name: str, ranks: int, chunks: int) -> list[int]:
    """The rank of each stage."""
    return schedules.stage_ranks(SCHEDULES[name].known_as or "1F1B", ranks, chunks)


def _naive(rank: int, ranks: int, microbatches: int) -> Iterator[Op]:  # noqa: ARG001  (as the other orders)
    for microbatch in range(microbatches):
        yield Op(Kind.FORWARD, rank, microbatch)
        yield Op(Kind.BACKWARD, rank, microbatch)


def _zb_h2(rank: int, ranks: int, microbatches: int) -> Iterator[Op]:
    """Twice the warm-up of 1F1B, and W twice as late as in ZB-H1, so that no rank idles between its first op and last.

    Source: Qi et al. 2024 (Zero Bubble Pipeline Parallelism), section 2.2 and figure 3: with F = B = W the first
    backward reaches rank r at 2P-1-r, when 2(P-r)-1 forwards have run; the last one leaves 2r+1 weight
    gradients to do there.
    """
    warmup = min(microbatches, 2 * (ranks - 1 - rank))
    pending: list[int] = []
    for step in range(microbatches + warmup):
        if step < microbatches:
            yield Op(Kind.FORWARD, rank, step)
        if step >= warmup:
            yield Op(Kind.BACKWARD, rank, step - warmup)
            pending.append(step - warmup)
        if len(pending) > 2 * rank:
            yield Op(Kind.WEIGHT, rank, pending.pop(0))
    yield from (Op(Kind.WEIGHT, rank, microbatch) for microbatch in pending)


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """How many layers each stage has: equal where it divides, else as if embedding and head were a layer each.

    Then the first and the last stage have one layer fewer (Llama 3 on 16 stages: 7, 8, ..., 8, 7), and what is
    still left over goes to the first stages. Source: Llama 3 (Dubey et al. 2024), section 3.3.2; Megatron's
    ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split``; torchtitan's split.

    >>> layers_of_stages(32, 4), layers_of_stages(126, 16)[:2], layers_of_stages(126, 16)[-1]
    ([8, 8, 8, 8], [7, 8], 7)
    """
    if stages == 1 or layers % stages == 0:
        return [layers // stages] * stages
    each, over = divmod(layers + 2, stages)
    counts = [each + (stage < over) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def layer_map(counts: Sequence[int], ranks_of_stages: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The layers of every rank as (first, last) of each of its stages; empty stages are left out.

    >>> layer_map([4] * 8, [0, 1, 2, 3, 0, 1, 2, 3])[0]
    [(0, 3), (16, 19)]
    """
    held: list[list[tuple[int, int]]] = [[] for _ in range(max(ranks_of_stages) + 1)]
    first = 0
    for count, rank in zip(counts, ranks_of_stages, strict=True):
        if count > 0:
            held[rank].append((first, first + count - 1))
        first += count
    return held
