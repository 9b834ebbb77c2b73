"""The jobs that ``gpu_check.py`` runs under the recorder: work of known length on the device, and a pipeline.

timing    a kernel of known length on one rank at a time; how far the host runs ahead; steps with and without hooks
verdict   a pipeline whose last stage is slow
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from ppdiag.hooks import install
from ppdiag.hooks.recorder import RECORDER

KERNEL_MS = 20.0
KERNELS = 10
AHEAD_MS = 200.0
MICROBATCHES = 8
FORWARD_MS = 3.0
SLOW_FACTOR = 3.0
DIM = 64
CALIBRATION_CYCLES = 200_000_000
MARKS = 2_000


class Device:
    """The GPU, or its stand-in."""

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        if dry:
            sys.path.insert(0, str(Path(__file__).parent))
            import stand_in

            self._stream = stand_in.STREAM
            stand_in.install(torch)
            self.name = torch.device("cpu")
        else:
            self.name = torch.device("cuda", 0)
            torch.cuda.set_device(0)
            torch.zeros(1, device=self.name)
            self._cycles_per_ms = 0.0

    def busy(self, milliseconds: float, *, done: bool = False) -> None:
        """Launch work of this length on the current stream; ``done`` waits for the stand-in, for gloo sends at once."""
        if not self.dry:
            torch.cuda._sleep(int(milliseconds * self._cycles_per_ms))
            return
        self._stream.launch(lambda: time.sleep(milliseconds / 1e3))
        if done:
            self._stream.drain()

    def calibrate(self) -> None:
        """Cycles of ``torch.cuda._sleep`` in a millisecond, by the host's clock, of the fastest of some tries."""
        if self.dry:
            return
        torch.cuda._sleep(CALIBRATION_CYCLES)  # the clocks rise
        took = []
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            torch.cuda._sleep(CALIBRATION_CYCLES)
            torch.cuda.synchronize()
            took.append(1e3 * (time.perf_counter() - begin))
        self._cycles_per_ms = CALIBRATION_CYCLES / min(took)


class Busy(torch.autograd.Function):
    """Work on the device in forward, and twice as much in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: Device, milliseconds: float) -> torch.Tensor:
        ctx.device, ctx.milliseconds = device, milliseconds
        device.busy(milliseconds, done=True)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.device.busy(2 * ctx.milliseconds, done=True)
        return gradient, None, None


class Stage(nn.Module):
    def __init__(self, device: Device, milliseconds: float) -> None:
        super().__init__()
        self.device, self.milliseconds = device, milliseconds
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Busy.apply(self.layer(x), self.device, self.milliseconds)


class KnownKernel(torch.optim.Optimizer):
    """An optimizer whose step is one kernel of known length: no message disturbs it."""

    def __init__(self, device: Device) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], {})
        self.device = device
        self.milliseconds = KERNEL_MS

    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        self.device.busy(self.milliseconds)


class Pipeline:
    """One stage a rank, 1F1B."""

    def __init__(self, device: Device, *, slow: bool) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        factor = SLOW_FACTOR if slow and rank == ranks - 1 else 1.0
        model = Stage(device, factor * FORWARD_MS).to(device.name)
        stage = PipelineStage(model, rank, ranks, device.name)
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch = torch.ones(MICROBATCHES * 4, DIM, device=device.name)
        self.first = (batch,) if rank == 0 else ()
        self.last = {"target": batch} if rank == ranks - 1 else {}

    def step(self) -> None:
        self.schedule.step(*self.first, **self.last)
        self.optimizer.step()
        self.optimizer.zero_grad()


def one_at_a_time(name: str, work: Any) -> Any:
    """Each rank's work in turn, by the job's store: kernels of two processes on one device share its time."""
    store = dist.distributed_c10d._get_default_store()
    rank, ranks, found = dist.get_rank(), dist.get_world_size(), None
    for turn in range(ranks):
        if turn == rank:
            found = work()
            torch.cuda.synchronize()
            store.set(f"{name}-{turn}", "done")
        store.wait([f"{name}-{turn}"])
    return found


def known_kernels(device: Device) -> dict[str, Any]:
    optimizer = KnownKernel(device)
    for _ in range(KERNELS):
        RECORDER.begin_step()
        optimizer.step()
    torch.cuda.synchronize()
    optimizer.milliseconds = AHEAD_MS
    if not device.dry:
        torch.cuda.set_sync_debug_mode("error")
    begin = time.perf_counter()
    optimizer.step()
    ahead_ms = 1e3 * (time.perf_counter() - begin)
    if not device.dry:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return {"ahead_ms": ahead_ms, "pair_us": pair_us()}


def pair_us() -> float | None:
    """What the two events of an op cost the training thread."""
    instruments = RECORDER.instruments
    if instruments is None:
        return None
    begin = time.thread_time_ns()
    for _ in range(MARKS):
        instruments.drop(instruments.mark())
        instruments.drop(instruments.mark())
    return (time.thread_time_ns() - begin) / MARKS / 1e3


def paired(device: Device, rounds: int, steps: int) -> dict[str, list[float]]:
    """Wall time of a step in blocks with and without hooks, in turns."""
    pipeline = Pipeline(device, slow=False)
    found: dict[str, list[float]] = {"with": [], "without": []}
    pipeline.step()
    for turn in range(rounds):
        for mode in ("with", "without") if turn % 2 else ("without", "with"):
            switch(on=mode == "with")
            pipeline.step()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                pipeline.step()
            torch.cuda.synchronize()
            found[mode].append((time.perf_counter() - begin) / steps)
    switch(on=True)
    return found


def switch(*, on: bool) -> None:
    if on:
        install.install_probes()
        RECORDER.wake()
    else:
        RECORDER.sleep()
        install.uninstall_probes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["timing", "verdict"])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--results", required=True, help="a rank writes what it found to FILE<rank>")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = Device(dry=args.dry_run)
    dist.init_process_group("gloo" if args.dry_run else "nccl")
    one_at_a_time("calibration", device.calibrate)
    RECORDER.start()
    found: dict[str, Any] = {"rank": dist.get_rank(), "torch": torch.__version__}
    if args.what == "timing":
        found |= one_at_a_time("kernels", lambda: known_kernels(device))
        if dist.get_world_size() > 1:
            found |= paired(device, args.rounds, args.steps)
    else:
        pipeline = Pipeline(device, slow=True)
        for _ in range(12):
            pipeline.step()
        torch.cuda.synchronize()
    Path(f"{args.results}{dist.get_rank()}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
