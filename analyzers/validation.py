"""What no recorder writes is left out on reading: a checksum says that a block is whole, not that it is sane."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

LATEST_NS = 1 << 61
"""Unix time reaches this in 2043; times below it, and differences of shifted ones, fit in 64 bits."""
MOST_RANKS = 1 << 20
_LABELS = ("stage", "chunk", "microbatch", "peer", "group", "seq")
_COUNTS = ("step", "size_bytes")


def plausible(spans: np.ndarray) -> np.ndarray:
    """Mask of the spans that a recorder can have written."""
    kept = np.isin(spans["kind"], [int(kind) for kind in Kind])
    kept &= (spans["end_ns"] >= spans["start_ns"]) & (spans["post_ns"] <= spans["end_ns"])
    for name in ("start_ns", "end_ns", "post_ns", "launch_ns"):
        kept &= (spans[name] >= 0) & (spans[name] < LATEST_NS)
    for name in _LABELS:
        kept &= spans[name] >= -1
    for name in _COUNTS:
        kept &= spans[name] >= 0
    return kept


def whole(value: object, *, low: int = 0, high: int = LATEST_NS) -> int:
    """A whole number in ``low..high - 1``.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
        raise ValueError(f"expected a whole number from {low} to {high - 1}, got {value!r:.50}")
    return value


def whole_or_none(facts: Mapping[str, object], name: str, *, low: int = 0, high: int = LATEST_NS) -> int | None:
    """A fact that is a whole number in ``low..high - 1``, else None."""
    try:
        return whole(facts.get(name), low=low, high=high)
    except ValueError:
        return None
