"""The public recordings, explained: CPU time of reading, diagnosing and of the what-if analysis of StragglerAnalysis.

    python benchmarks/stragglers.py

The authors' own code took 10.9 s on two cores of a like machine for the same numbers of SE (107,328 rows).
"""

from __future__ import annotations

import time
from pathlib import Path

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.stragglers import Stragglers

DATA = Path(__file__).parents[1] / "tests" / "data"
RECORDINGS = (
    "straggler_analysis/trace-ST.parquet",
    "straggler_analysis/trace-SE.parquet",
    "megatronapp/interleaved_p4_v4_m8.json",
)
REPEATS = 3


def cpu_s(work):
    """Least CPU time of a few calls, and what the last of them returned."""
    times, result = [], None
    for _ in range(REPEATS):
        begin = time.process_time()
        result = work()
        times.append(time.process_time() - begin)
    return min(times), result


def what_if(trace):
    """All numbers of result-*.json, ms-*.json and mw-*.json that are of the whole job."""
    found = Stragglers(trace)
    return found.launch_slowdown, found.slowdown, found.by_type, found.last_stage(), found.slowest_ranks()


def main():
    """Prints one line a recording."""
    for name in RECORDINGS:
        read_s, trace = cpu_s(lambda name=name: read_trace([DATA / name]))
        diagnose_s, found = cpu_s(lambda trace=trace: diagnose(trace))
        print(f"{name}: {len(trace)} spans, {len(found.ranks)} ranks, {found.steps.count} steps")
        print(f"  read {read_s:.2f} s CPU, diagnosed {diagnose_s:.2f} s CPU: {len(trace) / diagnose_s:,.0f} spans/s")
        print(f"  replay error {100 * found.replay_error_fraction:.2f} %, verdict: {found.verdict.text}")
        if name.endswith(".parquet"):
            what_if_s, (_, slowdown, *_) = cpu_s(lambda trace=trace: what_if(trace))
            print(f"  what-if analysis {what_if_s:.2f} s CPU, slowdown {slowdown:.4f}")


if __name__ == "__main__":
    main()
