"""The order of ops that each known pipeline schedule prescribes, and which of them a measured order is.

A schedule is its order of ops on every rank; when each op runs follows from the order and the durations. Durations play
no part here.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

FORWARD_ONLY = "forward-only"
NAIVE = "naive"
UNKNOWN = "unknown"
SPLIT_SUFFIX = " with split W"


class Op(NamedTuple):
    """One op of a rank: which work, of which stage (counted over all virtual stages), on which microbatch."""

    kind: Kind
    stage: int
    microbatch: int


class _Shape(NamedTuple):
    """P, V, M, and how many microbatches an interleaved schedule sends through a chunk in a row."""

    ranks: int
    chunks: int
    microbatches: int
    group: int


def order(name: str, *, ranks: int, chunks: int, microbatches: int, group: int | None = None) -> list[list[Op]]:
    """The ops of every rank, in the order in which the named schedule runs them.

    Args:
        name: one of :data:`NAMES`.
        ranks: P, ranks along the pipeline.
        chunks: V, stages per rank.
        microbatches: M, microbatches of one step.
        group: interleaved schedules only: how many microbatches go through a chunk before the next chunk's turn.
            Default: M // max(1, M // P), torch's rule. Megatron's default is P (its option
            ``microbatch_group_size_per_vp_stage``), which is the same number wherever P divides M; elsewhere Megatron
            asks for a larger group, and the two agree if it is torch's.

    Raises:
        ValueError: the name is unknown, or there is no such schedule of this shape.

    Example:
        >>> [f"{op.kind.name[0]}{op.microbatch}" for op in order("1F1B", ranks=2, chunks=1, microbatches=3)[0]]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    shape = _Shape(ranks, chunks, microbatches, group or _torch_group(ranks, microbatches))
    refusal = _refusal(name, shape)
    if refusal:
        raise ValueError(refusal)
    return [_ORDERS[name](shape, rank) for rank in range(ranks)]


def stage_ranks(name: str, ranks: int, chunks: int) -> list[int]:
    """The rank of each stage: stage s on rank s mod P (loop), or down the ranks and back up again (V)."""
    down = list(range(ranks))
    turn = down[::-1] if name in _V_SHAPED else down
    return [rank for chunk in range(chunks) for rank in (turn if chunk % 2 else down)]


def bubble_fraction(name: str, ranks: int, chunks: int, microbatches: int) -> float | None:
    """Bubble over total time of one step with equal stages, F = B (= W where split) and free transfers.

    Total is from the first op on any rank to the last. None where no closed form holds: DualPipeV (it depends on the
    time of an overlapped pair), fewer microbatches than fill the pattern (P if interleaved or split, 2P-1 for ZB-V), a
    shape that the schedule cannot have, and names that are no schedule.

    Source: (P-1)/(M+P-1), GPipe (Huang et al. 2019, section 2.3) and 1F1B (Narayanan et al. 2021, section 2.2.1, there
    over ideal time); (P-1)/(V*M+P-1), interleaved (section 2.2.2) and breadth-first (Lamy-Poirier 2023). ZB-H1 idles
    (P-1)(F+B-W) beside M(F+B+W) of work (Qi et al. 2024, section 2.3), and ZB1P as much. With ZB-V no rank idles
    between its own first op and last (section 6), so only the filling remains: P-1 forwards.
    """
    if name == NAIVE:
        return (ranks - 1) / ranks
    shape = _Shape(ranks, chunks, microbatches, _torch_group(ranks, microbatches))
    if name == "DualPipeV" or _refusal(name, shape):
        return None
    needed = 2 * ranks - 1 if name == "ZBVZeroBubble" else ranks
    if microbatches < needed and (chunks > 1 or name in _SPLIT):
        return None
    work = (3 if name in _SPLIT else 1) * chunks * microbatches
    return (ranks - 1) / (work + ranks - 1)


def peak_activations(orders: Sequence[Sequence[Op]]) -> list[int]:
    """For each rank, the most forwards at one time whose backward (of the input, where W is split) is still to come.

    A forward whose backward is not in the order (evaluation) keeps nothing and is not counted. Each counts one chunk of
    activations: 1/V of what a rank keeps per microbatch when it has one stage.
    """
    return [_peak(ops) for ops in orders]


def recognise(measured: Sequence[Sequence[Op]]) -> tuple[str, float]:
    """The known schedule that a measured order is nearest to, and the share of ops that it places alike.

    The measured order holds one step, one list a rank; the list of a rank without a record is empty. The match is
    the length of the longest common subsequence over the ops of both, summed over the ranks that have any: 1.0 only if
    every rank ran exactly that order, and one lost op costs one op. Orders that are something else still have a
    nearest schedule: below about 0.95 speak of a custom schedule.

    Names besides :data:`NAMES`: ``forward-only`` (no backward at all), ``naive`` (one microbatch, where all schedules
    of a placement are the same), ``X with split W`` (F and B in the order of X, W wherever), ``unknown`` (no ops).

    What cannot be told apart gets the simpler name: GPipe for 1F1B on the ranks that warm up with all microbatches
    (the last rank alone decides when M = 2); GPipe and LoopedBFS stand for either order of the backwards (first or last
    microbatch first); Megatron's old special case M = P, all forwards first, is LoopedBFS.
    """
    measured, shape = _normalised(measured)
    kinds = {op.kind for ops in measured for op in ops}
    if not kinds:
        return UNKNOWN, 0.0
    if kinds == {Kind.FORWARD}:
        return FORWARD_ONLY, max(_match(measured, candidate, kinds) for candidate in _candidates(shape))
    if shape.microbatches == 1:
        return NAIVE, _naive_match(measured)
    return _nearest(measured, shape, split=Kind.WEIGHT in kinds)


# -- the orders of one rank ------------------------------------------------------------------------------------------


def _loop_sequence(kind: Kind, shape: _Shape, rank: int, chunk_order: Iterable[int]) -> list[Op]:
    """All ops of a kind: a group of microbatches goes through all chunks, then the next group does."""
    chunks = tuple(chunk_order)
    return [
        Op(kind, chunk * shape.ranks + rank, microbatch)
        for first in range(0, shape.microbatches, shape.group)
        for chunk in chunks
        for microbatch in range(first, min(first + shape.group, shape.microbatches))
    ]


def _forwards(shape: _Shape, rank: int) -> list[Op]:
    return _loop_sequence(Kind.FORWARD, shape, rank, range(shape.chunks))


def _backwards(shape: _Shape, rank: int) -> list[Op]:
    return _loop_sequence(Kind.BACKWARD, shape, rank, reversed(range(shape.chunks)))


def _warmed_up(forwards: list[Op], backwards: list[Op], warmup: int) -> list[Op]:
    """``warmup`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    steady = [op for pair in zip(forwards[warmup:], backwards, strict=False) for op in pair]
    return forwards[:warmup] + steady + backwards[max(0, len(forwards) - warmup) :]


def _breadth_first(shape: _Shape, rank: int, *, last_first: bool) -> list[Op]:
    """All microbatches through a chunk before the next chunk's turn; backwards after all forwards.

    One chunk: GPipe (Huang et al. 2019); several: Breadth-First Pipeline Parallelism (Lamy-Poirier 2023).
    ``last_first``: within a stage, the last microbatch's backward is first (torch's LoopedBFS; GPipe's own figure).
    """
    whole = shape._replace(group=shape.microbatches)
    sign = -1 if last_first else 1
    return _forwards(whole, rank) + sorted(_backwards(whole, rank), key=lambda op: (-op.stage, sign * op.microbatch))


def _one_forward_one_backward(shape: _Shape, rank: int) -> list[Op]:
    """PipeDream-Flush, DAPPLE: warm up with one forward for each rank after this one (Narayanan et al. 2021, 2.2.1)."""
    return _warmed_up(_forwards(shape, rank), _backwards(shape, rank), shape.ranks - 1 - rank)


def _interleaved(shape: _Shape, rank: int, *, per_rank: int = 2) -> list[Op]:
    """Megatron's interleaved 1F1B: warm up with (V-1) groups and two forwards for each rank after this one (2.2.2)."""
    warmup = (shape.chunks - 1) * shape.group + per_rank * (shape.ranks - 1 - rank)
    return _warmed_up(_forwards(shape, rank), _backwards(shape, rank), warmup)


def _one_zero_bubble(shape: _Shape, rank: int) -> list[Op]:
    """ZB-H1 and its interleaved form ZB1P: W follows B, ``rank`` backwards late, so that no rank holds more than 1F1B.

    Source: Qi et al. 2024 (Zero Bubble Pipeline Parallelism), section 2.1. Rank r warms up with one forward for each
    rank after it, also when interleaved.
    """
    result: list[Op] = []
    pending: list[Op] = []
    for op in _interleaved(shape, rank, per_rank=1):
        result.append(op)
        if op.kind is Kind.BACKWARD:
            pending.append(op._replace(kind=Kind.WEIGHT))
            if len(pending) > rank:
                result.append(pending.pop(0))
    return result + pending


def _v_pattern(shape: _Shape, rank: int, phases: Iterable[tuple[int, str]]) -> list[Op]:
    """Spell out phases of a V placement: (how often, ops); an op is F, B (backward), I (input part) or W, and a chunk.

    The microbatches of each kind and chunk go in order; ``W`` without a chunk is the oldest ``I`` whose W is to come.
    """
    stages = (rank, 2 * shape.ranks - 1 - rank)
    counts = {kind + chunk: 0 for kind in "FBW" for chunk in "01"}
    pending: list[Op] = []
    result: list[Op] = []
    for letters in (word for times, ops in phases for _ in range(times) for word in ops.split()):
        if letters == "W":
            result.append(pending.pop(0))
            continue
        key = letters.replace("I", "B")
        op = Op(_KIND_OF_LETTER[key[0]], stages[int(key[1])], counts[key])
        counts[key] += 1
        result.append(op)
        if letters[0] == "I":
            pending.append(op._replace(kind=Kind.WEIGHT))
    return result


def _zbv(shape: _Shape, rank: int) -> list[Op]:
    """ZB-V: two stages a rank in a V, no bubble in the steady state if F = B = W (Qi et al. 2024, section 6).

    The pattern needs 2P-1 microbatches to fill; of fewer, those that do not exist are left out (as torch does).
    """
    after = shape.ranks - rank
    filled = max(shape.microbatches, 2 * shape.ranks - 1)
    phases = (
        (2 * after - 1, "F0"),
        (rank, "F1 F0"),
        (after, "F1 B1 W1"),
        (filled - shape.ranks - after + 1, "F0 B0 W0 F1 B1 W1"),
        (after - 1, "B0 W0 F1 B1 W1"),
        (rank, "B0 B1"),
        (after, "B0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    )
    return [op for op in _v_pattern(shape, rank, phases) if op.microbatch < shape.microbatches]


def _dualpipe_v(shape: _Shape, rank: int) -> list[Op]:
    """DualPipeV, DualPipe cut in half: the eight phases of DeepSeek's description (github.com/deepseek-ai/DualPipe).

    A forward and a backward that overlap stand as forward, then backward: so torch starts them.
    """
    after = shape.ranks - 1 - rank
    closing = ["B1", "B0"] * (rank + 1)
    halved = closing[: rank + 1] + [op.replace("B", "I") for op in closing[rank + 1 :]]
    phases = (
        (2 * after, "F0"),
        (rank + 1, "F0 F1"),
        (after, "I1 W F1"),
        (shape.microbatches - shape.ranks - after, "F0 B1 F1 B0"),
        (after, "B1 F1 B0"),
        (1, " ".join(halved)),
        (after, "W I0"),
        (rank + 1, "W"),
    )
    return _v_pattern(shape, rank, phases)


_KIND_OF_LETTER = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "W": Kind.WEIGHT}

SPLIT_1F1B = "1F1B" + SPLIT_SUFFIX
"""1F1B whose weight gradients are split off and fill the bubble: ZB-H1 of the Zero Bubble paper."""

_ORDERS: dict[str, Callable[[_Shape, int], list[Op]]] = {
    # from simple to involved: of equally good matches the first is named
    "GPipe": partial(_breadth_first, last_first=False),
    "1F1B": _one_forward_one_backward,
    "LoopedBFS": partial(_breadth_first, last_first=True),
    "Interleaved1F1B": _interleaved,
    SPLIT_1F1B: _one_zero_bubble,
    "InterleavedZeroBubble": _one_zero_bubble,
    "ZBVZeroBubble": _zbv,
    "DualPipeV": _dualpipe_v,
}
NAMES = tuple(_ORDERS)
"""The schedules of which the order is known: torch's names, and ``1F1B with split W``."""

_V_SHAPED = frozenset({"ZBVZeroBubble", "DualPipeV"})
_ONE_CHUNK = frozenset({"GPipe", "1F1B", SPLIT_1F1B})
_GROUPED = frozenset({"Interleaved1F1B", "InterleavedZeroBubble"})
_SPLIT = frozenset({SPLIT_1F1B, "InterleavedZeroBubble"}) | _V_SHAPED


def _torch_group(ranks: int, microbatches: int) -> int:
    return max(1, microbatches // max(1, microbatches // ranks))


def _refusal(name: str, shape: _Shape) -> str | None:
    """Why there is no such schedule of this shape, or None."""
    ranks, chunks, microbatches, group = shape
    reasons = {
        f"unknown schedule {name!r}; known: {', '.join(NAMES)}": name not in _ORDERS,
        f"ranks, chunks, microbatches and group must be at least 1, not {tuple(shape)}": min(shape) < 1,
        f"{name} has one stage a rank, not {chunks}": name in _ONE_CHUNK and chunks != 1,
        f"{name} has two stages a rank, not {chunks}": name in _V_SHAPED and chunks != 2,
        f"DualPipeV needs a microbatch for each of its {2 * ranks} stages, not {microbatches}": (
            name == "DualPipeV" and microbatches < 2 * ranks
        ),
        f"{name} takes {ranks} or more microbatches at a time: {microbatches} do not go in groups of {group}": (
            name in _GROUPED and group > 0 and (group < min(ranks, microbatches) or 0 < microbatches % group < ranks)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


# -- recognising ------------------------------------------------------------------------------------------------------


class _Candidate(NamedTuple):
    name: str
    build: Callable[[_Shape, int], list[Op]]
    shape: _Shape


def _nearest(measured: Sequence[Sequence[Op]], shape: _Shape, *, split: bool) -> tuple[str, float]:
    """The best of the schedules with W if there are W, then of those without; the first of equals."""
    plain = {Kind.FORWARD, Kind.BACKWARD}
    best, best_match = UNKNOWN, 0.0
    for with_weights in (True, False) if split else (False,):
        for candidate in _candidates(shape):
            if (candidate.name in _SPLIT) is with_weights and best_match < 1.0:
                match = _match(measured, candidate, plain | {Kind.WEIGHT} if with_weights else plain)
                if match > best_match:
                    best, best_match = candidate.name + (SPLIT_SUFFIX if split and not with_weights else ""), match
    return best, best_match


def _candidates(shape: _Shape) -> Iterator[_Candidate]:
    """All schedules of this shape, in the order of the names, with the variants that go by the same name."""
    default = shape._replace(group=_torch_group(shape.ranks, shape.microbatches))
    for name, build in _ORDERS.items():
        if _refusal(name, default) is None:
            yield _Candidate(name, build, default)
        if name in _GROUPED and shape.group != default.group and _refusal(name, shape) is None:
            yield _Candidate(name, build, shape)
        if name in ("GPipe", "LoopedBFS") and _refusal(name, default) is None:
            yield _Candidate(name, partial(_breadth_first, last_first=name == "GPipe"), default)


def _match(measured: Sequence[Sequence[Op]], candidate: _Candidate, kinds: Collection[Kind]) -> float:
    """Share of ops of these kinds that stand alike in the measured order and in the candidate's."""
    recorded = [(rank, ops) for rank, ops in enumerate(measured) if ops]
    expected = [candidate.build(candidate.shape, rank) for rank, _ in recorded]
    return _share_alike([ops for _, ops in recorded], expected, kinds)


def _naive_match(measured: Sequence[Sequence[Op]]) -> float:
    """Match with the only order that one microbatch allows on a rank: forwards up the stages, backwards down."""
    stages = [sorted({op.stage for op in ops}) for ops in measured]
    expected = [
        [Op(Kind.FORWARD, stage, 0) for stage in up] + [Op(Kind.BACKWARD, stage, 0) for stage in reversed(up)]
        for up in stages
    ]
    return _share_alike(measured, expected, (Kind.FORWARD, Kind.BACKWARD))


def _share_alike(measured: Sequence[Sequence[Op]], expected: Sequence[Sequence[Op]], kinds: Collection[Kind]) -> float:
    alike = total = 0
    for pair in zip(measured, expected, strict=True):
        found, wanted = ([op for op in ops if op.kind in kinds] for ops in pair)
        alike += _common(found, wanted)
        total += max(len(found), len(wanted))
    return alike / total if total else 0.0


def _common(found: Sequence[Op], expected: Sequence[Op]) -> int:
    """Length of the longest common subsequence; ``expected`` has no op twice, so it is a longest increasing one."""
    place = {op: index for index, op in enumerate(expected)}
    tails: list[int] = []  # tails[n]: the earliest place at which a common subsequence of n + 1 ops can end
    for index in (place[op] for op in found if op in place):
        at = bisect_left(tails, index)
        tails[at : at + 1] = [index]
    return len(tails)


def _normalised(measured: Sequence[Sequence[Op]]) -> tuple[list[list[Op]], _Shape]:
    """The measured order with its microbatches numbered from 0 and its kinds as :class:`Kind`, and its shape."""
    numbers = {m: new for new, m in enumerate(sorted({op.microbatch for ops in measured for op in ops}))}
    renumbered = [[Op(Kind(kind), stage, numbers[m]) for kind, stage, m in ops] for ops in measured]
    chunks = max((len({op.stage for op in ops}) for ops in measured), default=0)
    return renumbered, _Shape(len(measured), chunks, len(numbers), _leading_run(renumbered))


def _leading_run(measured: Sequence[Sequence[Op]]) -> int:
    """How many microbatches the first recorded rank sends forward through its first chunk before any other op."""
    first = next((ops for ops in measured if ops), [])
    return next((n for n, op in enumerate(first) if op[:2] != first[0][:2]), len(first))


def _peak(ops: Sequence[Op]) -> int:
    to_come = {op[1:] for op in ops if op.kind == Kind.BACKWARD}
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: 0}
    return max(accumulate((change[op.kind] for op in ops if op[1:] in to_come), initial=0))
