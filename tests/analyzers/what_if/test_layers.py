"""The best split of the layers, against all splits, and what a layer takes."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.analyzers.what_if.layers import LayerTimes, best_split, layer_times, layers_now
from ppdiag.errors import BadShape


def every_split(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, layers), stages - 1)
    return [tuple(np.diff([0, *own, layers]).tolist()) for own in cuts]


@given(
    layers=st.lists(st.integers(1, 9), min_size=3, max_size=9),
    stages=st.integers(1, 3),
    ends=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    most=st.none() | st.integers(2, 6),
)
def test_no_split_is_better_than_the_best(
    layers: list[int], stages: int, ends: tuple[int, int], most: int | None
) -> None:
    times = LayerTimes(np.array(layers, float), *map(float, ends))
    possible = [split for split in every_split(len(layers), stages) if most is None or max(split) <= most]
    found = best_split(times, stages, most_S=None if most is None else [most] * stages)
    if not possible:
        assert found is None
        return
    cost = {split: (float(times.of(split).max()), float((times.of(split) ** 2).sum())) for split in possible}
    assert found is not None
    assert cost[found] == pytest.approx(min(cost.values()))


def test_what_the_last_stage_takes_over_its_layers_is_head_and_loss() -> None:
    times = layer_times(np.array([2.5, 4.0, 2.0, 5.0]), [2, 4, 2, 2])
    assert times.layer_L.tolist() == [1.0] * 10
    assert (times.before, times.after) == (0.5, 3.0)


def test_layers_of_a_stage_between_take_their_time_along() -> None:
    # stage 1's four layers take 2 each; one of them goes to stage 2
    assert layer_times(np.array([4.0, 8.0, 4.0]), (4, 4, 4)).of((4, 3, 5)).tolist() == [4.0, 6.0, 6.0]


def test_layers_lie_evenly_unless_it_is_said_how() -> None:
    assert layers_now(32, 4, None) == (8, 8, 8, 8)
    assert layers_now(30, 4, None) == (7, 8, 8, 7)


@pytest.mark.parametrize("now", [(8, 8, 8), (8, 8, 8, 9), (-1, 11, 11, 11)])
def test_a_split_that_does_not_fit_the_run_is_refused(now: tuple[int, ...]) -> None:
    with pytest.raises(BadShape, match="the run has 4 stages and the split 32 layers"):
        layers_now(32, 4, now)
