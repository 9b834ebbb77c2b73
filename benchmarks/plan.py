"""Speed of the planner: candidates checked against all rules and estimated, a second, on one core.

python benchmarks/plan.py
"""

from __future__ import annotations

import time

import numpy as np

from ppdiag.analyzers.planning import plan, rules
from ppdiag.analyzers.planning.cost import estimate
from ppdiag.analyzers.planning.hardware import DEVICES, NETWORKS, Cluster
from ppdiag.analyzers.planning.layout import PLANNED, Job
from ppdiag.analyzers.planning.models import MODELS

REPEATS = 20


def main() -> None:
    """Prints the rate, and the time of a whole search for each preset."""
    clock = time.process_time
    job = Job(MODELS["llama3-70b"], Cluster(512, 8, DEVICES["h100"], NETWORKS["ndr"]), 1024)
    one = plan.candidates(job, schedules=PLANNED, micro=None)
    many = one.take(np.tile(np.arange(len(one)), REPEATS))
    begin = clock()
    feasible = rules.allowed(job, many)
    checked = clock() - begin
    print(f"rules, memory included: {len(many)} candidates in {checked:.2f} s CPU, {len(many) / checked:,.0f} a second")
    begin = clock()
    estimate(job, feasible)
    print(f"estimates: {len(feasible)} that are possible in {clock() - begin:.3f} s CPU")
    begin = clock()
    estimate(job, many)
    spent = clock() - begin + checked
    print(f"rules and estimate of every candidate: {len(many) / spent:,.0f} a second")
    for name, model in MODELS.items():
        plan._program.cache_clear()
        begin = clock()
        found = plan.search(Job(model, job.cluster, job.global_batch))
        print(f"{name:<18} {found.feasible:>5} of {found.candidates} possible: {clock() - begin:.2f} s CPU")


if __name__ == "__main__":
    main()
