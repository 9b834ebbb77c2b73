"""Intervals of differences: Student's, with as many steps as are independent."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ppdiag.analyzers.spread import independent_count, interval_of_difference, student


@pytest.mark.parametrize(
    ("freedom", "table"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042)]
)
def test_the_quantile_is_that_of_the_tables(freedom, table):
    # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, column 0.975.
    assert student(freedom) == pytest.approx(table, abs=0.004)


def test_the_textbook_case_of_welch():
    # By hand: means 2 and 6, variances 1 and 4 of 3 each, uncorrelated (r is negative, and counts as 0).
    # standard error = sqrt(1/3 + 4/3) = 1.291; freedom = (5/3)^2 / ((1/3)^2/2 + (4/3)^2/2) = 2.94, so 2: 4.303.
    low, high = interval_of_difference(np.array([1.0, 3.0, 2.0]), np.array([4.0, 8.0, 6.0]))
    assert [low, high] == pytest.approx([4 - 4.303 * 1.291, 4 + 4.303 * 1.291], abs=0.002)


def test_steps_that_follow_each_other_count_for_fewer():
    alternating = np.array([1.0, 2.0] * 10)
    drifting = np.repeat([1.0, 2.0], 10)
    assert independent_count(alternating) == 20
    # By hand: neighbours agree but for one pair: r = (18 - 1) / 20 = 0.85, and 20 * 0.15 / 1.85 = 1.6, at least 2.
    assert independent_count(drifting) == 2
    wide, narrow = (interval_of_difference(x, x)[1] for x in (drifting, alternating))
    assert wide > 3 * narrow


def test_too_few_steps_have_no_interval():
    assert interval_of_difference(np.array([1.0, 1.0]), np.array([2.0] * 9)) == (-math.inf, math.inf)


def test_steps_without_any_noise_differ_by_exactly_this():
    assert interval_of_difference(np.array([1.0] * 3), np.array([1.5] * 4)) == (0.5, 0.5)


def test_runs_of_the_same_job_are_rarely_told_apart():
    random = np.random.default_rng(7)
    wrong = 0
    for _ in range(400):
        low, high = interval_of_difference(random.normal(1, 0.1, 12), random.normal(1, 0.1, 8))
        wrong += not low <= 0 <= high
    assert wrong <= 0.075 * 400
