"""How to split a model's layers over its stages: what a layer takes, and the split whose longest stage is shortest.

Shape letters: L layers, S stages.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.analyzers.planning import orders
from ppdiag.errors import BadShape

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_LAYERS = 4096


class LayerTimes(NamedTuple):
    """What the layers take: each layer, and what the first and the last stage do besides (embedding; head and loss)."""

    layer_L: np.ndarray
    before: float
    after: float

    def of(self, counts: Sequence[int]) -> np.ndarray:
        """Time of each stage when these numbers of layers lie on them (S)."""
        ends = np.cumsum(counts)
        sums = np.append(0.0, np.cumsum(self.layer_L))
        time_S = sums[ends] - sums[ends - np.asarray(counts)]
        time_S[0] += self.before
        time_S[-1] += self.after
        return time_S


def layers_now(total: int, stages: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """How many layers each stage has in the run: as given, else as evenly as they go.

    Raises:
        BadShape: the numbers do not fit the stages or each other.
    """
    if stages > total or total > MOST_LAYERS:
        raise BadShape(f"{total} layers do not go onto {stages} stages of one layer or more (at most {MOST_LAYERS})")
    counts = tuple(given) if given is not None else tuple(orders.layers_of_stages(total, stages))
    if len(counts) != stages or sum(counts) != total or min(counts) < 0:
        raise BadShape(
            f"the run has {stages} stages and the split {total} layers; the layers now are {','.join(map(str, counts))}"
        )
    return counts


def layer_times(stage_S: np.ndarray, counts: Sequence[int]) -> LayerTimes:
    """What each layer takes, from the times of the stages that hold them.

    A layer takes its stage's time over the stage's layers. The first and the last stage do more than their layers: what
    they take over a usual layer of the stages between (their median) is embedding, or head and loss, and stays there.
    With fewer than three stages the faster of the two tells what a layer takes.

    >>> layer_times(np.array([2.0, 2.0, 2.0, 5.0]), [2, 2, 2, 2])
    LayerTimes(layer_L=array([1., 1., 1., 1., 1., 1., 1., 1.]), before=0.0, after=3.0)
    """
    held = np.maximum(np.asarray(counts), 1)
    each_S = np.where(np.asarray(counts) > 0, stage_S / held, 0.0)
    inner = each_S[1:-1][np.asarray(counts)[1:-1] > 0]
    usual = float(np.median(inner)) if len(inner) else float(each_S.min())
    ends = (0, -1) if len(counts) > 1 else ()
    for end in ends:
        each_S[end] = min(each_S[end], usual)
    beyond_S = stage_S - each_S * np.asarray(counts)
    layer_L = np.repeat(each_S, counts)
    return LayerTimes(layer_L, float(beyond_S[0]), float(beyond_S[-1]) if len(counts) > 1 else 0.0)


def best_split(times: LayerTimes, stages: int, *, most_S: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """The contiguous split whose longest stage is shortest; of those, the one nearest to equal (least sum of squares).

    Exact, by dynamic programming over (stages, layers) twice: the least longest stage, then the least sum of squares
    among splits that are no longer. None where the layers do not go into ``most_S``, the most that each stage can hold.

    >>> best_split(LayerTimes(np.ones(7), 0.0, 2.0), 3)
    (3, 3, 1)
    """
    most = list(most_S) if most_S is not None else [len(times.layer_L)] * stages
    longest = _least(times, most, bound=np.inf, combine=np.maximum)
    if longest is None:
        return None
    bottleneck = float(times.of(longest).max())
    return _least(times, most, bound=bottleneck * (1 + 1e-12), combine=lambda a, b: a + b * b)


def _least(times: LayerTimes, most: Sequence[int], *, bound: float, combine: object) -> tuple[int, ...] | None:
    """The split of the least cost whose stages all take at most ``bound`` and hold 1 to ``most`` layers."""
    count, stages = len(times.layer_L), len(most)
    sums = np.array([0.0, *accumulate(times.layer_L.tolist())])
    cost = np.full(count + 1, np.inf)
    cost[0] = 0.0
    chosen = np.zeros((stages, count + 1), np.int64)
    for stage in range(stages):
        extra = (times.before if stage == 0 else 0.0) + (times.after if stage == stages - 1 else 0.0)
        new = np.full(count + 1, np.inf)
        for end in range(stage + 1, count + 1):
            first = np.arange(max(stage, end - most[stage]), end)
            if not len(first):
                continue
            own = sums[end] - sums[first] + extra
            total = np.where(own <= bound, combine(cost[first], own), np.inf)  # type: ignore[operator]
            at = int(np.argmin(total))
            new[end], chosen[stage, end] = total[at], first[at]
        cost = new
    if not np.isfinite(cost[count]):
        return None
    counts, end = [], count
    for stage in reversed(range(stages)):
        counts.append(end - int(chosen[stage, end]))
        end = int(chosen[stage, end])
    return tuple(reversed(counts))
