"""Each rule fires on what breaks it, and not on what is nearly the same and right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppdiag.analyzers.planning.arguments import Claim
from ppdiag.analyzers.planning.check import ERROR, NOTE, WARNING, findings
from ppdiag.analyzers.planning.hardware import DEVICES, NETWORKS

RIGHT = Claim(
    framework="megatron",
    world_size=64,
    per_node=8,
    tensor=8,
    pipeline=4,
    micro_batch=1,
    global_batch=64,
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    seq=4096,
    schedule="1f1b",
    zero_stage=0,
)


def _found(claim: Claim, **known) -> list[tuple[str, str]]:
    return [(one.severity, one.rule) for one in findings(claim, **known)]


def test_a_right_command_has_nothing_but_its_bubble():
    assert _found(RIGHT) == [(NOTE, "bubble")]
    words = findings(RIGHT)[0].words
    assert "8.6 %" in words  # (P-1) / (M+P-1) = 3/35
    assert "9.4 % over the ideal time" in words
    assert "keeps the activations of 4 microbatches" in words


@pytest.mark.parametrize(
    ("changes", "severity", "rule"),
    [
        ({"world_size": 72}, ERROR, "world size"),
        ({"data": 4}, ERROR, "world size"),
        ({"heads": 36, "kv_heads": 36}, ERROR, "heads"),
        ({"kv_heads": 12}, ERROR, "key/value heads"),
        ({"hidden": 4100}, ERROR, "width"),
        ({"layers": 30}, ERROR, "layers"),
        ({"layers": 3}, ERROR, "layers"),
        ({"global_batch": 63}, ERROR, "batch"),
        ({"chunks": 2, "schedule": "interleaved", "global_batch": 60}, ERROR, "schedule"),
        ({"per_node": 4}, WARNING, "TP across nodes"),
        ({"per_node": 12}, WARNING, "TP across nodes"),
        ({"global_batch": 8}, WARNING, "microbatches"),
        ({"schedule": "gpipe"}, WARNING, "GPipe"),
        ({"framework": "deepspeed", "zero_stage": 2}, ERROR, "ZeRO"),
        ({"framework": "deepspeed", "accumulation": 3}, ERROR, "batch"),
        ({"unread": (("--num-layers", "many"),)}, ERROR, "value"),
        ({"unread": (("--num-layers", ""),)}, ERROR, "value"),
        ({"framework": "torchtitan", "local_batch": 9, "micro_batch": 2, "uneven": True}, ERROR, "batch"),
        ({"expert": 2}, ERROR, "experts"),
        ({"experts": 9, "expert": 2}, ERROR, "experts"),
        ({"experts": 8, "expert": 4}, ERROR, "experts"),  # 64 processes over 8 x 4 x 4
        ({"chunks": 2, "schedule": "interleaved", "slow_network": "NCCL_IB_DISABLE=1"}, WARNING, "interleaving"),
    ],
)
def test_a_rule_that_is_broken_is_found(changes, severity, rule):
    found = _found(replace(RIGHT, **changes))
    assert (severity, rule) in found
    assert all(one.fix for one in findings(replace(RIGHT, **changes)) if one.severity != NOTE)


@pytest.mark.parametrize(
    "changes",
    [
        {"unread": (("--num-layers", "$LAYERS"),)},
        {"unread": (("--num-layers", None),)},
        {"experts": 8, "expert": 2},
        {"experts": 8, "expert": 4, "expert_tensor": 1},
        {"kv_heads": 4},  # TP is a multiple: they are copied
        {"layers": 30, "uneven": True},
        {"global_batch": None},
        {"world_size": None},
        {"global_batch": 16},  # M = 8 = 2 P
        {"framework": "deepspeed", "zero_stage": 1, "accumulation": 32},
        {"chunks": 2, "schedule": "interleaved"},
        {"per_node": 16},
    ],
)
def test_a_near_miss_is_no_finding(changes):
    assert {severity for severity, _ in _found(replace(RIGHT, **changes))} == {NOTE}


def test_where_nothing_is_wrong_something_is_said():
    assert findings(replace(RIGHT, pipeline=1))[-1].words.startswith("PP = 1: there is no pipeline")
    assert "PipelineModule may" in findings(Claim(framework="deepspeed"))[-1].words


def test_fewer_microbatches_than_three_times_the_ranks_are_said_to_be_improvable():
    # P = 4, M = 8 = 2 P: 3/11; with 3 P = 12: 3/15
    note = findings(replace(RIGHT, global_batch=16))[-1]
    assert "27.3 %" in note.words
    assert "with M = 3 P = 12 it would be 20.0 %" in note.words
    assert "3 P" not in findings(replace(RIGHT, global_batch=24))[-1].words


def test_a_bubble_with_an_unknown_v_is_an_upper_bound():
    assert "at most 8.6 %" in findings(replace(RIGHT, schedule=None))[-1].words


def test_interleaving_pays_on_a_fast_network_only():
    claim = replace(RIGHT, chunks=2, schedule="interleaved")
    slow = {"device": DEVICES["h100"], "network": NETWORKS["10gbe"]}
    fast = {"device": DEVICES["h100"], "network": NETWORKS["ndr"]}
    assert (WARNING, "interleaving") in _found(claim, **slow)
    assert (WARNING, "interleaving") not in _found(claim, **fast)
    assert (WARNING, "interleaving") not in _found(RIGHT, **slow)


def test_what_divides_comes_before_where_it_lies_and_that_before_the_bubble():
    rules = [rule for _, rule in _found(replace(RIGHT, heads=36, hidden=4608, per_node=12, global_batch=8))]
    assert rules == ["heads", "TP across nodes", "microbatches", "bubble"]


def test_a_split_with_embedding_and_head_as_layers_is_offered():
    error = next(one for one in findings(replace(RIGHT, layers=126, pipeline=8)) if one.rule == "layers")
    assert "--account-for-embedding-in-pipeline-split" in error.fix


def test_the_global_batches_offered_divide():
    error = next(one for one in findings(replace(RIGHT, global_batch=63)) if one.rule == "batch")
    assert error.fix == "a global batch of 62 or 64"
