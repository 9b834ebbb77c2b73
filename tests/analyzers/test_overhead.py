from __future__ import annotations

import numpy as np
import pytest

from ppdiag.analyzers.overhead import LEAST_PAIRS, overhead, shortfall, values_outside
from ppdiag.trace import RankFacts, Trace, make_spans

BLOCK = 6
ORDER = (False, True, True, False)


def trace_of(*ranks_ms: list[float], recorded: float = 0.0) -> Trace:
    """Each rank's plain step time in each block; a recorded block takes ``recorded`` (a fraction) longer."""
    facts = {}
    for rank, times in enumerate(ranks_ms):
        blocks = []
        for number, time_ms in enumerate(times):
            probed = ORDER[number % 4]
            wall_ns = round(5 * 1e6 * time_ms * (1 + recorded * probed))
            blocks.append({"first": number * BLOCK, "probed": probed, "steps": 5, "wall_ns": wall_ns})
        facts[rank] = RankFacts(rank, facts={"mode": "overhead", "blocks": tuple(blocks)})
    return Trace(make_spans([]), ranks=facts)


def test_the_cost_is_the_median_of_the_paired_differences() -> None:
    found = overhead(trace_of([100.0] * 20, [100.0] * 20, recorded=0.004))
    assert found is not None
    assert (found.fraction, found.low, found.high) == pytest.approx((0.004, 0.004, 0.004))


def test_a_machine_that_grows_slower_all_the_time_is_no_cost() -> None:
    found = overhead(trace_of([100.0 + block for block in range(40)]))
    assert found is not None
    # no-yes pairs see +1 ms, yes-no pairs -1 ms, of some 120
    assert abs(found.fraction) <= 1 / 119
    assert found.low < 0 < found.high


def test_one_pair_that_was_disturbed_does_not_move_the_cost() -> None:
    times = [100.0] * 40
    times[7] = 1000.0
    found = overhead(trace_of(times))
    assert found is not None
    assert (found.fraction, found.low, found.high) == (0.0, 0.0, 0.0)


def test_the_first_pair_is_warm_up_and_too_few_pairs_are_no_answer() -> None:
    short = trace_of([100.0] * 2 * LEAST_PAIRS)
    assert overhead(short) is None
    assert shortfall(short) == (
        f"too few steps to say what recording costs: {LEAST_PAIRS - 1} pairs of blocks, and {LEAST_PAIRS} are needed",
    )
    enough = trace_of([100.0] * 2 * (LEAST_PAIRS + 1))
    assert overhead(enough) is not None
    assert shortfall(enough) == ()


def test_blocks_that_one_rank_has_not_finished_are_left_out() -> None:
    assert overhead(trace_of([100.0] * 20, [100.0] * 4)) is None


def test_jobs_that_did_not_measure_say_nothing() -> None:
    plain = Trace(make_spans([]), ranks={0: RankFacts(0)})
    assert (overhead(plain), shortfall(plain)) == (None, ())


@pytest.mark.parametrize("count", [6, 12, 25])
def test_the_interval_holds_the_true_median_in_95_of_100_cases(count: int) -> None:
    random = np.random.default_rng(0)
    values = np.sort(random.exponential(size=(4000, count)) - np.log(2), axis=1)  # its median is 0
    outside = values_outside(count)
    held = (values[:, outside] <= 0) & (values[:, -1 - outside] >= 0)
    assert held.mean() >= 0.94
