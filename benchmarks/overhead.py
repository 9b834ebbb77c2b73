"""What the hooks cost: CPU time of a training step with and without them, in alternating blocks within one process.

The job is 1F1B on two ranks with eight microbatches. Short blocks of steps alternate between *dormant* (all hooks off),
*probed* and, in some rounds, torch.profiler; the order changes from round to round. CPU time of the process (all its
threads) is compared, not wall time, which on a shared machine measures the neighbours. Those cost CPU time too, through
the caches, but can only add to it: so the fast blocks are compared (the 20th percentile of each mode), with a bootstrap
interval over rounds. Printed besides: the cost of single wrapped calls, and the same ratio for torch.profiler. Run it
on an idle machine: beside other work the interval is wider than the effect.

    python benchmarks/overhead.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from ppdiag.hooks import install, process_group
from ppdiag.hooks.adapters import torch_pipelining
from ppdiag.hooks.recorder import RECORDER
from ppdiag.model import Kind

MICROBATCHES, ROWS, LAYERS = 8, 16, 4
BOOTSTRAPS = 2000
FAST = 20.0
CALLS, REPETITIONS = 2000, 30
ROOT = Path(__file__).resolve().parent.parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[384, 1024])
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--steps", type=int, default=3, help="steps a block")
    parser.add_argument("--profiler-rounds", type=int, default=20, help="rounds in which torch.profiler runs too")
    parser.add_argument("--json", default="", metavar="FILE")
    return parser.parse_args()


class Job:
    """One rank's stage, schedule and optimizer."""

    def __init__(self, dim: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        self.model = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(dim, dim), nn.ReLU())])
        stage = PipelineStage(self.model, rank, ranks, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        batch = torch.randn(MICROBATCHES * ROWS, dim)
        self.first = (batch,) if rank == 0 else ()
        self.last = {"target": batch} if rank == ranks - 1 else {}

    def block(self, steps: int) -> float:
        """CPU seconds a step; the first one, in which Python adapts to what was just patched, does not count."""
        self.step()
        dist.barrier()
        begin = time.process_time()
        for _ in range(steps):
            self.step()
        return (time.process_time() - begin) / steps

    def step(self) -> None:
        self.schedule.step(*self.first, **self.last)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Modes:
    """The ways in which a block may run."""

    def __init__(self) -> None:
        self.events = 0
        self.profiler_events = 0

    def dormant(self, job: Job, steps: int) -> float:
        RECORDER.sleep()
        install.uninstall_probes()
        return job.block(steps)

    def probed(self, job: Job, steps: int) -> float:
        install.install_probes()
        RECORDER.wake()
        before = RECORDER.recorded
        cpu_s = job.block(steps)
        self.events = (RECORDER.recorded - before) // (steps + 1)
        return cpu_s

    def profiled(self, job: Job, steps: int) -> float:
        """Without the start and the stop of the profiler, which take another 0.1 to 0.4 s."""
        RECORDER.sleep()
        install.uninstall_probes()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            cpu_s = job.block(steps)
        self.profiler_events = len(profiler.events()) // (steps + 1)
        return cpu_s


def measure(args: argparse.Namespace, dim: int) -> dict[str, Any]:
    job, modes = Job(dim), Modes()
    for mode in (modes.probed, modes.dormant):
        mode(job, args.steps)  # caches, lazy imports, initialisation
    times: dict[str, list[float]] = {"dormant": [], "probed": [], "profiled": []}
    for turn in range(args.rounds):
        order = ("dormant", "probed") if turn % 2 else ("probed", "dormant")
        for name in order:
            times[name].append(getattr(modes, name)(job, args.steps))
        if turn < args.profiler_rounds:
            times["profiled"].append(modes.profiled(job, args.steps))
    base_s = float(np.percentile(times["dormant"], FAST))
    probed = ratio(times["probed"], times["dormant"])
    profiled = ratio(times["profiled"], times["dormant"][: args.profiler_rounds])
    return {
        "dim": dim,
        "cpu_ms_per_step": 1e3 * base_s,
        "hooks": probed,
        "events_per_step": modes.events,
        "torch_profiler": profiled,
        "torch_profiler_events_per_step": modes.profiler_events,
    }


def ratio(times_s: list[float], base_s: list[float]) -> dict[str, float]:
    """Ratio of the fast blocks, with a 95 % bootstrap interval over the rounds (M: the two modes, R: rounds)."""
    pairs_MR = np.asarray([times_s, base_s])
    draws = np.random.default_rng(0).integers(len(base_s), size=(BOOTSTRAPS, len(base_s)))
    fast, base = np.percentile(pairs_MR[:, draws], FAST, axis=2)
    low, high = np.percentile(fast / base, [2.5, 97.5])
    fast, base = np.percentile(pairs_MR, FAST, axis=1)
    return {"ratio": float(fast / base), "low": float(low), "high": float(high)}


class Nothing:
    """Stands in for a stage, a tensor's group and a Work, whose calls do nothing."""

    stage_index, has_backward, is_last, nbytes = 0, True, False, 64

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def wrapped_calls_ns() -> dict[str, float]:
    """Median ns of this thread's CPU that one wrapped call costs more than the bare one."""
    install.install_probes()
    RECORDER.wake()
    works = [Nothing() for _ in range(CALLS)]
    group, stage, tensors = Nothing(), Nothing(), [Nothing()]
    RECORDER.threads.state.named = 1  # as within schedule.step: the universal layer leaves the work to the adapter

    def bare(*_: Any) -> Any:
        return None

    compute = torch_pipelining._compute(bare, Kind.FORWARD)
    post = process_group._message(lambda *_: next(remaining), Kind.SEND)
    wait = process_group._wait(bare)
    remaining = iter(works)
    costs: dict[str, list[float]] = {"forward_one_chunk": [], "send": [], "Work.wait": []}
    for _ in range(REPETITIONS):
        base_ns = timed_ns(bare, [(stage, 0)] * CALLS)
        remaining = iter(works)
        costs["forward_one_chunk"].append(timed_ns(compute, [(stage, 0)] * CALLS) - base_ns)
        costs["send"].append(timed_ns(post, [(group, tensors, 1, 0)] * CALLS) - base_ns)
        costs["Work.wait"].append(timed_ns(wait, [(work,) for work in works]) - base_ns)
        RECORDER.spans.clear()
    return {name: float(np.median(values)) for name, values in costs.items()}


def timed_ns(function: Any, calls: list[tuple[Any, ...]]) -> float:
    begin = time.thread_time_ns()
    for arguments in calls:
        function(*arguments)
    return (time.thread_time_ns() - begin) / len(calls)


def show(result: dict[str, Any]) -> str:
    hooks, profiler = result["hooks"], result["torch_profiler"]
    return (
        f"1F1B, 2 ranks, M={MICROBATCHES}, dim {result['dim']}: {result['cpu_ms_per_step']:.1f} ms of CPU a step\n"
        f"  hooks           x{hooks['ratio']:.4f}  (95 %: {hooks['low']:.4f} to {hooks['high']:.4f}), "
        f"{result['events_per_step']} events a step\n"
        f"  torch.profiler  x{profiler['ratio']:.4f}  (95 %: {profiler['low']:.4f} to {profiler['high']:.4f}), "
        f"{result['torch_profiler_events_per_step']} events a step"
    )


def main() -> None:
    torch.set_num_threads(1)
    args = parse_arguments()
    dist.init_process_group("gloo")
    results = [measure(args, dim) for dim in args.dims]
    if dist.get_rank() == 0:
        calls_ns = wrapped_calls_ns()
        for result in results:
            print(show(result))
        print("a wrapped call: " + ", ".join(f"{name} +{cost:.0f} ns" for name, cost in calls_ns.items()), flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps({"jobs": results, "wrapped_calls_ns": calls_ns}, indent=1) + "\n")
    dist.destroy_process_group()


def launch() -> int:
    """Start this file as a recorded job of two ranks."""
    with tempfile.TemporaryDirectory() as run_dir:
        bootstrap = str(ROOT / "ppdiag" / "hooks" / "bootstrap")
        environment = {**os.environ, "PPDIAG_RUN_DIR": run_dir, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([bootstrap, str(ROOT)])
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        return subprocess.run([*launcher, *sys.argv], env=environment, check=False).returncode


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(launch())
