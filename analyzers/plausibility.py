"""Whether stages that were found from messages and module calls can be right: the ops must have come in their order.

Without a framework's adapter some pipelines look like others: the two halves of a V that run through one module like
twice as many microbatches of a plain one, and weight gradients of their own like further backwards. What gives them
away is that ops begin before what they need was there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_OUT_OF_ORDER = 0.02
"""Share of ops that may begin too early, for clocks that are not quite aligned."""
_NEVER = np.iinfo(np.int64).min


def doubt(ops: np.ndarray, number: np.ndarray, pipelines: Sequence[Sequence[int]], tolerance_ns: float) -> str:
    """Why the stages that were found cannot be right; empty where nothing speaks against them.

    Args:
        ops: the forwards and backwards of the analysed steps, labelled.
        number: the step of each.
        pipelines: the ranks of each pipeline.
        tolerance_ns: bound on the error between two ranks' clocks.
    """
    pieces = _uneven(ops)
    if pieces:
        return pieces
    early, total = 0, 0
    for ranks in pipelines:
        own = np.isin(ops["rank"], ranks)
        for kind, towards in ((Kind.FORWARD, 1), (Kind.BACKWARD, -1)):
            chosen = own & (ops["kind"] == kind)
            found = _too_early(ops[chosen], number[chosen], towards, tolerance_ns)
            early, total = early + found[0], total + found[1]
    if early <= MOST_OUT_OF_ORDER * total:
        return ""
    return (
        f"the stages that were found without the help of the framework do not fit: {early} of {total} ops begin before "
        "the stage before them has ended (several stages of a rank may run through one module, as in a V)"
    )


def _uneven(ops: np.ndarray) -> str:
    """Says so where some stage has more backwards than forwards."""
    forwards = np.count_nonzero(ops["kind"] == Kind.FORWARD)
    backwards = np.count_nonzero(ops["kind"] == Kind.BACKWARD)
    if not backwards or forwards == backwards:
        return ""
    return (
        f"the microbatches that were found without the help of the framework do not fit: {forwards} forwards, and "
        f"{backwards} backwards (weight gradients may be computed apart, which cannot be told from backwards)"
    )


def _too_early(ops: np.ndarray, number: np.ndarray, towards: int, tolerance_ns: float) -> tuple[int, int]:
    """How many ops begin before that of the same microbatch on the stage before has ended, and of how many."""
    if not len(ops):
        return 0, 0
    stages, microbatches = int(ops["stage"].max()) + 1, int(ops["microbatch"].max()) + 1
    shape_KSM = (int(number.max()) + 1, stages, microbatches)
    ended_KSM = np.full(shape_KSM, _NEVER, np.int64)
    at = (number, ops["stage"], ops["microbatch"])
    ended_KSM[at] = ops["end_ns"]
    before = ops["stage"] - towards
    inside = (before >= 0) & (before < stages)
    needed = np.where(inside, ended_KSM[number, np.clip(before, 0, stages - 1), ops["microbatch"]], _NEVER)
    known = needed != _NEVER
    early = known & (ops["start_ns"] < needed - tolerance_ns)
    return int(early.sum()), int(known.sum())
