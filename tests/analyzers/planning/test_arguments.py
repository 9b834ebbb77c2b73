"""What is read from commands and configurations, and what is left unknown."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.analyzers.planning.arguments import read
from ppdiag.errors import BadConfig, PathNotFound


def _read(text: str, folder):
    return read(text.split(), folder=folder)


@pytest.mark.parametrize(
    ("command", "world_size", "per_node"),
    [
        ("torchrun --nproc_per_node 8 --nnodes 9 t.py", 72, 8),
        ("torchrun --nproc-per-node=4 t.py", 4, 4),
        ("python -m torch.distributed.run --nnodes=2 --nproc_per_node=8 t.py", 16, 8),
        ("env A=1 torchrun --nproc_per_node 8 t.py", 8, 8),
        ("torchrun --nproc_per_node gpu --nnodes 2 t.py", None, None),
        ("torchrun --nproc_per_node 8 --nnodes 1:4 t.py", None, 8),
        ("torchrun --nproc_per_node $N --nnodes 2 t.py", None, None),
        ("deepspeed --num_gpus 8 --num_nodes 4 t.py", 32, 8),
        ("srun --ntasks 64 --ntasks-per-node 8 python t.py", 64, 8),
        ("srun --nodes 4 --ntasks-per-node 8 python t.py", 32, 8),
        ("accelerate launch --num_processes 16 --num_machines 2 t.py", 16, 8),
        ("python t.py", None, None),
    ],
)
def test_the_world_size_is_read_from_the_launcher(command, world_size, per_node, tmp_path):
    claim = _read(command, tmp_path)
    assert (claim.world_size, claim.per_node) == (world_size, per_node)


def test_megatrons_arguments_are_read(tmp_path):
    claim = _read(
        "torchrun --nproc_per_node 8 --nnodes 16 pretrain_gpt.py --tensor-model-parallel-size 8 "
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 --num-layers 32 "
        "--micro-batch-size 1 --global-batch-size 1024 --num-attention-heads 32 --recompute-activations",
        tmp_path,
    )
    assert (claim.framework, claim.tensor, claim.pipeline, claim.chunks) == ("megatron", 8, 4, 2)
    assert (claim.data_size, claim.microbatches, claim.schedule) == (4, 256, "interleaved")
    assert claim.recompute


def test_deepspeeds_json_is_read(tmp_path):
    settings = {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "zero_optimization": {"stage": 2},
    }
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    claim = _read("deepspeed --num_gpus 8 t.py --deepspeed_config ds.json --pipe-parallel-size 4", tmp_path)
    assert (claim.framework, claim.pipeline, claim.micro_batch, claim.global_batch) == ("deepspeed", 4, 2, 256)
    assert (claim.accumulation, claim.zero_stage) == (8, 2)


def test_words_for_numbers_in_a_configuration_are_unknown(tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": "auto", "gradient_accumulation_steps": -1}')
    claim = _read("deepspeed t.py --deepspeed ds.json", tmp_path)
    assert (claim.global_batch, claim.accumulation) == (None, None)


def test_torchtitans_toml_is_read_and_the_command_has_the_last_word(tmp_path):
    pytest.importorskip("tomllib")
    (tmp_path / "job.toml").write_text(
        "[parallelism]\npipeline_parallel_degree = 4\ntensor_parallel_degree = 2\n"
        'pipeline_parallel_schedule = "Interleaved1F1B"\n[training]\nlocal_batch_size = 16\nseq_len = 8192\n'
    )
    claim = _read(
        "torchrun --nproc_per_node 8 --nnodes 2 train.py --job.config_file job.toml "
        "--parallelism.tensor_parallel_degree 4",
        tmp_path,
    )
    assert (claim.framework, claim.pipeline, claim.tensor, claim.chunks) == ("torchtitan", 4, 4, 2)
    assert (claim.microbatches, claim.seq, claim.schedule) == (16, 8192, "interleaved")


MEGATRON = "torchrun --nproc_per_node 8 pretrain_gpt.py --pipeline-model-parallel-size 2 --num-attention-heads 32 "


def test_variables_are_those_of_the_command_then_of_the_environment(tmp_path):
    words = f"env TP=4 {MEGATRON} --tensor-model-parallel-size ${{TP}} --micro-batch-size $MICRO".split()
    claim = read(words, folder=tmp_path, environment={"TP": "2", "MICRO": "3"})
    assert (claim.tensor, claim.micro_batch, claim.unread) == (4, 3, ())


def test_what_rests_on_a_size_that_cannot_be_read_is_not_known(tmp_path):
    claim = read(f"{MEGATRON} --tensor-model-parallel-size $TP".split(), folder=tmp_path, environment={})
    assert claim.unread == (("--tensor-model-parallel-size", "$TP"),)
    assert (claim.heads, claim.world_size, claim.per_node) == (None, None, None)
    claim = read(f"{MEGATRON} --num-virtual-stages-per-pipeline-rank x".split(), folder=tmp_path, environment={})
    assert (claim.layers, claim.schedule, claim.heads) == (None, None, 32)


def test_stages_of_so_many_layers_of_an_unknown_number_leave_v_open(tmp_path):
    claim = _read(f"{MEGATRON} --num-layers-per-virtual-pipeline-stage 4", tmp_path)
    assert claim.unread == (("--num-layers", None),)
    assert claim.schedule is None


def test_megatrons_yaml_is_read_and_its_switches_that_are_off_are_off(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "job.yaml").write_text(
        "language_model:\n  num_layers: 32\n  num_attention_heads: 16\nmodel_parallel:\n"
        "  pipeline_model_parallel_size: 4\nmicro_batch_size: 2\nglobal_batch_size: 64\n"
        "use_distributed_optimizer: false\n"
    )
    claim = _read("torchrun --nproc_per_node 8 pretrain_gpt.py --yaml-cfg job.yaml", tmp_path)
    assert (claim.framework, claim.pipeline, claim.layers, claim.heads) == ("megatron", 4, 32, 16)
    assert (claim.data_size, claim.microbatches, claim.zero_stage) == (2, 16, 0)


@pytest.mark.parametrize("content", ["a: [1\nb: :", "- 1", "a: &a [*a", "x: " + "[" * 5000])
def test_a_broken_yaml_is_one_error(content, tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "job.yaml").write_text(content)
    with pytest.raises(BadConfig) as raised:
        _read("torchrun --nproc_per_node 8 pretrain_gpt.py --yaml-cfg job.yaml", tmp_path)
    assert "\n" not in str(raised.value)


def test_a_yaml_that_grows_when_it_is_read_is_refused(tmp_path):
    pytest.importorskip("yaml")
    names = [f"t{i}" for i in range(300)]
    rows = ["t0: &t0 {" + ", ".join(f"k{i}: 1" for i in range(300)) + "}"]
    rows += [f"{name}: *t0" for name in names[1:]]
    (tmp_path / "job.yaml").write_text("\n".join(rows))
    with pytest.raises(BadConfig, match="more than 20000 settings"):
        _read("torchrun --nproc_per_node 8 pretrain_gpt.py --yaml-cfg job.yaml", tmp_path)


def test_torchtitan_names_its_model_and_so_its_heads(tmp_path):
    pytest.importorskip("tomllib")
    (tmp_path / "job.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "405B"\n[parallelism]\npipeline_parallel_degree = 8\n'
        'tensor_parallel_degree = 3\npipeline_parallel_schedule = "Interleaved1F1B"\n'
        "pipeline_parallel_layers_per_stage = 4\n[training]\nlocal_batch_size = 16\n"
    )
    claim = _read("torchrun --nproc_per_node 8 --nnodes 6 train.py --job.config_file job.toml", tmp_path)
    assert (claim.layers, claim.heads, claim.tensor) == (126, 128, 3)
    assert claim.chunks == 4  # 126 layers and two in stages of 4: 32, over 8 ranks


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/stdin", "/tmp"])
def test_what_is_no_regular_file_is_not_opened(name, tmp_path):
    with pytest.raises(BadConfig):
        _read(f"deepspeed t.py --deepspeed_config {name}", tmp_path)


def test_a_configuration_that_is_not_there_is_said(tmp_path):
    with pytest.raises(PathNotFound, match="does not exist"):
        _read("deepspeed t.py --deepspeed_config nowhere.json", tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[1, 2]", b"\xff\xfe{}", b"[" * 100_000, b"null"])
def test_a_broken_configuration_is_one_error(content, tmp_path):
    (tmp_path / "ds.json").write_bytes(content)
    with pytest.raises(BadConfig):
        _read("deepspeed t.py --deepspeed_config ds.json", tmp_path)


def test_a_huge_configuration_is_refused(tmp_path):
    (tmp_path / "ds.json").write_bytes(b" " * (5 << 20))
    with pytest.raises(BadConfig, match="too large"):
        _read("deepspeed t.py --deepspeed_config ds.json", tmp_path)


@given(st.lists(st.text(max_size=20), max_size=12))
def test_no_command_is_too_odd_to_read(words):
    with suppress(PathNotFound, BadConfig):
        read(["torchrun", *words], folder=Path("/nonexistent"))
