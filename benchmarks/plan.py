"""Speed of the planner on one core: candidates a second, and a whole search for each preset on each device.

python benchmarks/plan.py          # fails where a search takes 2 s, or fewer than 100,000 candidates a second are done
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.planning import plan, rules
from ppdiag.analyzers.planning.cost import estimate
from ppdiag.analyzers.planning.hardware import DEVICES, NETWORKS, Cluster
from ppdiag.analyzers.planning.layout import PLANNED, Job
from ppdiag.analyzers.planning.models import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REPEATS = 20
LEAST_A_SECOND = 100_000
MOST_S = 2.0
CLUSTERS = ((64, 1024), (512, 1024), (8192, 8192), (10080, 40320))
"""GPUs and global batch; the last has many divisors."""
DEFAULT = ("1f1b", "interleaved")


def main() -> int:
    """Prints the rate, and the slowest search of each preset.

    Returns:
        The exit code.
    """
    rate = _rate()
    slowest = max(_slowest(name) for name in MODELS)
    print(f"the slowest search: {slowest:.2f} s CPU")
    return int(rate < LEAST_A_SECOND or slowest >= MOST_S)


def _rate() -> float:
    """Candidates a second that are checked against all rules, memory included, and estimated."""
    job = Job(MODELS["llama3-70b"], Cluster(512, 8, DEVICES["h100"], NETWORKS["ndr"]), 1024)
    one = plan.candidates(job, schedules=PLANNED, micro=None)
    many = one.take(np.tile(np.arange(len(one)), REPEATS))
    begin = time.process_time()
    rules.allowed(job, many)
    checked = time.process_time() - begin
    print(f"rules, memory included: {len(many)} candidates in {checked:.2f} s CPU, {len(many) / checked:,.0f} a second")
    estimate(job, many)
    rate = len(many) / (time.process_time() - begin)
    print(f"rules and estimate of every candidate: {rate:,.0f} a second")
    return rate


def _slowest(name: str) -> float:
    """The slowest search for a preset, over devices, clusters, and the default or all schedules."""
    seconds, job, schedules, found = max(_searches(name), key=lambda search: search[0])
    device = next(known for known, part in DEVICES.items() if part == job.cluster.device)
    print(
        f"{name:<18} {seconds:.2f} s CPU at most, on {job.cluster.gpus} {device}, {len(schedules)} schedules: "
        f"{found.feasible} of {found.candidates} possible, {len(found.plans)} replayed"
    )
    return seconds


def _searches(name: str) -> Iterator[tuple[float, Job, Sequence[str], plan.Found]]:
    for device in DEVICES.values():
        for gpus, batch in CLUSTERS:
            job = Job(MODELS[name], Cluster(gpus, 8, device, NETWORKS["ndr"]), batch)
            for schedules in (DEFAULT, PLANNED):
                plan._program.cache_clear()
                begin = time.process_time()
                found = plan.search(job, schedules=schedules)
                yield time.process_time() - begin, job, schedules, found


if __name__ == "__main__":
    sys.exit(main())
