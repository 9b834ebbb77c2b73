"""Diagnosis of very large jobs in one process: time and memory for four sizes of a synthetic job.

    python benchmarks/scale.py [--replicas 8 16 32 64]

Each job is interleaved 1F1B (P=16, V=2, M=64) in so many replicas, whose gradients are reduced at the end of each of 20
steps: 64 replicas are 1,024 ranks and some 16 million spans. One step of one replica is simulated; every replica and
step is that one, stretched by a few per cent of its own, so that replicas differ and wait for each other. Each size has
a process of its own, for its peak memory to be its own.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "analyzers"))

from factory import MS, Pipeline

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.memory import keep_freed_memory
from ppdiag.model import Collective, Kind
from ppdiag.trace import SPAN_DTYPE, JobFacts, ProcessGroup, RankFacts, Trace, sorted_spans

RANKS, CHUNKS, MICROBATCHES, STEPS = 16, 2, 64, 20
SLOW_STAGE, SLOWNESS = 5, 1.5
SPREAD = 0.03
"""Standard deviation of the stretch of a replica's step."""
REDUCE_NS, OPTIMIZER_NS, BETWEEN_NS = 5 * MS, 2 * MS, MS // 10


def one_step() -> np.ndarray:
    """Spans of the pipeline of one step of one replica, whose stage 5 is slow; times from 0."""
    orders = schedules.order("Interleaved1F1B", ranks=RANKS, chunks=CHUNKS, microbatches=MICROBATCHES)
    pipeline = Pipeline(
        orders,
        schedules.stage_ranks("Interleaved1F1B", RANKS, CHUNKS),
        duration=lambda op, *_: int(
            (10 if op.kind is Kind.FORWARD else 20) * MS * (SLOWNESS if op.stage == SLOW_STAGE else 1.0)
        ),
        transfer=lambda *_: MS // 5,
        host_gap=MS // 20,
        steps=1,
        origin=0,
    )
    spans = pipeline.trace().spans
    return spans[spans["kind"] != Kind.OPTIMIZER]


def job(replicas: int) -> Trace:
    """The trace of the whole job."""
    base = one_step()
    stretch = 1.0 + np.abs(np.random.default_rng(1).normal(0.0, SPREAD, (STEPS, replicas)))
    parts: list[np.ndarray] = []
    begin = 1_000 * MS
    for step in range(STEPS):
        copies = np.tile(base, (replicas, 1))
        for name in ("start_ns", "end_ns", "post_ns"):
            copies[name] = begin + (base[name] * stretch[step][:, None]).astype(np.int64)
        replica = np.arange(replicas)[:, None]
        copies["rank"] += replica * RANKS
        copies["group"] = replica
        copies["peer"] += np.where(copies["peer"] >= 0, replica * RANKS, 0)
        copies["seq"] += step * _messages_of_a_channel(base)
        copies["step"] = step
        tail = _tail(copies, replicas, step)
        parts += [copies.ravel(), tail]
        begin = int(tail["end_ns"].max()) + BETWEEN_NS
    spans = sorted_spans(np.concatenate(parts))
    ranks = {rank: RankFacts(rank, host=f"host{rank // 8}", clock="one", status="finished") for rank in _all(replicas)}
    groups = [ProcessGroup(f"pp{r}", tuple(range(r * RANKS, (r + 1) * RANKS))) for r in range(replicas)]
    groups += [ProcessGroup(f"dp{p}", tuple(range(p, replicas * RANKS, RANKS))) for p in range(RANKS)]
    return Trace(spans, JobFacts(source="synthetic", world_size=len(ranks)), ranks, tuple(groups))


def _all(replicas: int) -> range:
    return range(replicas * RANKS)


def _messages_of_a_channel(base: np.ndarray) -> np.ndarray:
    """How many messages of its channel each span's step has; 0 for ops that are no messages (N)."""
    channels = base[["rank", "kind", "peer", "tag"]]
    _, which, count = np.unique(channels, return_inverse=True, return_counts=True)
    messages = np.isin(base["kind"], [Kind.SEND, Kind.RECV])
    return np.where(messages, count[which.ravel()], 0)


def _tail(copies: np.ndarray, replicas: int, step: int) -> np.ndarray:
    """The gradients' reduction over the replicas of each position, and the optimizer: two spans a rank."""
    ready = np.zeros(replicas * RANKS, np.int64)
    np.maximum.at(ready, copies["rank"].ravel(), copies["end_ns"].ravel())
    done = ready.reshape(replicas, RANKS).max(axis=0) + REDUCE_NS
    spans = np.zeros((2, replicas * RANKS), SPAN_DTYPE)
    for name in ("stage", "chunk", "microbatch", "peer", "seq", "group"):
        spans[name] = -1
    spans["rank"], spans["step"] = _all(replicas), step
    reduce, optimizer = spans
    reduce["kind"], reduce["op"], reduce["seq"] = Kind.COLLECTIVE, Collective.ALL_REDUCE, step
    reduce["group"] = replicas + np.tile(np.arange(RANKS), replicas)
    reduce["start_ns"] = reduce["post_ns"] = ready
    reduce["end_ns"] = optimizer["start_ns"] = optimizer["post_ns"] = np.tile(done, replicas)
    optimizer["kind"], optimizer["end_ns"] = Kind.OPTIMIZER, optimizer["start_ns"] + OPTIMIZER_NS
    return spans.ravel()


def measure(replicas: int) -> None:
    """Diagnose one size and print its line."""
    keep_freed_memory()
    trace = job(replicas)
    made_gib = _peak_gib()
    begin, cpu = time.perf_counter(), time.process_time()
    diagnosis = diagnose(
        trace, lambda part, done, of: print(f"    {done} of {of}: {part}", file=sys.stderr, flush=True)
    )
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    spans = len(trace)
    print(
        f"{replicas * RANKS:6d} ranks {spans / 1e6:7.2f} M spans {wall_s:7.1f} s ({cpu_s:.1f} s of CPU) "
        f"{1e6 * wall_s / spans:6.2f} us a span  {_peak_gib():5.1f} GiB at most ({made_gib:.1f} before)  "
        f"{diagnosis.verdict.cause} at stage {diagnosis.verdict.stage}",
        flush=True,
    )


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(args.one)
        return
    for replicas in args.replicas:
        subprocess.run([sys.executable, __file__, "--one", str(replicas)], check=True)


if __name__ == "__main__":
    main()
