"""Stages found from messages are doubted where the ops came in another order."""

from __future__ import annotations

import numpy as np
import pytest

from ppdiag.analyzers.plausibility import doubt
from ppdiag.model import Kind
from ppdiag.trace import make_spans

RANKS, MICROBATCHES, MS = 3, 4, 1_000_000


def pipeline(*, lead_ns: int = 0, backwards: int = MICROBATCHES, swapped: bool = False) -> np.ndarray:
    """Forwards down the stages and backwards up again, 1 ms each, each stage beginning ``lead_ns`` too early."""
    rows = []
    for microbatch in range(MICROBATCHES):
        for position in range(RANKS):
            stage = RANKS - 1 - position if swapped else position
            start = (microbatch + position) * MS - position * lead_ns
            rows.append(op(Kind.FORWARD, stage, microbatch, start))
    for microbatch in range(backwards):
        for position in range(RANKS):
            start = (100 + microbatch + position) * MS - position * lead_ns
            rows.append(op(Kind.BACKWARD, RANKS - 1 - position, microbatch % MICROBATCHES, start))
    return make_spans(rows)


def op(kind: Kind, stage: int, microbatch: int, start_ns: int) -> dict[str, int]:
    where = {"rank": stage, "stage": stage, "chunk": 0, "microbatch": microbatch}
    return {"kind": int(kind), **where, "start_ns": start_ns, "end_ns": start_ns + MS}


def asked(ops: np.ndarray, tolerance_ns: float = 0.0) -> str:
    return doubt(ops, np.zeros(len(ops), np.int64), [range(RANKS)], tolerance_ns)


def test_ops_in_order_leave_no_doubt() -> None:
    assert asked(pipeline()) == ""


def test_ops_that_begin_before_their_input_was_computed_are_counted() -> None:
    found = asked(pipeline(lead_ns=MS // 2))
    assert f"{2 * 2 * MICROBATCHES} of {2 * 2 * MICROBATCHES} ops begin before" in found


def test_an_order_along_the_pipeline_that_is_the_wrong_way_round_is_doubted() -> None:
    assert "do not fit" in asked(pipeline(swapped=True))


@pytest.mark.parametrize(("tolerance_ns", "doubted"), [(MS * 0.4, True), (MS * 0.6, False)])
def test_what_the_clocks_may_be_off_by_is_no_reason_for_doubt(tolerance_ns: float, doubted: bool) -> None:  # noqa: FBT001
    assert bool(asked(pipeline(lead_ns=MS // 2), tolerance_ns)) == doubted


def test_more_backwards_than_forwards_are_doubted_and_none_at_all_are_not() -> None:
    found = asked(pipeline(backwards=2 * MICROBATCHES))
    assert f"{RANKS * MICROBATCHES} forwards, and {2 * RANKS * MICROBATCHES} backwards" in found
    assert asked(pipeline(backwards=0)) == ""
