"""The search: what is possible, what comes first, and that its numbers hold together."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from ppdiag.analyzers.planning import formulas, orders, plan, rules, simulate
from ppdiag.analyzers.planning.cost import estimate
from ppdiag.analyzers.planning.hardware import DEVICES, NETWORKS, Cluster
from ppdiag.analyzers.planning.layout import PLANNED, Job
from ppdiag.analyzers.planning.models import MODELS, Model, gpt


def _job(model: str, gpus: int, batch: int, *, device: str = "h100", network: str = "ndr") -> Job:
    return Job(MODELS[model], Cluster(gpus, 8, DEVICES[device], NETWORKS[network]), batch)


def _with_seq(job: Job, seq: int) -> Job:
    return replace(job, model=replace(job.model, seq=seq))


def _wish(**sizes):
    return plan.wish(**{"chunks": 1, "micro": 1, "schedule": "1f1b", "recompute": True, "zero1": True, **sizes})


def test_the_tutorials_list_of_plans_for_64_gpus_is_found_with_its_bubbles():
    model = Model(32, 4096, 32, 32, 128, 16384, 32000, 2048, gated=False)
    job = Job(model, Cluster(64, 8, DEVICES["a100"], NETWORKS["hdr"]), 2048)
    found = plan.candidates(job, schedules=("1f1b",), micro=1)
    structural = [rule for rule in rules.RULES if rule.name not in ("memory", "batch")]
    for rule in structural:
        found = found.take(~rule.broken(job, found))
    shapes = {*zip(found.data_C.tolist(), found.tensor_C.tolist(), found.pipeline_C.tolist(), strict=True)}
    listed = {(64 // (tensor * pipeline), tensor, pipeline) for tensor in (1, 2, 4, 8) for pipeline in (1, 2, 4, 8, 16)
              if tensor * pipeline <= 64}  # fmt: skip
    assert len(listed) == 19
    assert {shape for shape in shapes if shape[2] <= 16} == listed
    bubbles = [round(100 * formulas.bubble_of_total(pipeline, 1, 32), 1) for pipeline in (1, 2, 4, 8, 16)]
    assert bubbles == [0.0, 3.0, 8.6, 17.9, 31.9]


def test_32_layers_cannot_go_over_12_ranks():
    model = Model(32, 4096, 32, 32, 128, 16384, 32000, 2048, gated=False)
    job = Job(model, Cluster(96, 8, DEVICES["a100"], NETWORKS["hdr"]), 64)
    broken = dict(rules.broken_rules(job, _wish(tensor=8, pipeline=12, data=1)))
    assert set(broken) == {"layers"}
    assert "32 layers cannot be divided over PP x V = 12 x 1 = 12 stages" in broken["layers"]
    assert not rules.broken_rules(job, _wish(tensor=8, pipeline=8, data=1, micro=1))[1:]


def test_the_tutorials_72_gpu_layout_breaks_the_rules_of_heads_and_batch():
    model = replace(MODELS["llama2-70b"], kv_heads=64)
    job = Job(model, Cluster(72, 8, DEVICES["a100"], NETWORKS["hdr"]), 1024)
    broken = dict(rules.broken_rules(job, _wish(tensor=3, pipeline=8, data=3, micro=4)))
    assert "64 attention heads cannot be divided over TP = 3" in broken["heads"]
    assert "M would be 85.33" in broken["batch"]
    assert "node" in broken


def test_tp_8_pp_8_is_possible_for_a_100_billion_model_on_8_nodes():
    job = _job("gpt3-175b", 64, 256, device="a100", network="hdr")
    assert not rules.broken_rules(job, _wish(tensor=8, pipeline=8, data=1))


def test_tp_8_pp_16_dp_256_are_32768_gpus():
    job = _job("llama3-405b", 32768, 2048)
    assert not rules.broken_rules(job, _wish(tensor=8, pipeline=16, data=256))


@pytest.mark.parametrize(
    ("job", "layout"),
    [
        # Dubey et al. 2024, table 4: 405B on 8192 GPUs with TP 8, PP 16, DP 64
        (_job("llama3-405b", 8192, 2048), (8, 16, 64)),
        # Narayanan et al. 2021, table 1: models of this size with TP 8 and PP 8
        (_job("gpt3-175b", 1536, 1536, device="a100", network="hdr"), (8, 8, 24)),
        (_job("gpt3-175b", 512, 1536, device="a100", network="hdr"), (8, 8, 8)),
        # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 5: 405B on 512 GPUs
        (_job("llama3-405b", 512, 256), (8, 8, 8)),
    ],
)
def test_published_layouts_are_among_the_first_plans(job, layout):
    plans = plan.search(job).plans
    assert layout in [(one.tensor, one.pipeline, one.data) for one in plans]


@pytest.mark.parametrize(
    ("job", "layout"),
    [
        # NVIDIA NeMo, recipes/llama3_70b.py and Megatron-Bridge for H100 (with a context-parallel size of 2, which is
        # not searched): TP 4, PP 4, V 5
        (_job("llama3-70b", 512, 1024), (4, 4, 5, 1)),
        # NVIDIA NeMo, recipes/mixtral_8x7b.py: 64 GPUs, TP 1, PP 4, V 8, EP 8; with sequences of 4096 (of its 8192, all
        # activations do not fit here)
        (_with_seq(_job("mixtral-8x7b", 64, 512), 4096), (1, 4, 8, 8)),
    ],
)
def test_the_layouts_of_nemos_recipes_are_among_the_first_plans(job, layout):
    plans = plan.search(job).plans
    assert layout in [(one.tensor, one.pipeline, one.chunks, one.expert) for one in plans]


def test_experts_send_their_tokens_over_nvlink_within_a_node_and_over_the_network_beyond():
    # 32768 tokens of 4096 values of 2 bytes, twice for two experts: 7/8 leave the rank, 2 all-to-alls a pass, 3 passes
    # of 8 layers (recomputation) and 4 microbatches; the node of 8 holds 4 of the 8 where TP = 2.
    job = _job("mixtral-8x7b", 64, 64)
    layout = {"pipeline": 4, "expert": 8, "micro": 4}
    size = 2 * 32768 * 4096 * 2
    inside = plan.evaluate(job, _wish(tensor=1, data=16, **layout))[0]
    assert inside.microbatches == 1
    assert inside.expert_bytes == 3 * 8 * 2 * size * 7 / 8
    assert inside.expert_fraction * inside.step_s == pytest.approx(3 * 8 * 2 * size * 7 / 8 / 450e9)
    beyond = plan.evaluate(job, _wish(tensor=2, data=8, **layout))[0]
    seconds = 2 * 3 * 8 * 2 * size / 2 * (3 / 8 / 450e9 + 4 / 8 / 50e9)
    assert beyond.expert_fraction * beyond.step_s == pytest.approx(seconds)


def test_experts_that_cannot_be_spread_so_are_refused():
    assert "experts" in dict(
        rules.broken_rules(_job("mixtral-8x7b", 64, 64), _wish(tensor=1, pipeline=4, data=16, expert=3))
    )
    broken = dict(rules.broken_rules(_job("llama3-8b", 64, 64), _wish(tensor=1, pipeline=4, data=16, expert=2)))
    assert broken["experts"] == "EP = 2, but the model has no experts"


def test_fsdp_with_tensor_parallelism_is_a_way_without_a_pipeline():
    found = plan.search(_job("llama3-405b", 8192, 2048))
    by_name = {one.name.split(" TP =")[0]: one for one in found.alternatives}
    assert by_name["ZeRO-3 or FSDP with"].fits  # as in torchtitan's 2D runs
    assert not by_name["ZeRO-3 or FSDP alone"].fits  # 2048 sequences for 8192 replicas


def test_long_pipelines_are_planned_in_two_seconds():
    begin = time.process_time()
    plan.search(_job("llama3-405b", 10080, 40320), schedules=PLANNED)
    assert time.process_time() - begin < 2


def test_llama_3_without_recomputation_misses_its_memory_by_little_and_the_tool_says_so():
    # The paper trained 405B on 8192 GPUs without activation checkpointing, by freeing tensors early.
    broken = rules.broken_rules(_job("llama3-405b", 8192, 2048), _wish(tensor=8, pipeline=16, data=64, recompute=False))
    assert [name for name, _ in broken] == ["memory"]


def test_a_70_billion_model_on_512_gpus_is_planned_and_needs_no_pipeline_to_fit():
    found = plan.search(_job("llama3-70b", 512, 1024))
    assert all(one.fits for one in found.alternatives)
    assert all(one.tensor * one.pipeline * one.data == 512 for one in found.plans)
    assert {one.tensor for one in found.plans} <= {1, 2, 4, 8}


@pytest.mark.parametrize("name", MODELS)
def test_every_plan_that_is_given_breaks_no_rule_and_its_shares_are_shares(name):
    job = _job(name, 512, 1024)
    found = plan.search(job)
    assert found.plans
    assert [one.step_s for one in found.plans] == sorted(one.step_s for one in found.plans)
    for one in found.plans:
        assert max(one.memory_bytes) <= rules.usable_bytes(job)
        assert sum(one.layers) == job.model.layers
        assert job.global_batch == one.micro_batch * one.data * one.microbatches
        shares = (one.bubble_fraction, one.imbalance_fraction, one.transfer_fraction, one.tensor_fraction, one.mfu)
        assert all(0 <= share < 1 for share in shares)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "microbatches"),
    [("1f1b", 4, 1, 64), ("1f1b", 8, 1, 61), ("interleaved", 4, 3, 64), ("gpipe", 4, 1, 50), ("zb-h1", 4, 1, 48)],
)
def test_a_replay_of_a_few_microbatches_is_exact_for_many(schedule, ranks, chunks, microbatches):
    job = _job("llama3-8b", ranks, microbatches, network="10gbe")
    layout = _wish(tensor=1, pipeline=ranks, data=1, chunks=chunks, schedule=schedule)
    counts = orders.layers_of_stages(32, ranks * chunks)
    short = plan._replay(job, layout, schedule, (ranks, chunks, microbatches), counts)
    work = simulate.program(schedule, ranks=ranks, chunks=chunks, microbatches=microbatches)
    whole = simulate.run(work, plan._durations(job, layout, counts)).makespan_W
    assert short == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_closed_form_is_exact_for_equal_stages_and_free_transfers(schedule, chunks):
    model = replace(MODELS["llama3-8b"], vocab=1)
    network = replace(NETWORKS["ndr"], bytes_per_s=1e18, latency_s=0.0)
    job = Job(model, Cluster(32, 8, DEVICES["h100"], network), 64)
    layout = _wish(tensor=8, pipeline=4, data=1, chunks=chunks, schedule=schedule)
    assert estimate(job, layout)[0] == pytest.approx(plan.evaluate(job, layout)[0].step_s, rel=1e-4)


def test_the_replayed_bubble_is_the_exact_one():
    job = _job("llama3-8b", 32, 64)
    one = plan.evaluate(job, _wish(tensor=8, pipeline=4, data=1, chunks=2, schedule="interleaved"))[0]
    assert one.bubble_fraction == pytest.approx(formulas.bubble_of_total(4, 2, 64))


def test_a_slow_network_costs_step_time_and_a_faster_device_saves_it():
    layout = _wish(tensor=8, pipeline=4, data=2)
    steps = [
        plan.evaluate(_job("llama3-8b", 64, 64, device=device, network=network), layout)[0].step_s
        for device, network in (("h100", "10gbe"), ("h100", "ndr"), ("b200", "ndr"))
    ]
    assert steps == sorted(steps, reverse=True)


def test_nothing_fits_where_nothing_can():
    found = plan.search(_job("llama3-405b", 16, 1024))
    assert (found.feasible, found.plans) == (0, ())
    assert not any(one.fits for one in found.alternatives)


@pytest.mark.parametrize("schedule", PLANNED)
def test_every_schedule_can_be_planned_with(schedule):
    found = plan.search(_job("llama3-8b", 16, 64), schedules=(schedule,))
    assert all(one.schedule == schedule for one in found.plans)
    assert np.isfinite([one.step_s for one in found.plans]).all()


@pytest.mark.parametrize(
    ("shape", "layout", "batch", "published"),
    # Narayanan et al. 2021, table 1: teraFLOP/s a GPU on A100, recomputation counted as work
    [
        ((80, 12288, 96), (8, 8, 24), 2304, 148),
        ((96, 16384, 128), (8, 16, 15), 2160, 155),
        ((105, 20480, 128), (8, 35, 9), 2520, 163),
        ((128, 25600, 160), (8, 64, 6), 3072, 163),
    ],
)
def test_predicted_speed_is_within_10_percent_of_megatrons(shape, layout, batch, published):
    layers, hidden, heads = shape
    tensor, pipeline, data = layout
    model = gpt(layers=layers, hidden=hidden, heads=heads, vocab=51200, seq=2048)
    gpus = tensor * pipeline * data
    job = Job(model, Cluster(gpus, 8, DEVICES["a100"], NETWORKS["hdr"]), batch, flash=False)
    step_s = estimate(job, _wish(tensor=tensor, pipeline=pipeline, data=data))[0]
    assert 4 / 3 * model.step_flops * batch / gpus / step_s / 1e12 == pytest.approx(published, rel=0.10)
