"""The figures of tutorials: reproduced, or shown wrong beside the right one."""

from __future__ import annotations

import pytest

from ppdiag.analyzers.planning import formulas


def _values(answer: formulas.Answer) -> dict[str, float]:
    return {quantity.name: quantity.value for quantity in answer.quantities}


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches", "percent"),
    [
        (4, 1, 4, 42.86),
        (4, 1, 8, 27.27),
        (8, 1, 32, 17.95),
        (8, 1, 64, 9.86),
        (8, 1, 8, 46.67),
        (4, 2, 8, 15.79),
        (4, 4, 8, 8.57),
        (4, 8, 8, 4.48),
        (8, 2, 64, 5.19),
        (8, 4, 64, 2.66),
    ],
)
def test_the_bubble_is_exact(ranks, chunks, microbatches, percent):
    assert round(100 * formulas.bubble_of_total(ranks, chunks, microbatches), 2) == percent


def test_the_rule_of_thumb_is_too_low_where_chunks_interleave():
    # A tutorial's table for P=8, M=64 reads 9.9, 9.9, 4.9, 2.4; the last is 2.46, cut off instead of rounded.
    thumbs = [round(100 * formulas.bubble_rule_of_thumb(8, chunks, 64), 2) for chunks in (1, 2, 4)]
    assert thumbs == [9.86, 4.93, 2.46]
    exact = [round(100 * formulas.bubble_of_total(8, chunks, 64), 2) for chunks in (1, 2, 4)]
    assert exact == [9.86, 5.19, 2.66]


def test_one_batch_at_a_time_uses_an_eighth_of_eight_ranks():
    assert _values(formulas.bubble(8, 1, 1))["utilisation without microbatches (naive), 1/P"] == 0.125
    assert formulas.bubble_of_total(8, 1, 1) == 0.875


def test_the_72_gpu_example_has_a_bubble_of_8_percent_and_not_12():
    # 72 GPUs, TP=3, PP=8, global batch 1024, micro batch 4: printed as "DP=3, about 85 steps, bubble about 12 %".
    answer = formulas.accumulation(gpus=72, tensor=3, pipeline=8, global_batch=1024, micro_batch=4)
    values = _values(answer)
    assert values["DP = GPUs / (TP PP)"] == 3
    assert values["accumulation steps M = global batch / (micro batch x DP)"] == pytest.approx(85.333, abs=1e-3)
    assert round(100 * values["bubble / total of 1F1B with M = 85"], 1) == 7.6
    assert round(100 * values["bubble / ideal"], 1) == 8.2
    assert "1020 or 1032" in answer.notes[0]


def test_an_activation_of_4_x_4096_x_8192_is_256_mib_and_takes_10_7_ms():
    values = _values(formulas.message(micro_batch=4, seq=4096, hidden=8192, value_bytes=2, tensor=1, bytes_per_s=25e9))
    assert values["in MiB (2^20 bytes)"] == 256
    assert values["time of one message"] == pytest.approx(10.74e-3, rel=1e-3)


def test_gpipe_is_held_down_by_memory_and_1f1b_is_not():
    answer = formulas.microbatches(ranks=8, chunks=1, bubble_limit=0.1, budget_bytes=8e9, per_microbatch_bytes=1e9)
    values = _values(answer)
    assert (values["M for a bubble of 10 % of the total"], values["M that GPipe can have"]) == (63, 8)
    assert any("fits with any M" in note for note in answer.notes)
    assert any("46.7 %" in note for note in answer.notes)


@pytest.mark.parametrize(("limit", "fewest"), [(0.5, 7), (0.2, 28), (0.1, 63), (0.05, 133)])
def test_the_fewest_microbatches_for_a_bubble_are_just_enough(limit, fewest):
    assert formulas.microbatches_for_bubble(8, 1, limit) == fewest
    assert formulas.bubble_of_total(8, 1, fewest) <= limit < formulas.bubble_of_total(8, 1, fewest - 1)


def test_gpt3_needs_350_gb_for_its_weights_alone():
    values = _values(formulas.parameters(parameter_count=175_000_000_000, tensor=8, pipeline=8, data=2))
    assert values["weights in 2 bytes"] == 350e9
    assert values["share of one rank, 1 / (TP PP)"] == 1 / 64
    # Megatron-LM's documentation: 18 bytes a parameter, 6 + 12/d with the distributed optimizer
    assert values["state of one rank"] == 18 * 175e9 / 64
    assert values["with ZeRO-1 (distributed optimizer)"] == 12 * 175e9 / 64


def test_tensor_parallelism_sends_far_more_than_pipeline_parallelism():
    values = _values(formulas.volume(layers=32, micro_batch=1, seq=4096, hidden=4096, tensor=8, pipeline=8))
    activation = 2 * 4096 * 4096
    assert values["tensor parallelism sends"] == 4 * 4 * 1.75 * activation
    assert values["pipeline parallelism sends"] == 2 * activation / 8
    assert values["ratio"] == 112


def test_an_answer_that_does_not_divide_says_what_is_left_over():
    answer = formulas.accumulation(gpus=100, tensor=8, pipeline=8, global_batch=64, micro_batch=1)
    assert "36 would be left over" in answer.notes[0]
