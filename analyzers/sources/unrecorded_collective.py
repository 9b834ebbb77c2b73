"""Finds a collective that a recording leaves out: ranks that go on together, step after step, waited for each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppdiag.model import NONE, Collective, Kind
from ppdiag.trace import SPAN_DTYPE

SPREAD_NS = 10_000_000
"""Ranks that go on within this time of each other left a collective together."""
STEPS = 0.9
"""Share of the steps in which it must show."""


@dataclass(frozen=True, slots=True)
class Found:
    """A collective between the last op of the pipeline and the first of the tail. S steps, R of its ranks.

    Attributes:
        ranks: its members (R).
        came_SR: when each came, in ns; ``went_SR``: when it went on.
    """

    ranks: np.ndarray
    came_SR: np.ndarray
    went_SR: np.ndarray

    def spans(self, group: int) -> np.ndarray:
        """As spans of a process group."""
        steps = len(self.came_SR)
        spans = np.zeros(self.came_SR.size, SPAN_DTYPE)
        spans["rank"] = np.tile(self.ranks, steps)
        spans["kind"], spans["op"] = Kind.COLLECTIVE, Collective.OTHER
        spans["chunk"] = spans["microbatch"] = spans["peer"] = spans["stage"] = NONE
        spans["step"] = spans["seq"] = np.repeat(np.arange(steps), len(self.ranks))
        spans["start_ns"] = spans["post_ns"] = self.came_SR.ravel()
        spans["end_ns"] = np.maximum(self.went_SR, self.came_SR).ravel()
        spans["group"] = group
        return spans


def find(spans: np.ndarray, twins: np.ndarray) -> Found | None:
    """The collective of the ranks ``twins``, and of those of other stages that go on with them; None where none shows.

    Args:
        spans: of all ranks, steps counted from 0.
        twins: the ranks of one stage.
    """
    ranks, came_SR, went_SR = _gaps(spans)
    member = np.isin(ranks, twins)
    if member.sum() < 2 or not np.isfinite(came_SR).all() or not np.isfinite(went_SR).all():
        return None
    last_S, together = came_SR[:, member].max(axis=1), went_SR[:, member]
    shows = (together.min(axis=1) >= last_S) & (np.ptp(together, axis=1) <= SPREAD_NS)
    if shows.mean() < STEPS:
        return None
    member |= _go_along(came_SR, went_SR, together)
    return Found(ranks[member], came_SR[:, member], went_SR[:, member])


def _go_along(came_SR: np.ndarray, went_SR: np.ndarray, together: np.ndarray) -> np.ndarray:
    """Mask of the ranks that go on at the same moment whenever they had come before it."""
    early = came_SR < together.min(axis=1, keepdims=True) - SPREAD_NS
    along = np.abs(went_SR - np.median(together, axis=1, keepdims=True)) <= SPREAD_NS
    return early.any(axis=0) & ((along | ~early).mean(axis=0) >= STEPS)


def _gaps(spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ranks, and for each step and rank when its last op of the pipeline ended and the op after that began.

    Infinite where a rank has none.
    """
    ranks, rank = np.unique(spans["rank"], return_inverse=True)
    shape = (int(spans["step"].max()) + 1, len(ranks))
    pipeline = np.isin(spans["kind"], (Kind.FORWARD, Kind.BACKWARD, Kind.SEND, Kind.RECV))
    came_SR, went_SR = np.full(shape, -np.inf), np.full(shape, np.inf)
    np.maximum.at(came_SR, (spans["step"][pipeline], rank[pipeline]), spans["end_ns"][pipeline].astype(np.float64))
    tail = ~pipeline & (spans["kind"] != Kind.HOST) & (spans["start_ns"] >= came_SR[spans["step"], rank])
    np.minimum.at(went_SR, (spans["step"][tail], rank[tail]), spans["start_ns"][tail].astype(np.float64))
    return ranks, came_SR, went_SR
