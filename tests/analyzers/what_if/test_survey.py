"""A survey names the change that undoes what was planted, and refuses what memory has no room for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import analyse
from ppdiag.analyzers.what_if import Change, Place, Run, run_of
from ppdiag.analyzers.what_if.memory import device_bytes
from ppdiag.analyzers.what_if.survey import answer, best_layers, single_changes
from ppdiag.errors import BadShape
from ppdiag.model import Kind
from tests.analyzers.factory import MS, Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppdiag.analyzers.schedules import Op

GIB = 1 << 30


def run_of_stages(
    *factors: int, transfer: Callable[[int, int], int] = lambda _src, _dst: 0, microbatches: int = 8
) -> Run:
    """1F1B over stages of which each layer's F takes 1 ms, B 2 ms, times the factor."""
    ranks = len(factors)

    def duration(op: Op, _rank: int, _step: int) -> int:
        return factors[op.stage] * (1 if op.kind is Kind.FORWARD else 2) * MS

    orders = schedules.order("1F1B", ranks=ranks, chunks=1, microbatches=microbatches)
    return run_of(analyse(Pipeline(orders, range(ranks), duration=duration, transfer=transfer).trace()))


def with_memory(run: Run, **facts: int) -> Run:
    ranks = {rank: replace(known, facts={**known.facts, **facts}) for rank, known in run.trace.ranks.items()}
    return replace(run, trace=replace(run.trace, ranks=ranks))


def test_the_repair_of_a_planted_stage_is_first() -> None:
    run = run_of_stages(10, 10, 30, 10)
    found = answer(run, [change for change in single_changes(run) if change.microbatches is None])
    assert found.predictions[0].change.repair == (Place("stage", 2),)


def test_the_planted_link_is_the_first_of_the_links() -> None:
    run = run_of_stages(10, 10, 10, 10, transfer=lambda src, dst: 15 * MS if {src, dst} == {1, 2} else 0)
    links = [change.links[0].stages for change in single_changes(run) if change.links]
    assert links[0] == (1, 2)
    gains = {found.change.links[0].stages: found.gain for found in answer(run, single_changes(run)).predictions
             if found.change.links}  # fmt: skip
    assert gains[1, 2] == pytest.approx(gains[None])


def test_the_schedule_of_the_run_is_not_among_the_changes() -> None:
    assert "1f1b" not in {change.schedule for change in single_changes(run_of_stages(10, 10, 10, 10))}


def test_the_best_split_evens_out_the_stages() -> None:
    # 8, 12, 8, 8 layers of 1 ms
    assert best_layers(run_of_stages(8, 12, 8, 8), (8, 12, 8, 8)).layers == (9, 9, 9, 9)


def test_a_schedule_that_memory_has_no_room_for_is_refused_with_the_number() -> None:
    # 1F1B's first rank holds 4 of 8 microbatches at its peak of 20 GiB; GPipe holds 8, of 3 GiB each: 12 GiB more
    run = with_memory(run_of_stages(10, 10, 10, 10), peak_memory_bytes=20 * GIB, activation_bytes=3 * GIB)
    found = answer(run, [Change(schedule="gpipe"), Change(microbatches=16)], limit_bytes=24 * GIB)
    assert [one.change.microbatches for one in found.predictions] == [16]
    assert found.refused[0].reason == "rank 3 of the pipeline would hold 41.0 GiB, and 24.0 GiB are allowed"


def test_a_split_leaves_no_stage_more_layers_than_its_memory_has_room_for() -> None:
    # 12 layers take 24 GiB on every rank: 2 GiB a layer on stage 1, 3 on the others; room for 8 and more
    run = with_memory(run_of_stages(8, 12, 8, 8), peak_memory_bytes=24 * GIB)
    assert best_layers(run, (8, 12, 8, 8), limit_bytes=30 * GIB).layers == (9, 9, 9, 9)
    with pytest.raises(BadShape, match="36 layers do not fit: the stages have room for 6,10,6,6"):
        best_layers(run, (8, 12, 8, 8), limit_bytes=20 * GIB)


def test_the_smallest_device_is_the_limit() -> None:
    run = with_memory(run_of_stages(10, 10), device_memory_bytes=80 * GIB)
    small = replace(run.trace.ranks[1], facts={"device_memory_bytes": 40 * GIB})
    mixed = replace(run, trace=replace(run.trace, ranks={**run.trace.ranks, 1: small}))
    assert (device_bytes(run), device_bytes(mixed), device_bytes(run_of_stages(10, 10))) == (80 * GIB, 40 * GIB, None)


def test_recomputing_keeps_inputs_alone() -> None:
    run = with_memory(run_of_stages(10, 10, 10, 10), peak_memory_bytes=20 * GIB, activation_bytes=3 * GIB)
    held = answer(run, [Change(checkpoint=True)]).predictions[0].memory
    # the first rank holds 4 microbatches: 12 GiB of activations become 3 GiB, of the backward that runs, and 4 KiB
    assert held.bytes_R is not None
    assert held.bytes_R[0] == pytest.approx(11 * GIB, rel=1e-6)
