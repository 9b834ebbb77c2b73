"""Shares of ranks: nothing negative, and sums kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.analyzers.attribution import CAUSES, without_negatives
from ppdiag.analyzers.why import CHOICES, shapley
from ppdiag.diagnosis import Cause

shares = st.lists(st.floats(-1, 1), min_size=len(CAUSES), max_size=len(CAUSES)).map(np.array)


@given(shares)
def test_shares_without_negatives_keep_their_sum(parts: np.ndarray) -> None:
    kept = without_negatives(parts.copy())
    assert (kept >= 0).all()
    assert kept.sum() == pytest.approx(max(0.0, parts.sum()), abs=1e-12)


@given(shares.filter(lambda parts: (parts >= 0).all()))
def test_shares_that_are_not_negative_are_kept(parts: np.ndarray) -> None:
    assert without_negatives(parts.copy()).tolist() == parts.tolist()


def test_a_debt_is_paid_by_the_bubble_first_then_by_all_in_proportion() -> None:
    # causes: bubble, imbalance, communication, host, unexplained
    assert without_negatives(np.array([0.3, -0.2, 0.1, 0.1, 0.0])) == pytest.approx([0.1, 0, 0.1, 0.1, 0])
    # 0.4 lacking: 0.3 from the bubble, the other 0.1 from 0.1 and 0.3 as 1 to 3
    assert without_negatives(np.array([0.3, -0.4, 0.1, 0.3, 0.0])) == pytest.approx([0, 0, 0.075, 0.225, 0])


@given(st.lists(st.floats(0, 1), min_size=8, max_size=8))
def test_the_shares_of_three_factors_sum_whatever_the_eight_times(times: list[float]) -> None:
    time = {choice: np.array([value]) for choice, value in zip(CHOICES, times, strict=True)}
    total = sum(float(share[0]) for share in shapley(time).values())
    assert total == pytest.approx(times[0] - times[-1], abs=1e-12)


def test_a_time_that_two_factors_cost_together_is_shared_between_them() -> None:
    # 6 s go by only while host and transfers are both kept; work costs 1 s by itself
    time = {choice: np.array([6.0 * (choice[0] and choice[1]) + choice[2]]) for choice in CHOICES}
    found = {cause: float(share[0]) for cause, share in shapley(time).items()}
    assert found == pytest.approx({Cause.HOST: 3.0, Cause.COMMUNICATION: 3.0, Cause.IMBALANCE: 1.0})
