"""What changed from one run to another, from steps simulated to the nanosecond."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.compare import compare
from ppdiag.analyzers.diagnose import analyse
from ppdiag.comparison import Outcome, What
from ppdiag.model import Kind
from tests.analyzers.factory import MS, Pipeline

if TYPE_CHECKING:
    from ppdiag.comparison import Comparison
    from ppdiag.trace import Trace

ORDERS = schedules.order("1F1B", ranks=2, chunks=1, microbatches=4)
STEPS = 8


def pipeline(**changes: object) -> Pipeline:
    """P=2, M=4: F takes 10 ms and B 20 ms, the optimizer 1 ms, on both ranks."""
    return replace(Pipeline(ORDERS, [0, 1], steps=STEPS, tail=0, tail_of_all=True), **changes)  # type: ignore[arg-type]


def compared(a: Trace, b: Trace) -> Comparison:
    return compare(analyse(a), analyse(b))


def heavy_stage_1(op, rank, step):  # noqa: ARG001
    return {Kind.FORWARD: 10, Kind.BACKWARD: 20}[op.kind] * MS * (2 if op.stage == 1 else 1)


def by_place(found: Comparison) -> dict[tuple[object, ...], float]:
    return {(c.what, c.stage if c.stage is not None else c.rank, c.link): 1e3 * c.change_s for c in found.places}


def test_a_run_and_itself_differ_in_nothing():
    trace = pipeline().trace()
    found = compared(trace, trace)
    assert found.step.outcome is Outcome.NO_DIFFERENCE
    assert {part.change_s for part in found.parts} == {0.0}
    assert all(abs(change.change_s) < 1e-12 for change in found.places)
    assert found.notes == ()
    assert found.same_work


def test_a_stage_that_takes_twice_as_long_is_the_place_of_all_of_the_change():
    found = compared(pipeline().trace(), pipeline(duration=heavy_stage_1).trace())
    # By hand: (M + P - 1) * 30 + 1 = 151 ms before. After: F of stage 0, then stage 1 without a pause (4 * 60 ms), the
    # last B of stage 0, the optimizer: 10 + 240 + 20 + 1 = 271 ms.
    assert found.step.a_s == pytest.approx(0.151)
    assert found.step.b_s == pytest.approx(0.271)
    assert by_place(found)[What.WORK, 1, None] == pytest.approx(120)
    assert by_place(found)[What.TOGETHER, None, None] == pytest.approx(0, abs=1e-6)
    assert found.places[0].stage == 1
    # Work is the mean over two ranks of 121 ms and, after, of 121 and 241 ms.
    parts = {part.name: 1e3 * part.change_s for part in found.parts}
    assert parts["work"] == pytest.approx(60)
    assert parts["host"] == pytest.approx(0, abs=1e-6)
    assert [stage.b_s[:2] for stage in found.stages] == [(0.010, 0.020), (0.020, 0.040)]


def test_parts_and_places_sum_to_the_change_of_the_step():
    slow = pipeline(duration=heavy_stage_1, transfer=lambda *_: 3 * MS, between=lambda rank, _: rank * 7 * MS)
    found = compared(pipeline().trace(), slow.trace())
    assert sum(part.change_s for part in found.parts) == pytest.approx(found.step.change_s)
    assert sum(change.change_s for change in found.places) == pytest.approx(found.step.change_s)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"transfer": lambda *_: 5 * MS}, (What.TRANSFER, None, (0, 1))),
        ({"before_optimizer": lambda rank, _: 40 * MS * (rank == 0)}, (What.HOST, 0, None)),
        ({"optimizer": 31 * MS}, (What.OPTIMIZER, None, None)),
    ],
)
def test_each_kind_of_change_is_laid_to_its_place(changes, place):
    found = compared(pipeline().trace(), pipeline(**changes).trace())
    assert by_place(found)[place] >= 0.8 * 1e3 * found.step.change_s > 0


def test_one_slow_rank_among_its_twins_is_named():
    def slow(op, rank, step):  # noqa: ARG001
        return {Kind.FORWARD: 10, Kind.BACKWARD: 20}[op.kind] * MS * (2 if rank == 3 else 1)

    twins = pipeline(replicas=2, tail_of_all=False)
    place = compared(twins.trace(), replace(twins, duration=slow).trace()).places[0]
    assert (place.what, place.stage, place.rank) == (What.WORK, 1, 3)
    both = compared(twins.trace(), replace(twins, duration=heavy_stage_1).trace()).places[0]
    assert (both.what, both.stage, both.rank) == (What.WORK, 1, None)


def test_the_other_way_round_is_the_opposite():
    a, b = pipeline().trace(), pipeline(duration=heavy_stage_1).trace()
    there, back = by_place(compared(a, b)), by_place(compared(b, a))
    assert there.keys() == back.keys()
    assert all(back[place] == pytest.approx(-there[place]) for place in there)
    assert compared(b, a).step.outcome is Outcome.FASTER


def noisy(seed: int, mean: float = 10) -> Pipeline:
    random = np.random.default_rng(seed)
    length = (random.normal(mean, 1, (STEPS + 1, 64)) * MS).astype(int)
    return pipeline(duration=lambda op, rank, step: int(length[step, op.microbatch * 4 + rank * 2 + (op.kind == 2)]))


def test_noise_is_no_difference_and_a_difference_beyond_it_is_one():
    assert compared(noisy(1).trace(), noisy(2).trace()).step.outcome is Outcome.NO_DIFFERENCE
    assert compared(noisy(1).trace(), noisy(2, mean=15).trace()).step.outcome is Outcome.SLOWER


def test_too_few_steps_are_said():
    found = compared(pipeline().trace(), pipeline(steps=3).trace())
    assert found.step.outcome is Outcome.UNKNOWN
    assert any(note.startswith("B has too few steps (2)") for note in found.notes)


def test_jobs_of_other_shape_are_compared_by_cause_alone():
    more = schedules.order("1F1B", ranks=2, chunks=1, microbatches=8)
    found = compared(pipeline().trace(), pipeline(orders=more).trace())
    assert found.places == ()
    assert not found.same_work
    assert "M (microbatches) 4 and 8" in found.notes[0]
    # 151 ms over 4 microbatches, and (8 + 1) * 30 + 1 = 271 ms over 8.
    assert "37.75 ms in A and 33.88 ms in B a microbatch" in found.notes[1]
    assert sum(part.change_s for part in found.parts) == pytest.approx(found.step.change_s)


def test_another_schedule_does_the_same_work():
    found = compared(
        pipeline().trace(), pipeline(orders=schedules.order("GPipe", ranks=2, chunks=1, microbatches=4)).trace()
    )
    assert found.same_work
    assert "schedule 1F1B and GPipe" in found.notes[0]


def test_messages_of_another_size_are_said():
    a, b = pipeline().trace(), pipeline().trace()
    b.spans["size_bytes"] *= 2
    assert any("messages of 1024 bytes and of 2048" in note for note in compared(a, b).notes)


def test_the_dict_holds_all_that_was_found():
    found = compared(pipeline().trace(), pipeline(steps=3).trace()).to_dict()
    assert found["schema"] == "ppdiag.comparison/1"
    assert found["outcome"] == "unknown"
    assert found["step"]["low_s"] is None
    assert {part["name"] for part in found["parts"]} == {
        "work",
        "bubble",
        "imbalance",
        "communication",
        "host",
        "unexplained",
    }


def test_collectives_of_a_group_that_only_the_second_run_has_are_a_place():
    # the first job never used the group, so that its record does not name it
    a = replace(pipeline(tail=None).trace(), groups=())
    found = compared(a, pipeline(tail=50 * MS).trace())
    (collectives,) = [change for change in found.places if change.what is What.COLLECTIVE]
    assert collectives.group == "group0"
    assert collectives.change_s == pytest.approx(0.050)
