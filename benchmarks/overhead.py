"""What the hooks cost: CPU time of a training step with and without them, in turns within one process.

The job is 1F1B on two ranks with eight microbatches. CPU time is compared, not wall time, which on a shared machine
measures the neighbours; those cost CPU time too, through the caches, so that all modes take turns at short intervals.

* *Single steps* are recorded or not, in random order within each pair of steps, with all patches on: the mean of the
  pairs' differences, its extremes trimmed, with a bootstrap interval. For the training thread and the writer's, which
  are all that the hooks use, and for the whole process, in which gloo's threads add noise. This is the finest: hundreds
  of pairs.
* *Blocks* of steps run without hooks, dormant (as ``ppdiag run --dormant``: only the wrappers of adapters stay on),
  recorded, and in some rounds under torch.profiler. The first steps of a block do not count: Python adapts to what was
  just patched.

Then the cost of single wrapped calls (``wrapped_calls.py``). Run it on an idle machine: beside other work the intervals
are wider than the effect.

    python benchmarks/overhead.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from wrapped_calls import show_calls, wrapped_calls_ns

from ppdiag.hooks import install
from ppdiag.hooks.recorder import RECORDER

if TYPE_CHECKING:
    from collections.abc import Callable

MICROBATCHES, ROWS, LAYERS = 8, 16, 4
SETTLING_STEPS, BLOCK_STEPS = 4, 5
"""Steps of a block that do not count, and those that do."""
TRIM = 0.05
"""Share of the pairs that is left out at each end: a step in which the machine did something else."""
BOOTSTRAPS = 2000
FLUSH_PATIENCE_S = 0.5
ROOT = Path(__file__).resolve().parent.parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[384, 1024], help="width of the layers; one job each")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each job")
    parser.add_argument("--profiler-rounds", type=int, default=6, help="rounds in which torch.profiler runs too")
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
        self.batch = torch.randn(MICROBATCHES * ROWS, dim)
        self.first = (self.batch,) if rank == 0 else ()
        self.last = {"target": self.batch} if rank == ranks - 1 else {}

    def step(self) -> None:
        self.schedule.step(*self.first, **self.last)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def single(self, writer: int) -> tuple[float, float, float]:
        """CPU seconds of a step until it is written: of this thread, of the one with that clock, of the process."""
        dist.barrier()
        process, writing, thread = time.process_time(), time.clock_gettime(writer), time.thread_time()
        self.step()
        end = time.thread_time()
        until = time.monotonic() + FLUSH_PATIENCE_S
        while RECORDER.recorded > written() and time.monotonic() < until:
            time.sleep(0.001)  # the writer is at it
        waiting = time.thread_time() - end
        return end - thread, time.clock_gettime(writer) - writing, time.process_time() - process - waiting

    def block(self) -> float:
        """CPU seconds of the process a step."""
        for _ in range(SETTLING_STEPS):
            self.step()
        dist.barrier()
        begin = time.process_time()
        for _ in range(BLOCK_STEPS):
            self.step()
        return (time.process_time() - begin) / BLOCK_STEPS


def written() -> int:
    """Spans in the file."""
    return RECORDER._writer.written if RECORDER._writer is not None else 0


def bare(job: Job) -> float:
    RECORDER.sleep()
    install.uninstall_probes()
    return job.block()


def dormant(job: Job) -> float:
    RECORDER.sleep()
    install.install_probes()
    install.sleep_probes()
    return job.block()


def wake() -> None:
    """Record, with all probes on: those of ops are not installed while the recorder sleeps."""
    RECORDER.wake()
    install.install_probes()


def recorded(job: Job) -> float:
    wake()
    return job.block()


def profiled(job: Job, counts: list[int]) -> float:
    """Without the start and the stop of the profiler, which take another 0.1 to 0.4 s."""
    RECORDER.sleep()
    install.uninstall_probes()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        cpu_s = job.block()
    counts.append(len(profiler.events()) // (SETTLING_STEPS + BLOCK_STEPS))
    return cpu_s


def measure(dim: int, seconds: float, profiler_rounds: int) -> dict[str, Any]:
    job = Job(dim)
    wake()
    result: dict[str, Any] = {"dim": dim, "events_per_step": events_per_step(job)}
    step_s = wall_s(job.step)
    pairs = as_rank_0(int(0.4 * seconds / step_s / 2))
    result |= single_steps(job, max(10, pairs))
    rounds = as_rank_0(int(0.6 * seconds / step_s / 3 / (SETTLING_STEPS + BLOCK_STEPS)))
    return result | blocks(job, max(5, rounds), profiler_rounds)


def events_per_step(job: Job, steps: int = 10) -> float:
    """Spans of a step; all are written before they are counted."""
    job.step()
    RECORDER.flush()
    before = RECORDER.recorded
    for _ in range(steps):
        job.step()
    RECORDER.flush()
    return (RECORDER.recorded - before) / steps


def wall_s(step: Callable[[], None], steps: int = 20) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begin) / steps


def as_rank_0(count: int) -> int:
    """The number that rank 0 has, on all ranks."""
    value = torch.tensor(count)
    dist.broadcast(value, 0)
    return int(value)


def single_steps(job: Job, pairs: int) -> dict[str, Any]:
    order = random.Random(0)  # the same on all ranks
    times: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    writer = time.pthread_getcpuclockid(RECORDER._writer._thread.ident)
    for _ in range(pairs):
        for awake in order.sample([False, True], 2):
            RECORDER.wake() if awake else RECORDER.sleep()
            times[awake].append(job.single(writer))
    asleep, awake = np.asarray(times[False]).T, np.asarray(times[True]).T
    whole_s = trimmed_mean(asleep[2])
    return {
        "pairs": pairs,
        "cpu_ms_per_step": 1e3 * whole_s,
        "training_thread": compare(awake[0], asleep[0], whole_s),
        "writer_thread": compare(awake[1], asleep[1], whole_s),
        "both_threads": compare(awake[0] + awake[1], asleep[0] + asleep[1], whole_s),
        "process": compare(awake[2], asleep[2], whole_s),
    }


def blocks(job: Job, rounds: int, profiler_rounds: int) -> dict[str, Any]:
    modes: dict[str, Callable[[Job], float]] = {"bare": bare, "dormant": dormant, "recorded": recorded}
    counts: list[int] = []
    times: dict[str, list[float]] = {name: [] for name in (*modes, "profiled")}
    order = random.Random(0)
    for turn in range(rounds):
        for name in order.sample(list(modes), len(modes)):
            times[name].append(modes[name](job))
        if turn < profiler_rounds:
            times["profiled"].append(profiled(job, counts))
    base = np.asarray(times["bare"])
    found: dict[str, Any] = {"rounds": rounds}
    for name in ("dormant", "recorded", "profiled"):
        count = len(times[name])
        found[name] = compare(np.asarray(times[name]), base[:count], trimmed_mean(base)) if count else None
    return {**found, "profiled_events_per_step": counts[0] if counts else None}


def trimmed_mean(values: Any) -> Any:
    """Mean along the last axis without the extremes at both ends."""
    cut = int(TRIM * np.shape(values)[-1])
    return np.sort(values, axis=-1)[..., cut : np.shape(values)[-1] - cut].mean(axis=-1)


def compare(times_s: Any, base_s: Any, whole_s: float) -> dict[str, float]:
    """Mean difference of the pairs as a fraction of a whole, with a 95 % bootstrap interval over the pairs."""
    fractions = (times_s - base_s) / whole_s
    draws = np.random.default_rng(0).integers(len(fractions), size=(BOOTSTRAPS, len(fractions)))
    low, high = np.percentile(trimmed_mean(fractions[draws]), [2.5, 97.5])
    return {"fraction": float(trimmed_mean(fractions)), "low": float(low), "high": float(high)}


def percent(found: dict[str, float] | None) -> str:
    if found is None:
        return "not measured"
    return f"{found['fraction']:+.2%}  (95 %: {found['low']:+.2%} to {found['high']:+.2%})"


def show(result: dict[str, Any]) -> str:
    return (
        f"1F1B, 2 ranks, M={MICROBATCHES}, dim {result['dim']}: {result['cpu_ms_per_step']:.1f} ms of CPU a step\n"
        f"  {result['pairs']} pairs of single steps, asleep and recorded ({result['events_per_step']:.0f} events)\n"
        f"    training thread  {percent(result['training_thread'])}\n"
        f"    writer's thread  {percent(result['writer_thread'])}\n"
        f"    together         {percent(result['both_threads'])}\n"
        f"    whole process    {percent(result['process'])}\n"
        f"  {result['rounds']} rounds of blocks, against no hooks at all\n"
        f"    dormant          {percent(result['dormant'])}\n"
        f"    recorded         {percent(result['recorded'])}\n"
        f"    torch.profiler   {percent(result['profiled'])}"
    ) + (f", {result['profiled_events_per_step']} events a step" if result["profiled"] else "")


def main() -> None:
    torch.set_num_threads(1)
    args = parse_arguments()
    dist.init_process_group("gloo")
    results = [measure(dim, args.seconds, args.profiler_rounds) for dim in args.dims]
    dist.barrier()
    if dist.get_rank() == 0:
        for result in results:
            print(show(result))
        wake()
        job = Job(args.dims[0])
        calls_ns = wrapped_calls_ns(lambda: job.model(job.batch[:ROWS]).sum().backward())
        print(show_calls(calls_ns), flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps({"jobs": results, "wrapped_calls_ns": calls_ns}, indent=1) + "\n")
    dist.barrier()
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
