"""Pipelines of DeepSpeed on CPU and gloo: several jobs one after the other, so that the imports are paid once.

Each argument after the prefix of the result files is one job, in the words of ``parse_arguments``.

    torchrun --nproc-per-node 4 deepspeed_engine.py results- "--pp 4" "--pp 2 --tied" "--pp 4 --dualpipev"
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

# A C++ extension, built at the first use in a minute or two; only inference calls it.
setattr(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)  # noqa: B010

SEQUENCE, ROWS, HIDDEN, VOCABULARY, BLOCKS = 16, 2, 32, 64, 6


def parse_arguments(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--slow", default="", metavar="BLOCK:MS", help="sleep in each forward of this block")
    parser.add_argument("--evaluate", action="store_true", help="one batch without backwards at the end")
    for name in ("tied", "dualpipev", "varying"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(shlex.split(line))


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, self.weight)


class Block(torch.nn.Module):
    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.sleep_s = sleep_s
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(HIDDEN, 4 * HIDDEN), torch.nn.GELU(), torch.nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.sleep_s)
        return x + self.mlp(self.norm(x))


def head(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ embedding.weight.t()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def batches(seed: int, *, varying: bool) -> Any:
    """An easily learnt task: each token is the one before it plus one."""
    generator = torch.Generator().manual_seed(seed)
    for count in itertools.count():
        length = SEQUENCE - (count % 3 if varying else 0)
        first = torch.randint(0, VOCABULARY, (ROWS, 1), generator=generator)
        tokens = (first + torch.arange(length + 1)) % VOCABULARY
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def layers(args: argparse.Namespace) -> list[Any]:
    slow, _, time_ms = args.slow.partition(":")
    count = 8 if args.dualpipev else BLOCKS
    blocks = [LayerSpec(Block, float(time_ms) / 1e3 if slow == str(index) else 0.0) for index in range(count)]
    if args.tied:
        return [TiedLayerSpec("e", Embedding), *blocks, TiedLayerSpec("e", Embedding, forward_fn=head)]
    return [LayerSpec(Embedding), *blocks, LayerSpec(torch.nn.Linear, HIDDEN, VOCABULARY)]


def engine_of(args: argparse.Namespace) -> Any:
    module = PipelineModule
    if args.dualpipev:
        module = deepspeed.pipe.DualPipeVModule  # since 0.19
    extra = {"dynamic_shape": True} if args.varying else {}
    model = module(layers(args), num_stages=args.pp, loss_fn=loss_of, partition_method="uniform", **extra)
    replicas = dist.get_world_size() // args.pp
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": args.microbatches,
        "train_batch_size": ROWS * args.microbatches * replicas,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": args.zero},
        "fp16": {"enabled": False},
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]


def train(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(1234)
    engine = engine_of(args)
    iterator = batches(engine.grid.get_data_parallel_rank(), varying=args.varying)
    losses = [engine.train_batch(iterator).item().hex() for _ in range(args.steps)]
    if args.evaluate:
        losses.append(engine.eval_batch(iterator).item().hex())
    weights = sum(parameter.detach().double().abs().sum().item() for parameter in engine.module.parameters()).hex()
    rank, ranks = engine.stage_id, engine.num_stages
    stages = [rank, 2 * ranks - 1 - rank] if args.dualpipev else [rank]
    return {"losses": losses, "gradients": [weights], "stages": stages}


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    prefix, *lines = sys.argv[1:]
    steps = itertools.accumulate((parse_arguments(line).steps for line in lines), initial=0)
    for line, first_step in zip(lines, steps, strict=False):
        result = {"job": line, "first_step": first_step, **train(parse_arguments(line))}
        with Path(f"{prefix}{dist.get_rank()}").open("a") as file:
            file.write(json.dumps(result) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
