"""A pipeline written by hand with blocking send and recv: all forwards, then all backwards; and an evaluation.

With ``--functional`` the stage is plain tensor code without a single nn.Module.

    torchrun --standalone --nproc-per-node 4 tests/jobs/hand_send_recv.py --results /tmp/out
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import recv, send

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, DIM = 2, 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--functional", action="store_true", help="no nn.Module anywhere")
    parser.add_argument("--evaluate", action="store_true", help="one pass without gradients after the last step")
    parser.add_argument("--results", default="", metavar="PREFIX")
    return parser.parse_args()


def receive_activation() -> torch.Tensor:
    if dist.get_rank() == 0:
        return torch.full((ROWS, DIM), 0.5)
    x = torch.empty(ROWS, DIM)
    recv(x, dist.get_rank() - 1)
    return x


def build_stage(*, functional: bool) -> tuple[Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(dist.get_rank())
    if not functional:
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU())
        return model, list(model.parameters())
    weight = torch.randn(DIM, DIM).mul_(0.1).requires_grad_()
    return lambda x: torch.tanh(x @ weight), [weight]


def train_step(stage: Callable[[torch.Tensor], torch.Tensor], microbatches: int) -> list[str]:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    inputs, outputs, losses = [], [], []
    for _ in range(microbatches):
        x = receive_activation().requires_grad_(rank > 0)
        output = stage(x)
        if rank < last:
            send(output, rank + 1)
        inputs.append(x)
        outputs.append(output)
    for x, output in zip(inputs, outputs, strict=True):
        if rank == last:
            loss = ((output - 1) ** 2).mean() / microbatches
            losses.append(loss.item().hex())
            loss.backward()
        else:
            gradient = torch.empty(ROWS, DIM)
            recv(gradient, rank + 1)
            output.backward(gradient)
        if rank > 0:
            assert x.grad is not None
            send(x.grad, rank - 1)
    return losses


@torch.no_grad()
def evaluate(stage: Callable[[torch.Tensor], torch.Tensor], microbatches: int) -> None:
    for _ in range(microbatches):
        output = stage(receive_activation())
        if dist.get_rank() < dist.get_world_size() - 1:
            send(output, dist.get_rank() + 1)


def main() -> None:
    torch.set_num_threads(1)
    args = parse_arguments()
    dist.init_process_group("gloo")
    stage, parameters = build_stage(functional=args.functional)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for _ in range(args.steps):
        losses += train_step(stage, args.microbatches)
        optimizer.step()
        optimizer.zero_grad()
    if args.evaluate:
        evaluate(stage, args.microbatches)
    weights = [parameter.double().sum().item().hex() for parameter in parameters]
    if args.results:
        Path(f"{args.results}{dist.get_rank()}").write_text(json.dumps({"losses": losses, "weights": weights}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
