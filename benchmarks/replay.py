"""Speed of the replay: operations x worlds x steps per second, on one core.

    python benchmarks/replay.py [--ranks 16 --chunks 4 --microbatches 128 --steps 100]

The step is simulated once; its durations are varied from step to step. An operation is a compute, a send or a receive.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "analyzers"))

from factory import Pipeline

from ppdiag.analyzers import graph as step_graph
from ppdiag.analyzers import program as rank_program
from ppdiag.analyzers import schedules
from ppdiag.analyzers.program import COMPUTE, POST
from ppdiag.analyzers.replay import Walk, replay
from ppdiag.analyzers.shape import label
from ppdiag.analyzers.steps import find_steps
from ppdiag.analyzers.why import CHOICES, eight_worlds

if TYPE_CHECKING:
    from collections.abc import Callable


def graph_of(ranks: int, chunks: int, microbatches: int, steps: int) -> step_graph.Graph:
    """The graph of an interleaved step, with ``steps`` sets of durations."""
    orders = schedules.order("Interleaved1F1B", ranks=ranks, chunks=chunks, microbatches=microbatches)
    stage_rank = schedules.stage_ranks("Interleaved1F1B", ranks, chunks)
    trace = Pipeline(orders, stage_rank, host_gap=5_000, transfer=lambda *_: 100_000, steps=2).trace()
    found = find_steps(trace)
    trace, _ = label(trace, found)
    graph = step_graph.build_graphs(rank_program.build(trace, found), found)[0][0]
    noise = np.random.default_rng(0).uniform(1.0, 1.2, steps)
    return replace(
        graph,
        steps_K=np.arange(steps),
        duration_K=np.repeat(graph.duration_K[:1], steps),
        span_NK=np.repeat(graph.span_NK[:, :1], steps, axis=1),
        start_RK=np.repeat(graph.start_RK[:, :1], steps, axis=1),
        host_NK=graph.host_NK[:, :1] * noise,
        work_NK=graph.work_NK[:, :1] * noise,
        transfer_EK=graph.transfer_EK[:, :1] * noise,
    )


def cpu_seconds(function: Callable[[], object]) -> float:
    """CPU time of one call."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def main() -> None:
    """Prints the speed of one pass, and of a whole replay until the starts settle: best of three."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("ranks", 16), ("chunks", 4), ("microbatches", 128), ("steps", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    graph = graph_of(args.ranks, args.chunks, args.microbatches, args.steps)
    operations = int((graph.what_N == COMPUTE).sum() + (graph.what_N == POST).sum())
    eight = eight_worlds(graph)
    worlds = [eight[choice] for choice in CHOICES]
    walk = Walk(graph, worlds)
    every = np.ones((len(worlds), args.steps), bool)
    one_pass = min(cpu_seconds(lambda: walk.again(walk.start_RWK, every)) for _ in range(3))
    whole = min(cpu_seconds(lambda: replay(graph, worlds)) for _ in range(3))
    total = operations * len(worlds) * args.steps
    print(f"P={args.ranks} V={args.chunks} M={args.microbatches}: {operations} operations, {len(graph.src_E)} edges")
    print(
        f"{len(worlds)} worlds x {args.steps} steps: one pass {one_pass:.2f} s CPU, "
        f"{total / one_pass / 1e6:.0f} M operations a second"
    )
    print(f"replay until settled {whole:.2f} s CPU, {total / whole / 1e6:.0f} M a second")


if __name__ == "__main__":
    main()
