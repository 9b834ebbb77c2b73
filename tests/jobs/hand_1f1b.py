"""1F1B written by hand with P2POp and batch_isend_irecv, all bound by ``from ... import``.

torchrun --standalone --nproc-per-node 4 tests/jobs/hand_1f1b.py --results /tmp/out
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.distributed import (
    P2POp,
    batch_isend_irecv,
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
    irecv,
    isend,
)

ROWS, DIM = 2, 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--results", default="", metavar="PREFIX")
    return parser.parse_args()


class Exchange:
    """Messages with both neighbours."""

    def __init__(self) -> None:
        self.rank, self.ranks = get_rank(), get_world_size()

    def run(
        self,
        *,
        forward: torch.Tensor | None = None,
        backward: torch.Tensor | None = None,
        want_forward: bool = False,
        want_backward: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Send what is given and receive what is wanted, as one batch."""
        ops, activation, gradient = [], None, None
        if forward is not None and self.rank < self.ranks - 1:
            ops.append(P2POp(isend, forward, self.rank + 1))
        if backward is not None and self.rank > 0:
            ops.append(P2POp(isend, backward, self.rank - 1))
        if want_forward and self.rank > 0:
            activation = torch.empty(ROWS, DIM)
            ops.append(P2POp(irecv, activation, self.rank - 1))
        if want_backward and self.rank < self.ranks - 1:
            gradient = torch.empty(ROWS, DIM)
            ops.append(P2POp(irecv, gradient, self.rank + 1))
        for work in batch_isend_irecv(ops) if ops else []:
            work.wait()
        return (activation.requires_grad_() if activation is not None else None), gradient


class Trainer:
    """One rank's stage and the microbatches in flight."""

    def __init__(self, microbatches: int) -> None:
        self.exchange = Exchange()
        self.rank, self.ranks = get_rank(), get_world_size()
        self.microbatches = microbatches
        torch.manual_seed(self.rank)
        self.model = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(inplace=True), nn.Linear(DIM, DIM))
        self.loss = nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.in_flight: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        self.losses: list[str] = []

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        source = torch.full((ROWS, DIM), 0.5) if x is None else x
        output = self.model(source)
        if self.rank == self.ranks - 1:
            output = self.loss(output, torch.ones(ROWS, DIM)) / self.microbatches
            self.losses.append(output.item().hex())
        self.in_flight.append((x, output))
        return output

    def backward(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        x, output = self.in_flight.pop(0)
        output.backward(gradient)
        return None if x is None else x.grad

    def step(self) -> None:
        warmup = min(self.ranks - self.rank - 1, self.microbatches)
        for _ in range(warmup):
            x, _ = self.exchange.run(want_forward=True)
            self.exchange.run(forward=self.forward(x))
        steady = self.microbatches - warmup
        x = self.exchange.run(want_forward=True)[0] if steady else None
        for index in range(steady):
            output = self.forward(x)
            _, gradient = self.exchange.run(forward=output, want_backward=True)
            sent = self.backward(gradient)
            x, _ = self.exchange.run(backward=sent, want_forward=index < steady - 1)
        for _ in range(warmup):
            _, gradient = self.exchange.run(want_backward=True)
            self.exchange.run(backward=self.backward(gradient))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


def main() -> None:
    torch.set_num_threads(1)
    args = parse_arguments()
    init_process_group("gloo")
    trainer = Trainer(args.microbatches)
    for _ in range(args.steps):
        trainer.step()
    weights = [parameter.double().sum().item().hex() for parameter in trainer.model.parameters()]
    if args.results:
        Path(f"{args.results}{trainer.rank}").write_text(
            json.dumps({"losses": trainer.losses, "weights": weights}) + "\n"
        )
    destroy_process_group()


if __name__ == "__main__":
    main()
