"""The schedules by name: which shapes they have, and which layers each rank holds."""

from __future__ import annotations

import pytest

from ppdiag.analyzers.planning import orders
from ppdiag.model import Kind


@pytest.mark.parametrize("name", orders.SCHEDULES)
def test_each_schedule_runs_every_op_once(name):
    chunks = orders.SCHEDULES[name].chunks or 2
    ops_of_ranks = orders.order(name, ranks=4, chunks=chunks, microbatches=8)
    homes = orders.stage_ranks(name, 4, chunks)
    kinds = [Kind.FORWARD, Kind.BACKWARD] + [Kind.WEIGHT] * any(op.kind is Kind.WEIGHT for op in ops_of_ranks[0])
    for rank, ops in enumerate(ops_of_ranks):
        stages = [stage for stage, home in enumerate(homes) if home == rank]
        forwards = [(op.stage, op.microbatch) for op in ops if op.kind is Kind.FORWARD]
        assert sorted(forwards) == [(stage, microbatch) for stage in stages for microbatch in range(8)]
        assert len(ops) == len(set(ops))
        assert {op.kind for op in ops} <= set(kinds)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 12])
def test_zb_h2_keeps_twice_the_activations_of_1f1b_but_one(ranks, microbatches):
    from ppdiag.analyzers.schedules import peak_activations

    peaks = peak_activations(orders.order("zb-h2", ranks=ranks, chunks=1, microbatches=microbatches))
    assert peaks == [min(microbatches, 2 * (ranks - rank) - 1) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("1f1b", (4, 2, 8), "1F1B has 1 stage a rank, not 2"),
        ("zb-v", (4, 1, 8), "ZB-V has 2 stages a rank, not 1"),
        ("dualpipe-v", (4, 2, 4), "DualPipeV needs a microbatch for each of its 8 stages, not 4"),
        ("gpipe", (0, 1, 8), "P, V and M must be at least 1, not 0, 1 and 8"),
    ],
)
def test_a_shape_that_a_schedule_cannot_have_is_refused_in_words(name, shape, words):
    ranks, chunks, microbatches = shape
    assert orders.refusal(name, ranks=ranks, chunks=chunks, microbatches=microbatches) == words
    with pytest.raises(ValueError, match="not"):
        orders.order(name, ranks=ranks, chunks=chunks, microbatches=microbatches)


def test_32_layers_on_4_ranks_with_2_stages_each_lie_as_in_the_tutorial():
    homes = orders.stage_ranks("interleaved", 4, 2)
    assert homes == [0, 1, 2, 3, 0, 1, 2, 3]
    assert orders.layer_map(orders.layers_of_stages(32, 8), homes) == [
        [(0, 3), (16, 19)],
        [(4, 7), (20, 23)],
        [(8, 11), (24, 27)],
        [(12, 15), (28, 31)],
    ]


def test_32_layers_on_4_stages_are_8_each():
    assert orders.layer_map(orders.layers_of_stages(32, 4), [0, 1, 2, 3]) == [
        [(0, 7)],
        [(8, 15)],
        [(16, 23)],
        [(24, 31)],
    ]


def test_a_v_brings_the_first_and_the_last_stage_to_one_rank():
    homes = orders.stage_ranks("zb-v", 4, 2)
    assert orders.layer_map([4] * 8, homes)[0] == [(0, 3), (28, 31)]


def test_llama_3_has_a_layer_fewer_on_the_first_and_the_last_of_its_stages():
    # Dubey et al. 2024, section 3.3.2
    assert orders.layers_of_stages(126, 16) == [7] + [8] * 14 + [7]


@pytest.mark.parametrize("layers", range(2, 40))
@pytest.mark.parametrize("stages", range(1, 12))
def test_no_layer_is_lost_between_stages(layers, stages):
    assert sum(orders.layers_of_stages(layers, stages)) == layers
