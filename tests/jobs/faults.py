"""A small pipeline of two ranks that also does what disturbs recorders; its losses and weights are its result.

Started by hand with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; ``--disturb`` is done by rank 0 before step 2.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import hand_1f1b  # type: ignore[import-not-found]  # beside this file
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

MICROBATCHES, ROWS, DIM = 4, 2, 16
DISTURB_STEP = 2


class TorchLoop:
    """1F1B of torch.distributed.pipelining."""

    def __init__(self, args: argparse.Namespace) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        self.model: Any = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        if args.compile:
            self.model = torch.compile(self.model, backend="aot_eager")
        stage = PipelineStage(self.model, rank, ranks, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        batch = torch.ones(MICROBATCHES * ROWS, DIM)
        self.first = (batch,) if rank == 0 else ()
        self.last = {"target": batch} if rank == ranks - 1 else {}
        self.losses: list[str] = []

    def step(self) -> None:
        losses: list[torch.Tensor] = []
        self.schedule.step(*self.first, **self.last, losses=losses)
        self.losses += [loss.item().hex() for loss in losses]
        self.optimizer.step()
        self.optimizer.zero_grad()


def own_backward() -> None:
    """A backward of no pipeline, as a user's thread may have one."""
    weight = torch.ones(4, requires_grad=True)
    (weight * weight).sum().backward()


def fork() -> None:
    """A child that uses torch and ends by itself."""
    child = os.fork()
    if child == 0:
        own_backward()
        os._exit(0)
    os.waitpid(child, 0)


def disturb(how: str) -> None:
    """What happens to the run directory, or to the time of day."""
    if how == "time":
        real = time.time_ns
        time.time_ns = lambda: real() - 3_600_000_000_000
    if "PPDIAG_RUN_DIR" not in os.environ:
        return
    folder = Path(os.environ["PPDIAG_RUN_DIR"])
    if how == "delete":
        shutil.rmtree(folder, ignore_errors=True)
    elif how == "replace":
        shutil.rmtree(folder, ignore_errors=True)
        folder.write_text("a file in its place")
    elif how == "readonly":
        for path in [*folder.iterdir(), folder]:
            path.chmod(0o400)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--loop", choices=("torch", "hand"), default="torch")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--disturb", default="")
    parser.add_argument("--fork", action="store_true", help="fork a child before each step")
    parser.add_argument("--thread", action="store_true", help="a thread has a backward of its own in each step")
    parser.add_argument("--compile", action="store_true", help="the stage is compiled")
    parser.add_argument("--collect", action="store_true", help="the garbage collector runs in each step")
    parser.add_argument("--raise-at", type=int, default=-1, help="all ranks raise before this step")
    parser.add_argument("--results", required=True, metavar="PREFIX")
    return parser.parse_args()


def step(loop: Any, args: argparse.Namespace, number: int) -> None:
    if number == DISTURB_STEP and dist.get_rank() == 0 and args.disturb:
        disturb(args.disturb)
    if number == args.raise_at:
        raise RuntimeError("planted in the user's step")
    if args.fork:
        fork()
    threads = [threading.Thread(target=own_backward)] if args.thread else []
    for thread in threads:
        thread.start()
    if args.collect:
        gc.collect()
    loop.step()
    for thread in threads:
        thread.join()


def main() -> None:
    torch.set_num_threads(1)
    args = parse_arguments()
    dist.init_process_group("gloo")
    loop = TorchLoop(args) if args.loop == "torch" else hand_1f1b.Trainer(MICROBATCHES)
    try:
        for number in range(args.steps):
            step(loop, args, number)
            dist.all_reduce(torch.ones(1))
    finally:
        weights = [parameter.double().sum().item().hex() for parameter in loop.model.parameters()]
        result = {"losses": loop.losses, "weights": weights}
        Path(f"{args.results}{dist.get_rank()}").write_text(json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
