"""Which schedule a measured order is: whole, with parts missing, and where nothing fits."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import chain, product
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.analyzers.schedules import NAMES, Op, order, recognise
from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
SPLIT_1F1B = "1F1B with split W"

CHUNKS = {"GPipe": 1, "1F1B": 1, SPLIT_1F1B: 1}
"""Chunks of each schedule in these tests; 2 where not named."""


def example(name: str, *, ranks: int = 4, microbatches: int = 8) -> list[list[Op]]:
    return order(name, ranks=ranks, chunks=CHUNKS.get(name, 2), microbatches=microbatches)


def every_order() -> Iterator[tuple[str, int, list[list[Op]]]]:
    sizes = product(NAMES, (2, 3, 4, 8), (1, 2, 3, 4), (2, 3, 4, 5, 6, 8, 10, 12, 16, 32))
    for name, ranks, chunks, microbatches in sizes:
        with suppress(ValueError):  # not every schedule has every size
            yield name, chunks, order(name, ranks=ranks, chunks=chunks, microbatches=microbatches)


def names_of_one_chunk(name: str) -> set[str]:
    """With one chunk these orders are the same as a simpler one's, always or where M is small."""
    simpler = {"LoopedBFS": {"GPipe"}, "Interleaved1F1B": {"1F1B", "GPipe"}, "InterleavedZeroBubble": {SPLIT_1F1B}}
    return {name} | simpler.get(name, set())


def without(orders: list[list[Op]], *kinds: Kind) -> list[list[Op]]:
    return [[op for op in rank_ops if op.kind not in kinds] for rank_ops in orders]


def test_every_schedule_is_recognised_by_its_order() -> None:
    for name, chunks, orders in every_order():
        found, match = recognise(orders)
        assert match == 1.0
        assert found in (names_of_one_chunk(name) if chunks == 1 else {name}), (name, len(orders), chunks)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing", [0, 2, 3])
def test_a_rank_without_a_record_changes_nothing(name: str, missing: int) -> None:
    orders = example(name)
    orders[missing] = []
    assert recognise(orders) == (name, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_one_lost_op_costs_one_op(name: str) -> None:
    orders = example(name)
    count = sum(map(len, orders))
    del orders[1][3]
    found, match = recognise(orders)
    assert found == name
    assert match == pytest.approx(1 - 1 / count)


@pytest.mark.parametrize("name", NAMES)
def test_one_op_out_of_its_place_costs_one_op(name: str) -> None:
    orders = example(name)
    orders[2].append(orders[2].pop(0))
    found, match = recognise(orders)
    assert found == name
    assert match == pytest.approx(1 - 1 / sum(map(len, orders)))


@pytest.mark.parametrize("name", NAMES)
def test_without_backwards_it_is_forward_only(name: str) -> None:
    assert recognise(without(example(name), B, W)) == ("forward-only", 1.0)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", SPLIT_1F1B, "ZBVZeroBubble"])
def test_one_microbatch_is_naive(name: str) -> None:
    assert recognise(example(name, microbatches=1)) == ("naive", 1.0)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_weights_split_off_and_run_at_once_leave_the_schedule_what_it_was(name: str) -> None:
    split = [
        list(chain.from_iterable((op, op._replace(kind=W)) if op.kind is B else (op,) for op in rank_ops))
        for rank_ops in example(name)
    ]
    assert recognise(split) == (f"{name} with split W", 1.0)


def test_gpipe_may_take_its_backwards_last_microbatch_first() -> None:
    # as in figure 2 of the GPipe paper
    orders = [[Op(F, r, m) for m in range(8)] + [Op(B, r, m) for m in reversed(range(8))] for r in range(4)]
    assert recognise(orders) == ("GPipe", 1.0)


@pytest.mark.parametrize(("microbatches", "group"), [(12, 6), (16, 8), (10, 6), (9, 9)])
def test_megatrons_larger_groups_are_interleaved(microbatches: int, group: int) -> None:
    orders = order("Interleaved1F1B", ranks=4, chunks=2, microbatches=microbatches, group=group)
    assert recognise(orders) == ("Interleaved1F1B", 1.0)


def test_two_microbatches_without_the_last_rank_get_the_simpler_name() -> None:
    orders = example("1F1B", microbatches=2)
    assert recognise(orders) == ("1F1B", 1.0)
    assert recognise([*orders[:-1], []]) == ("GPipe", 1.0)


def test_an_order_of_its_own_matches_nothing_well() -> None:
    # every rank runs each microbatch to its end before the next: no warm-up at all
    orders = [[Op(kind, r, m) for m in range(8) for kind in (F, B)] for r in range(4)]
    name, match = recognise(orders)
    assert name == "1F1B"
    assert match < 0.95


@pytest.mark.parametrize("nothing", [[], [[]], [[], [], []]])
def test_no_ops_are_unknown(nothing: list[list[Op]]) -> None:
    assert recognise(nothing) == ("unknown", 0.0)


def test_ops_of_stages_not_known_match_nothing() -> None:
    assert recognise([[Op(F, -1, 0), Op(B, -1, 0), Op(F, -1, 1), Op(B, -1, 1)]]) == ("unknown", 0.0)


@given(st.sampled_from(NAMES), st.integers(1, 500))
def test_only_the_order_of_microbatch_numbers_counts(name: str, shift: int) -> None:
    orders = [[op._replace(microbatch=2 * op.microbatch + shift) for op in rank_ops] for rank_ops in example(name)]
    assert recognise(orders) == (name, 1.0)


@given(st.sampled_from(NAMES), st.randoms(use_true_random=False))
def test_a_match_is_a_share_and_whole_only_for_the_order_itself(name: str, random: Random) -> None:
    orders = example(name, ranks=2)
    shuffled = [sorted(rank_ops, key=lambda _: random.random()) for rank_ops in orders]
    found, match = recognise(shuffled)
    assert 0.0 < match <= 1.0
    assert (match < 1.0) or found != name or shuffled == orders


def test_numpy_numbers_are_as_good() -> None:
    rows = [[np.array(op, dtype="<i2") for op in rank_ops] for rank_ops in example(SPLIT_1F1B)]
    assert recognise([[Op(*row) for row in rank_rows] for rank_rows in rows]) == (SPLIT_1F1B, 1.0)


def test_a_large_job_takes_under_half_a_second() -> None:
    orders = order("InterleavedZeroBubble", ranks=16, chunks=4, microbatches=128)
    orders[0].append(orders[0].pop(0))  # no whole match: every candidate is tried
    took_s = []
    for _ in range(3):  # the quickest is what it takes; others had a collection of the test session's garbage in them
        start = time.process_time()
        name, match = recognise(orders)
        took_s.append(time.process_time() - start)
        assert name == "InterleavedZeroBubble"
        assert match > 0.999
    assert min(took_s) < 0.5
