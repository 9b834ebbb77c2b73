"""A pipeline of layers that sleep: each stage is a module with its layers in a list, an embedding first, a head last.

Run under torchrun; every layer takes ``--forward-ms`` and ``--backward-ms``, those of ``--layer-factor`` times as long,
and embedding and head ``--ends-ms`` in either direction. One rank appends losses and a checksum of its gradients to
``RESULTS<rank>``, as hex floats.

    torchrun --standalone --nproc-per-node 4 tests/jobs/layered_pipeline.py --layers 3,3,3,3 --layer-factor 4:3
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from sleeping_pipeline import Sleep  # type: ignore[import-not-found]  # a script's own folder
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

DIM = 8


class Layer(nn.Module):
    """A residual block with an activation in place, which full backward hooks would break."""

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.seconds = forward_ms / 1e3, backward_ms / 1e3
        self.inner = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x + self.inner(x), *self.seconds)


class Stage(nn.Module):
    """Some of the model's layers, with what lies before the first and behind the last."""

    def __init__(self, args: argparse.Namespace, stage: int) -> None:
        super().__init__()
        ends = args.ends_ms, args.ends_ms
        first = sum(args.layers[:stage])
        factors = dict(args.layer_factor)
        numbers = range(first, first + args.layers[stage])
        self.embedding = Layer(*ends) if stage == 0 else None
        self.layers = nn.ModuleDict({str(n): self.layer(args, factors.get(n, 1.0)) for n in numbers})
        self.head = Layer(*ends) if stage == len(args.layers) - 1 else None

    @staticmethod
    def layer(args: argparse.Namespace, factor: float) -> Layer:
        return Layer(args.forward_ms * factor, args.backward_ms * factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.embedding, *self.layers.values(), self.head):
            x = x if part is None else part(x)
        return x


def numbers_of(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def factor_of(text: str) -> tuple[int, float]:
    number, factor = text.split(":")
    return int(number), float(factor)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--layers", type=numbers_of, default=[3, 3, 3, 3], help="layers of each stage, one a rank")
    parser.add_argument("--layer-factor", type=factor_of, action="append", default=[], metavar="LAYER:FACTOR")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--forward-ms", type=float, default=4.0)
    parser.add_argument("--backward-ms", type=float, default=8.0)
    parser.add_argument("--ends-ms", type=float, default=4.0)
    parser.add_argument("--results", default="", metavar="PREFIX")
    return parser.parse_args()


def train(args: argparse.Namespace) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7 + rank)
    module = Stage(args, rank)
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = get_schedule_class(args.schedule)(stage, args.microbatches, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    batch = torch.linspace(0, 1, args.microbatches * DIM).reshape(args.microbatches, DIM)
    first = (batch,) if rank == 0 else ()
    last = {"target": batch.flip(0)} if rank == ranks - 1 else {}
    found: list[str] = []
    for _ in range(args.steps):
        losses: list[torch.Tensor] = []
        schedule.step(*first, **last, losses=losses)
        found += [loss.item().hex() for loss in losses]
        optimizer.step()
        gradients = sum(p.grad.double().abs().sum().item() for p in module.parameters() if p.grad is not None)
        found.append(gradients.hex())
        optimizer.zero_grad()
    return {"numbers": found}


def main() -> None:
    torch.set_num_threads(1)
    args = parse_arguments()
    dist.init_process_group("gloo")
    result = train(args)
    if args.results:
        with open(f"{args.results}{dist.get_rank()}", "a") as file:  # noqa: PTH123
            file.write(json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
