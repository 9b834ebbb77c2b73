"""A pipeline whose stages sleep instead of computing: every duration is known, and two cores carry many ranks.

Run under torchrun; each virtual stage sleeps ``--forward-ms`` in its forward and ``--backward-ms`` in its backward
(half of it for the input and half for the weights, so that schedules which split the backward split it too), or what
``--stage-ms`` says of it.

    torchrun --standalone --nproc-per-node 4 tests/jobs/sleeping_pipeline.py --schedule 1F1B --stage-factor 2:2

With ``--replicas N`` the ranks form N pipelines, one after the other, whose gradients are reduced at each step's end.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.utils.data import DataLoader, Dataset

DIM = 8
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
PLACES = ("between", "optimizer", "op", "data", "gc")
"""Where the host sleeps: after a step, before its optimizer, before each forward, loading data, collecting garbage."""


class Sleep(torch.autograd.Function):
    """The identity, which takes a while in both directions."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class SleepingStage(nn.Module):
    """A linear layer with given durations; ``microbatch`` is set to 0 before each step and counts its forwards."""

    def __init__(self, args: argparse.Namespace, stage: int, chunk: int) -> None:
        super().__init__()
        self.first = stage == 0
        usual_ms = (args.forward_ms, args.backward_ms / 2, args.backward_ms / 2)
        self.forward_s, self.input_s, self.weight_s = (ms / 1e3 for ms in args.stage_ms.get(stage, usual_ms))
        rank = dist.get_rank()
        self.factor = args.stage_factor.get(stage, 1.0) * args.chunk_factor.get(chunk, 1.0)
        self.factor *= args.rank_factor.get(rank, 1.0)
        self.microbatch_factor: dict[int, float] = args.microbatch_factor
        self.microbatch = 0
        self.weight = nn.Parameter(torch.full((DIM, DIM), 0.1))
        self.entry = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.factor * self.microbatch_factor.get(self.microbatch, 1.0)
        self.microbatch += 1
        if self.first:
            x = x + self.entry  # the backward must reach the sleep although the input needs no gradient
        x = Sleep.apply(x, factor * self.forward_s, factor * self.input_s)
        return torch.tanh(x @ Sleep.apply(self.weight, 0.0, factor * self.weight_s))


def factors(text: str) -> tuple[int, float]:
    """``INDEX:FACTOR``."""
    index, factor = text.split(":")
    return int(index), float(factor)


def stage_times(text: str) -> tuple[int, tuple[float, ...]]:
    """``STAGE:F:B:W``."""
    stage, *times = text.split(":")
    forward, backward, weight = map(float, times)
    return int(stage), (forward, backward, weight)


def host_sleep_of(text: str) -> tuple[int, float, str]:
    """``RANK:MS:PLACE``."""
    rank, milliseconds, place = text.split(":")
    if place not in PLACES:
        raise ValueError
    return int(rank), float(milliseconds), place


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedule", default="1F1B", help="a name that torch's get_schedule_class knows")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--virtual-stages", type=int, default=2, help="stages a rank, for schedules that take several")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=1, help="rows of a microbatch: a message has 32 bytes for each")
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--backward-ms", type=float, default=20.0)
    times = parser.add_argument("--stage-ms", type=stage_times, action="append", default=[], metavar="STAGE:F:B:W")
    times.help = "ms of one stage's forward, backward of the input, and of the weights; may be repeated"
    for name in ("stage", "chunk", "rank", "microbatch"):
        option = f"--{name}-factor"
        text = f"work of one {name} (stages counted over all virtual stages) times FACTOR; may be repeated"
        parser.add_argument(option, type=factors, action="append", default=[], metavar="INDEX:FACTOR", help=text)
    sleepers = parser.add_argument("--host-sleep", type=host_sleep_of, action="append", default=[])
    sleepers.metavar, sleepers.help = "RANK:MS:PLACE", f"PLACE is one of {', '.join(PLACES)}; may be repeated"
    parser.add_argument("--meet", action="store_true", help="all ranks meet before the optimizer, as for a norm")
    parser.add_argument("--replicas", type=int, default=1, help="data-parallel pipelines")
    parser.add_argument(
        "--report", default="", metavar="PREFIX", help="append the number of each ended step to PREFIX<rank>"
    )
    raising = parser.add_argument("--raise-at", type=factors, default=None, metavar="RANK:STEP")
    raising.help = "raise in this rank's step, before any restart of the job"
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args(argv)
    for name in ("stage_ms", "stage_factor", "chunk_factor", "rank_factor", "microbatch_factor"):
        setattr(args, name, dict(getattr(args, name)))
    return args


def stage_indices(args: argparse.Namespace, rank: int, ranks: int) -> list[int]:
    """The stages of a rank: one, every P-th, or the two arms of a V."""
    if not issubclass(get_schedule_class(args.schedule), PipelineScheduleMulti):
        return [rank]
    if args.schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + chunk * ranks for chunk in range(args.virtual_stages)]


def sleep_s(args: argparse.Namespace, place: str) -> float:
    """How long this rank's host is to sleep at a place."""
    mine = dist.get_rank()
    return sum(milliseconds / 1e3 for rank, milliseconds, where in args.host_sleep if (rank, where) == (mine, place))


class SlowRows(Dataset):
    """A data set of one row, which takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


class SlowToFree:
    """Garbage that only a collection frees, and slowly."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.myself = seconds, self

    def __del__(self) -> None:
        time.sleep(self.seconds)


def load_data(args: argparse.Namespace) -> None:
    """Wait for the next batch, on a rank that is slow at it."""
    if (seconds := sleep_s(args, "data")) > 0:
        next(iter(DataLoader(SlowRows(seconds))))


def collect_garbage(args: argparse.Namespace) -> None:
    """A collection, on a rank that has much to collect."""
    if (seconds := sleep_s(args, "gc")) > 0:
        SlowToFree(seconds)
        gc.collect()


def sleep_before_forwards(args: argparse.Namespace, stage: PipelineStage) -> None:
    """The host is late for each forward of this stage."""
    if (seconds := sleep_s(args, "op")) > 0:
        original = stage.forward_one_chunk

        def late(*arguments: Any, **keywords: Any) -> Any:
            time.sleep(seconds)
            return original(*arguments, **keywords)

        stage.forward_one_chunk = late


def report(args: argparse.Namespace, rank: int, step: int) -> None:
    """Tell the test that this step is done, in a way that outlives a kill."""
    if args.report:
        with open(f"{args.report}{rank}", "a") as file:  # noqa: PTH123
            file.write(f"{step}\n")


def pipeline_groups(args: argparse.Namespace) -> tuple[Any, Any]:
    """This rank's pipeline, and the ranks that hold the same stages; (None, None) where there is one pipeline."""
    if args.replicas == 1:
        return None, None
    ranks = dist.get_world_size() // args.replicas
    pipelines = [[replica * ranks + position for position in range(ranks)] for replica in range(args.replicas)]
    own, _ = dist.new_subgroups_by_enumeration(pipelines)
    twins, _ = dist.new_subgroups_by_enumeration([list(column) for column in zip(*pipelines, strict=True)])
    return own, twins


def build(args: argparse.Namespace, group: Any) -> tuple[list[SleepingStage], Any]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    indices = stage_indices(args, rank, ranks)
    schedule_class = get_schedule_class(args.schedule)
    multi = issubclass(schedule_class, PipelineScheduleMulti)
    total = ranks * len(indices)
    modules = [SleepingStage(args, index, chunk) for chunk, index in enumerate(indices)]
    cpu = torch.device("cpu")
    stages = [
        PipelineStage(module, index, total, cpu, group=group) for module, index in zip(modules, indices, strict=True)
    ]
    for stage in stages:
        sleep_before_forwards(args, stage)
    loss = nn.MSELoss()
    return modules, schedule_class(stages if multi else stages[0], args.microbatches, loss_fn=loss)


def reduce_gradients(modules: list[SleepingStage], twins: Any) -> None:
    for module in modules if twins is not None else ():
        for weight in module.parameters():
            if weight.grad is not None:
                dist.all_reduce(weight.grad, group=twins)


def train(args: argparse.Namespace) -> None:
    group, twins = pipeline_groups(args)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    modules, schedule = build(args, group)
    indices = stage_indices(args, rank, ranks)
    optimizer = torch.optim.SGD([weight for module in modules for weight in module.parameters()], lr=0.01)
    batch = torch.ones(args.microbatches * args.rows, DIM)
    first = (batch,) if 0 in indices else ()
    last = {"target": batch} if ranks * len(indices) - 1 in indices else {}
    for step in range(args.steps):
        begin = time.perf_counter()
        for module in modules:
            module.microbatch = 0
        if args.raise_at == (dist.get_rank(), step) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            raise RuntimeError(f"planted: rank {rank} raises in step {step}")
        load_data(args)
        losses: list[torch.Tensor] = []
        schedule.step(*first, **last, losses=losses)
        reduce_gradients(modules, twins)
        if args.meet:
            dist.all_reduce(torch.ones(1))
        time.sleep(sleep_s(args, "optimizer"))
        optimizer.step()
        optimizer.zero_grad()
        report(args, dist.get_rank(), step)
        collect_garbage(args)
        time.sleep(sleep_s(args, "between"))
        if rank == ranks - 1 and not args.quiet:
            print(f"step {step}: {1e3 * (time.perf_counter() - begin):.1f} ms", flush=True)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    args = parse_arguments()
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
