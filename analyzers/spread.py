"""How far the mean of one run's steps may be from that of another's by chance alone.

Steps are samples that follow each other: a slow step is often followed by a slow one, so that they count for fewer
than they are.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
LEAST_STEPS = 3
"""With fewer steps of a run its noise is not known."""


def interval_of_difference(a_K: np.ndarray, b_K: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of ``mean(b) - mean(a)``; infinite where one of them has fewer than ``LEAST_STEPS``.

    Source: B. L. Welch, "The generalization of Student's problem when several different population variances are
    involved" (1947), with the number of steps that count.
    """
    if min(len(a_K), len(b_K)) < LEAST_STEPS:
        return -math.inf, math.inf
    difference = float(np.mean(b_K) - np.mean(a_K))
    variances = [float(np.var(x_K, ddof=1)) / independent_count(x_K) for x_K in (a_K, b_K)]
    total = sum(variances)
    if total == 0:
        return difference, difference
    counts = [independent_count(x_K) for x_K in (a_K, b_K)]
    freedom = total**2 / sum(v**2 / (n - 1) for v, n in zip(variances, counts, strict=True))
    reach = student(freedom) * math.sqrt(total)
    return difference - reach, difference + reach


def independent_count(x_K: np.ndarray) -> float:
    """How many independent samples say as much as these: n (1 - r) / (1 + r), r the correlation of neighbours, >= 0.

    Never less than 2, for a variance to be had.

    Source: D. S. Wilks, Statistical Methods in the Atmospheric Sciences, section 5.2.4, of a first-order process.
    """
    deviation_K = x_K - np.mean(x_K)
    square = float(np.dot(deviation_K, deviation_K))
    r = float(np.dot(deviation_K[1:], deviation_K[:-1])) / square if square > 0 else 0.0
    r = min(max(r, 0.0), 1.0)
    return max(2.0, len(x_K) * (1 - r) / (1 + r))


def student(freedom: float) -> float:
    """How many standard errors to both sides hold 95 % of Student's distribution.

    >>> [round(student(freedom), 2) for freedom in (1, 2, 5, 10, 1e9)]
    [12.71, 4.3, 2.57, 2.23, 1.96]

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.5; exact for 1 and 2.
    """
    p = (1 + CONFIDENCE) / 2
    whole = max(1.0, math.floor(freedom))  # downwards: rather too wide than too narrow
    if whole == 1:
        return math.tan(math.pi * (p - 0.5))
    if whole == 2:
        return (2 * p - 1) * math.sqrt(2 / (1 - (2 * p - 1) ** 2))
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / whole**power for power, term in enumerate(terms))
