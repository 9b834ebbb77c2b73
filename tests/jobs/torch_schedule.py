"""Trains small models with schedules of torch.distributed.pipelining and prints exact losses and gradients.

One torchrun, several jobs one after another (imports are what costs time). Each job is ``SCHEDULE[:OPTION...]`` with
the options ``tracer`` (the ``pipeline()`` API instead of PipelineStage) and ``eval`` (``schedule.eval``, no optimizer).
Every rank appends one JSON line a job to ``RESULTS<rank>``: the number of optimizer steps before it, losses and
gradient checksums as hex floats, and the schedule's own plan of its ops.

    torchrun --standalone --nproc-per-node 4 tests/jobs/torch_schedule.py --jobs GPipe 1F1B:tracer --results /tmp/out
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Block(nn.Module):
    """A linear layer and a ReLU in place (which some ways of hooking modules would break)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.linear(x)) + x


class Model(nn.Module):
    """Blocks in a row, one a stage."""

    def __init__(self, stages: int, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim) for _ in range(stages)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", nargs="+", default=["1F1B"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--virtual-stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=2, help="rows a microbatch")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--results", default="", metavar="PREFIX")
    parser.add_argument(
        "--profile", default="", metavar="PREFIX", help="torch.profiler's traces of all but the first step"
    )
    return parser.parse_args()


def stage_indices(name: str, rank: int, ranks: int, virtual_stages: int) -> list[int]:
    """The stages of a rank: one, every P-th, or the two arms of a V."""
    if not issubclass(get_schedule_class(name), PipelineScheduleMulti):
        return [rank]
    if name in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + chunk * ranks for chunk in range(virtual_stages)]


def build_stages(args: argparse.Namespace, indices: list[int], total: int, *, tracer: bool) -> list[Any]:
    torch.manual_seed(7)
    model = Model(total, args.dim)
    device = torch.device("cpu")
    if tracer:
        split = {f"blocks.{index}": SplitPoint.BEGINNING for index in range(1, total)}
        pipe = pipeline(model, mb_args=(torch.ones(args.batch, args.dim),), split_spec=split)
        return [pipe.build_stage(index, device) for index in indices]
    return [PipelineStage(model.blocks[index], index, total, device) for index in indices]


def plan(schedule: Any, rank: int) -> dict[str, int]:
    """How many ops of each kind the schedule itself has planned for this rank, by torch's own names."""
    order = getattr(schedule, "pipeline_order_with_comms", None)
    if order is None:
        return {}
    # an action has parts from torch 2.9 on
    actions = [part for action in order[rank] for part in (getattr(action, "sub_actions", None) or [action])]
    return dict(Counter(action.computation_type.name for action in actions))


def run_job(args: argparse.Namespace, job: str) -> dict[str, Any]:
    name, *options = job.split(":")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    indices = stage_indices(name, rank, ranks, args.virtual_stages)
    total = ranks * len(indices)
    stages = build_stages(args, indices, total, tracer="tracer" in options)
    schedule_class = get_schedule_class(name)
    multi = issubclass(schedule_class, PipelineScheduleMulti)
    schedule = schedule_class(stages if multi else stages[0], args.microbatches, loss_fn=nn.MSELoss())
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    evaluate = "eval" in options
    losses: list[str] = []
    gradients: list[str] = []
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) if args.profile else None
    for step in range(args.steps):
        if step == 1 and profiler is not None:
            profiler.start()
        torch.manual_seed(100 + step)
        x = torch.randn(args.batch * args.microbatches, args.dim)
        first = (x,) if 0 in indices else ()
        last: dict[str, Any] = {"target": x.flip(0)} if total - 1 in indices else {}
        step_losses: list[torch.Tensor] = []
        (schedule.eval if evaluate else schedule.step)(*first, **last, losses=step_losses)
        losses += [loss.item().hex() for loss in step_losses]
        if not evaluate:
            gradients.append(sum(p.grad.double().abs().sum().item() for p in parameters if p.grad is not None).hex())
            optimizer.step()
            optimizer.zero_grad()
    if profiler is not None:
        profiler.stop()
        profiler.export_chrome_trace(f"{args.profile}{name}-rank{rank}.json.gz")
    return {"job": job, "losses": losses, "gradients": gradients, "plan": plan(schedule, rank), "stages": indices}


def main() -> None:
    torch.set_num_threads(1)
    args = parse_arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    optimizer_steps = 0
    for job in args.jobs:
        result = {"optimizer_steps": optimizer_steps, **run_job(args, job)}
        optimizer_steps += len(result["gradients"])
        line = json.dumps(result)
        if args.results:
            with open(f"{args.results}{rank}", "a") as file:  # noqa: PTH123
                file.write(line + "\n")
        elif rank == dist.get_world_size() - 1:
            print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
