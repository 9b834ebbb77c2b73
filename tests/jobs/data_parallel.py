"""Two replicas of a pipeline of two stages: the gradients of each stage are reduced by DDP, their norm by functional
collectives (one of them compiled).

Ranks 0 and 1 are the first replica, 2 and 3 the second. Each rank writes its losses and weights after all steps, as hex
floats, to ``RESULTS<rank>``.

    torchrun --standalone --nproc-per-node 4 tests/jobs/data_parallel.py --results /tmp/out
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

STAGES, MICROBATCHES, ROWS, DIM = 2, 4, 2, 16
BUCKET_MB = 0.001


class Stage(nn.Module):
    """Two layers, and some time that one of the replicas takes longer."""

    def __init__(self, slow_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
        self.slow_s = slow_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.slow_s)
        return self.layers(x)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-s", type=float, default=0.0, help="longer in each forward of the slow rank")
    parser.add_argument("--results", required=True, metavar="PREFIX")
    return parser.parse_args()


def group_of(members: list[list[int]]) -> Any:
    """The one of these groups that this rank is in; all ranks make all of them."""
    groups = [dist.new_group(ranks) for ranks in members]
    return next(group for group, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks)


def gradient_norm(parameters: list[Any], replicas: Any) -> torch.Tensor:
    """Of all replicas, by two functional collectives; by the third from what was compiled."""
    own = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    total = functional.all_reduce(own, "sum", replicas) / 2
    parts = functional.all_gather_single(own.reshape(1), 0, replicas)
    return compiled_mean(total + parts.max(), replicas)


@torch.compile(backend="aot_eager", fullgraph=True)
def compiled_mean(x: torch.Tensor, replicas: Any) -> torch.Tensor:
    return functional.all_reduce(x.repeat(2), "sum", replicas).mean() / 2


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pipeline, replicas = group_of([[0, 1], [2, 3]]), group_of([[0, 2], [1, 3]])
    torch.manual_seed(rank % STAGES)
    model = Stage(args.slow_s if rank == args.slow_rank else 0.0)
    reduced = DistributedDataParallel(model, process_group=replicas, bucket_cap_mb=BUCKET_MB)
    stage = PipelineStage(reduced, rank % STAGES, STAGES, torch.device("cpu"), group=pipeline)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[str] = []
    for step in range(args.steps):
        torch.manual_seed(100 * rank + step)
        batch = torch.randn(MICROBATCHES * ROWS, DIM)
        losses: list[torch.Tensor] = []
        last: dict[str, Any] = {"target": torch.ones_like(batch), "losses": losses} if rank % STAGES else {}
        schedule.step(*(() if rank % STAGES else (batch,)), **last)
        norm = gradient_norm(list(model.parameters()), replicas)
        seen = torch.stack([norm, norm, norm])
        dist.all_reduce(seen, group=replicas)
        found += [value.item().hex() for value in (*losses, norm, seen[0])]
        optimizer.step()
        optimizer.zero_grad()
    found += [parameter.double().sum().item().hex() for parameter in model.parameters()]
    Path(f"{args.results}{rank}").write_text(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
