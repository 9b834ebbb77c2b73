"""From the shares of the job to those of each rank and stage: every part non-negative, and parts that sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.diagnosis import Cause, Place, Where, Why

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ppdiag.analyzers.where import Measured
    from ppdiag.analyzers.why import Shares

CAUSES = tuple(Cause)
PLACES = tuple(Place)
ROUNDING = 1e-9
"""A gain below this share of the step is the rounding of sums of doubles."""


@dataclass(frozen=True, slots=True)
class Attribution:
    """Both partitions of each rank's idle time, as fractions of the step time. R ranks.

    Attributes:
        busy_R: busy fraction.
        why_CR: causes x ranks, in the order of ``CAUSES``.
        where_PR: places x ranks, in the order of ``PLACES``.
    """

    busy_R: np.ndarray
    why_CR: np.ndarray
    where_PR: np.ndarray

    def why(self, ranks: Sequence[int] | np.ndarray | slice = slice(None)) -> Why:
        """Mean of the ranks (indices), so that tables sum."""
        return Why(
            **{cause.value: float(v) for cause, v in zip(CAUSES, self.why_CR[:, ranks].mean(axis=1), strict=True)}
        )

    def where(self, ranks: Sequence[int] | np.ndarray | slice = slice(None)) -> Where:
        """Mean of the ranks (indices), so that tables sum."""
        mean = self.where_PR[:, ranks].mean(axis=1)
        return Where(**{place.value: float(v) for place, v in zip(PLACES, mean, strict=True)})


def attribute(shares: Shares, measured: Measured, work_R: np.ndarray) -> Attribution:
    """The partitions over all steps together (each weighs by its length).

    For one rank idle = step - busy, and busy changes only with the work factor, so its imbalance is the job's plus
    (mean work - its work), and its other causes are the job's. A rank that ran ahead into the next step was busy for it
    within this one: what its busy time differs by from its work of these steps is no imbalance, and is taken from the
    bubble.

    Args:
        shares: the job's.
        measured: where each rank stood.
        work_R: work of each rank's ops of these steps, in seconds.
    """
    total = float(shares.duration_K.sum())
    busy_R = measured.busy_RK.sum(axis=1) / total
    why_CR = np.repeat(
        np.array([[float(shares.cause_K[cause].sum()) / total] for cause in CAUSES]), len(busy_R), axis=1
    )
    imbalance_R = (work_R.mean() - work_R) / total
    why_CR[CAUSES.index(Cause.IMBALANCE)] += imbalance_R
    why_CR[CAUSES.index(Cause.BUBBLE)] += busy_R.mean() - busy_R - imbalance_R
    why_CR = np.stack([without_negatives(why_CR[:, r]) for r in range(len(busy_R))], axis=1)
    where_PR = np.stack([measured.idle_RK[place].sum(axis=1) / total for place in PLACES])
    return Attribution(busy_R, why_CR, _at_least_zero(where_PR, 1.0 - busy_R))


def without_negatives(parts: np.ndarray) -> np.ndarray:
    """Shares with the same sum and none below zero.

    What a negative share lacks is taken off the bubble (a slow stage idles less than the equal schedule would), then
    off the rest in proportion.

    >>> without_negatives(np.array([0.2, -0.05, 0.1, 0.0, 0.0])).round(3).tolist()
    [0.15, 0.0, 0.1, 0.0, 0.0]
    """
    bubble = CAUSES.index(Cause.BUBBLE)
    debt = -float(parts[parts < 0].sum())
    kept = np.maximum(parts, 0.0)
    paid = min(debt, float(kept[bubble]))
    kept[bubble] -= paid
    rest = float(kept.sum())
    left = debt - paid
    return kept * ((rest - left) / rest) if left > 0 and rest > left else kept if left <= 0 else np.zeros_like(kept)


def _at_least_zero(where_PR: np.ndarray, idle_R: np.ndarray) -> np.ndarray:
    """Rounding may leave a place a hair below zero: set to zero, the sum kept."""
    kept = np.maximum(where_PR, 0.0)
    total = kept.sum(axis=0)
    return kept * np.divide(idle_R, total, out=np.zeros_like(total), where=total > 0)


def split_imbalance(imbalance: float, shares: Shares) -> Mapping[str, float]:
    """Imbalance by what is unequal, in proportion to what equalising each alone gains.

    Where none alone gains anything, all of it is the stages'.
    """
    return _by_gain(imbalance, shares.kept_K, shares.equalised_K, default="stage")


def split_host(host: float, shares: Shares) -> Mapping[str, float]:
    """Host time by its cause, in proportion to what taking each away alone gains; where none gains, it is Python's."""
    return _by_gain(host, shares.kept_K, shares.prompt_K, default="python")


def _by_gain(share: float, kept_K: np.ndarray, without_K: Mapping[str, np.ndarray], default: str) -> dict[str, float]:
    gains = {name: max(0.0, float((kept_K - time_K).sum())) for name, time_K in without_K.items()}
    total = sum(gains.values())
    if total <= ROUNDING * float(kept_K.sum()):
        return {name: share if name == default else 0.0 for name in gains}
    return {name: share * gain / total for name, gain in gains.items()}


def by_step(shares: Shares, measured: Measured) -> list[tuple[float, Why, Where]]:
    """Of each step its length in seconds and both partitions of the job's idle time in it."""
    found = []
    for k, duration_s in enumerate(shares.duration_K.tolist()):
        parts = np.array([float(shares.cause_K[cause][k]) for cause in CAUSES]) / duration_s
        stays = np.array([[float(measured.idle_RK[place][:, k].mean())] for place in PLACES]) / duration_s
        idle = np.array([1.0 - float(shares.busy_K[k]) / duration_s])
        why = dict(zip((cause.value for cause in CAUSES), without_negatives(parts).tolist(), strict=True))
        where = dict(zip((place.value for place in PLACES), _at_least_zero(stays, idle)[:, 0].tolist(), strict=True))
        found.append((duration_s, Why(**why), Where(**where)))
    return found
