"""What recording costs, from blocks of steps that were and were not recorded within one job."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.diagnosis import Overhead

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ppdiag.trace import Trace

LEAST_PAIRS = 6
"""With fewer, not even the smallest and the largest difference hold the median in 95 of 100 jobs: 2 / 2**6 = 3 %."""
CONFIDENCE = 0.95


def overhead(trace: Trace) -> Overhead | None:
    """The median over pairs of blocks of (recorded - not recorded) / not recorded; None without enough pairs.

    Ranks step together, so that a block's time is the mean over them. Blocks alternate no, yes, yes, no: each recorded
    one is paired with the neighbour that was not. The first pair is warm-up.
    """
    pairs = _pairs(_blocks(trace))[1:]
    if len(pairs) < LEAST_PAIRS:
        return None
    plain_P, recorded_P = np.array(pairs).T
    difference_P = np.sort((recorded_P - plain_P) / np.median(plain_P))
    outside = values_outside(len(pairs))
    return Overhead(float(np.median(difference_P)), float(difference_P[outside]), float(difference_P[-1 - outside]))


def shortfall(trace: Trace) -> tuple[str, ...]:
    """One sentence where a job that was to measure the cost was too short for it; nothing else."""
    meant = any(rank.facts.get("mode") == "overhead" for rank in trace.ranks.values())
    if not meant or overhead(trace) is not None:
        return ()
    pairs = max(0, len(_pairs(_blocks(trace))) - 1)
    return (f"too few steps to say what recording costs: {pairs} pairs of blocks, and {LEAST_PAIRS} are needed",)


def values_outside(count: int) -> int:
    """How many of ``count`` sorted values lie below (and above) an interval that holds their true median.

    It does so in at least 95 of 100 cases, whatever the distribution: each value is above the median or not, as a coin.

    >>> [values_outside(count) for count in (6, 8, 9, 20)]
    [0, 0, 1, 5]

    Source: the sign test; David and Nagaraja, Order Statistics (2003), section 7.1.
    """
    tail, outside = 0.0, 0
    while True:
        tail += math.comb(count, outside) / 2**count
        if tail > (1 - CONFIDENCE) / 2:
            return max(0, outside - 1)
        outside += 1


def _blocks(trace: Trace) -> dict[int, tuple[bool, float]]:
    """First step of each block that all ranks have -> (recorded, mean seconds a step)."""
    ranks = [rank.facts.get("blocks", ()) for rank in trace.ranks.values()]
    times: dict[int, list[tuple[bool, float]]] = {}
    for blocks in ranks:
        for block in blocks:
            if block["steps"] > 0:
                times.setdefault(block["first"], []).append((block["probed"], block["wall_ns"] / block["steps"] / 1e9))
    return {
        first: (found[0][0], float(np.mean([time for _, time in found])))
        for first, found in sorted(times.items())
        if len(found) == len(ranks)
    }


def _pairs(blocks: Mapping[int, tuple[bool, float]]) -> Sequence[tuple[float, float]]:
    """(not recorded, recorded) of each two blocks that follow each other."""
    found: list[Any] = list(blocks.values())
    pairs = [sorted(pair) for pair in zip(found[::2], found[1::2], strict=False)]
    return [(plain, recorded) for (first, plain), (second, recorded) in pairs if second and not first]
