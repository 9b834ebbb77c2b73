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
