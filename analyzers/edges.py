"""The edges of a step's graph while it is built, and their order by levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

CHAIN = -1
"""``link`` of an edge that is no message."""


class CyclicOrder(Exception):
    """The messages of a step contradict the order of its ops: the record is inconsistent."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Edges as columns, of the meaning that ``graph.Graph`` gives them; ``inferred``: the message is a guess."""

    src: np.ndarray
    dst: np.ndarray
    first: np.ndarray
    last: np.ndarray
    link: np.ndarray
    optional: np.ndarray
    transfer: np.ndarray
    inferred: np.ndarray

    @classmethod
    def of(cls, *, src: np.ndarray, dst: np.ndarray, first: np.ndarray, last: np.ndarray, steps: int) -> Edges:
        """Edges without a message."""
        count = len(src)
        no, nothing = np.zeros(count, bool), np.zeros((count, steps))
        return cls(src, dst, first, last, np.full(count, CHAIN), no, nothing, no)

    @classmethod
    def join(cls, parts: Sequence[Edges]) -> Edges:
        """All edges of the parts."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__})

    def take(self, order: np.ndarray) -> Edges:
        """The edges of these indices, in this order."""
        return Edges(**{name: getattr(self, name)[order] for name in self.__slots__})

    def as_fields(self) -> dict[str, Any]:
        """The columns by the names that ``graph.Graph`` gives them."""
        of_edges = {f"{name}_E": getattr(self, name) for name in ("src", "dst", "first", "last", "link", "optional")}
        return {**of_edges, "transfer_EK": self.transfer}


def excess(edges: Edges) -> np.ndarray:
    """What the inferred messages took over the median of their link (E x K)."""
    over = np.zeros_like(edges.transfer)
    for link in np.unique(edges.link[edges.inferred]):
        own = edges.inferred & (edges.link == link)
        positive = edges.transfer[own][edges.transfer[own] > 0]
        usual = float(np.median(positive)) if len(positive) else 0.0
        over[own] = np.maximum(edges.transfer[own] - usual, 0.0)
    return over


def levels(src: np.ndarray, dst: np.ndarray, joins: int) -> tuple[np.ndarray, np.ndarray]:
    """Order of the edges by (level of dst, dst), and the bounds of the levels in it.

    A join's level is the length of the longest path to it.

    Raises:
        CyclicOrder: the edges form a cycle.
    """
    out = np.argsort(src, kind="stable")
    out_start = np.searchsorted(src[out], np.arange(joins + 1))
    waiting_for = np.bincount(dst, minlength=joins)
    level = np.full(joins, -1, np.int64)
    ready, depth, seen = np.flatnonzero(waiting_for == 0), 0, 0
    while len(ready):
        level[ready] = depth
        seen += len(ready)
        reached = dst[out[_ranges(out_start[ready], out_start[ready + 1])]]
        np.subtract.at(waiting_for, reached, 1)
        ready = np.unique(reached[waiting_for[reached] == 0])
        depth += 1
    if seen < joins:
        raise CyclicOrder
    order = np.lexsort((dst, level[dst]))
    return order, np.searchsorted(level[dst][order], np.arange(1, depth + 1))


def _ranges(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """The integers of all [start, stop), joined.

    >>> _ranges(np.array([2, 7]), np.array([4, 8])).tolist()
    [2, 3, 7]
    """
    length = stop - start
    ends = np.cumsum(length)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(start - (ends - length), length)
