"""Pipelines of Megatron-Core on CPU and gloo: a tiny GPT, several jobs one after the other to pay the imports once.

Each argument after the prefix of the result files is one job, in the words of ``parse_arguments``.

    torchrun --nproc-per-node 4 megatron_core.py results- "--pp 4" "--pp 4 --vp 2 --overlap" "--pp 2 --tied"
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import megatron_shim  # noqa: F401  (before megatron.core)
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16 asks for it though it has not been imported
SEQUENCE, ROWS, HIDDEN, VOCABULARY, LAYERS = 16, 2, 32, 64, 8
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "expert_model_parallel_size": 2,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_ffn_hidden_size": HIDDEN,
    "add_bias_linear": False,
    "bf16": True,
    "overlap_moe_expert_parallel_comm": True,
}
"""What the combined schedule asks for; since 0.14."""


def parse_arguments(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--vp", type=int, default=None, help="chunks a rank: the interleaved schedule")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--slow", default="", metavar="STAGE:MS", help="sleep in each forward of this stage")
    parser.add_argument("--evaluate", action="store_true", help="one call without backwards at the end")
    parser.add_argument("--combined", action="store_true", help="experts, whose all-to-all the combined 1F1B hides")
    for name in ("overlap", "tied", "varlen", "dealloc"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(shlex.split(line))


def configuration(args: argparse.Namespace) -> Any:
    dtype = torch.bfloat16 if args.combined else torch.float32
    return TransformerConfig(
        **(EXPERTS if args.combined else {}),
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vp,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        batch_p2p_comm=not args.overlap,
        overlap_p2p_comm=args.overlap,
        deallocate_pipeline_outputs=args.dealloc,
        variable_seq_lengths=args.varlen,
        moe_token_dispatcher_type="alltoall",  # variable sequence lengths ask for it
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
    )


def build(args: argparse.Namespace) -> list[Any]:
    config, rank, chunks = configuration(args), parallel_state.get_pipeline_model_parallel_rank(), args.vp or 1
    models = []
    for chunk in range(chunks):
        if args.vp and hasattr(parallel_state, "set_virtual_pipeline_model_parallel_rank"):
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        known = signature(GPTModel.__init__).parameters
        extra = {"vp_stage": chunk} if args.vp and "vp_stage" in known else {}
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False),
            VOCABULARY,
            SEQUENCE,
            pre_process=rank == 0 and chunk == 0,
            post_process=rank == args.pp - 1 and chunk == chunks - 1,
            position_embedding_type="rope",
            parallel_output=True,
            share_embeddings_and_output_weights=args.tied,
            **extra,
        )
        slow, _, time_ms = args.slow.partition(":")
        if slow == str(chunk * args.pp + rank):
            model.register_forward_pre_hook(lambda *_, seconds=float(time_ms) / 1e3: time.sleep(seconds))
        models.append(model.to(config.params_dtype))
    if is_replicated(args):
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=False)
        models = [
            DistributedDataParallel(config, ddp, model, disable_bucketing=chunk > 0)
            for chunk, model in enumerate(models)
        ]
        config.finalize_model_grads_func = finalize_model_grads
    return models


def is_replicated(args: argparse.Namespace) -> bool:
    return args.pp < dist.get_world_size() and not args.combined  # there each replica learns alone


def batches(seed: int) -> Any:
    """An easily learnt task: each token is the one before it plus one."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        first = torch.randint(0, VOCABULARY, (ROWS, 1), generator=generator)
        tokens = (first + torch.arange(SEQUENCE + 1)) % VOCABULARY
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def forward_step(iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:  # noqa: FBT001, FBT002  (theirs)
    tokens, labels = next(iterator)
    positions = torch.arange(SEQUENCE).expand(ROWS, -1)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    call = model.build_schedule_plan if return_schedule_plan else model
    return call(tokens, positions, mask, labels=labels), loss_of


def train(args: argparse.Namespace) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vp,
        expert_model_parallel_size=EXPERTS["expert_model_parallel_size"] if args.combined else 1,
    )
    model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234 + dist.get_rank())
    models = build(args)
    replicated = is_replicated(args)
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    iterators = [batches(parallel_state.get_data_parallel_rank()) for _ in models]
    run = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        data_iterator=iterators,
        model=models,
        num_microbatches=args.microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=ROWS,
    )
    losses: list[str] = []
    gradients: list[str] = []
    for _ in range(args.steps):
        for model in models if replicated else []:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        losses += [found["loss"].item().hex() for found in run(forward_only=False)]
        for parameter in parameters if replicated else []:
            parameter.grad = parameter.main_grad
        gradients.append(sum(p.grad.double().abs().sum().item() for p in parameters if p.grad is not None).hex())
        optimizer.step()
    if args.evaluate:
        losses += [found["loss"].item().hex() for found in run(forward_only=True)]
    rank, ranks = parallel_state.get_pipeline_model_parallel_rank(), args.pp
    stages = [chunk * ranks + rank for chunk in range(args.vp or 1)]
    parallel_state.destroy_model_parallel()
    return {"losses": losses, "gradients": gradients, "stages": stages}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    prefix, *lines = sys.argv[1:]
    steps = itertools.accumulate((parse_arguments(line).steps for line in lines), initial=0)
    for line, first_step in zip(lines, steps, strict=False):
        result = {"job": line, "first_step": first_step, **train(parse_arguments(line))}
        with Path(f"{prefix}{dist.get_rank()}").open("a") as file:
            file.write(json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
