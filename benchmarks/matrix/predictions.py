"""What-if answers against the truth: the change is predicted from a record, then really made and measured.

    python -m benchmarks.matrix.predictions [--again | --rescore]

Both jobs of a pair sleep instead of computing, so that the change is made exactly. Jobs whose record is in the folder
are not run again. About 5 minutes on two idle cores.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.matrix.jobs import Forge, Job, JobFailed, can_shape_links, forge_of, options, recorded
from ppdiag.analyzers.diagnose import analyse
from ppdiag.analyzers.sources.run_directory import RunDirectory
from ppdiag.analyzers.what_if import Change, LinkFactor, Place, predict, run_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ppdiag.trace import Trace

MOST_ERROR, LEAST_GOOD = 0.05, 0.90
STEPS = 6
OPS = "--forward-ms 20 --backward-ms 40"
LONG_OPS = "--forward-ms 40 --backward-ms 80"
"""Where stages are cut in two, which take ``OPS`` then: a job that sleeps has some 0.5 ms of its own around each op."""


class Pair(NamedTuple):
    """A job, the advised change, and the job with that change made."""

    fault: str
    before: Job
    change: Change
    after: Job


def _job(ranks: int, schedule: str, microbatches: int, options: str, *links: str) -> Job:
    text = f"--schedule {schedule} --microbatches {microbatches} --steps {STEPS} {options}"
    return Job(ranks, text, links)


def pairs() -> Iterator[Pair]:
    """The pairs: more microbatches, another schedule, another split, a faster link, a repaired stage or rank."""
    for schedule, few, more in (("1F1B", 4, 12), ("GPipe", 4, 16), ("Interleaved1F1B", 4, 8)):
        before, after = (_job(4, schedule, count, OPS) for count in (few, more))
        yield Pair("few microbatches", before, Change(microbatches=more), after)
    short = _job(4, "1F1B", 4, LONG_OPS)
    for schedule, torch in (("interleaved", "Interleaved1F1B"), ("zb-v", "ZBVZeroBubble")):
        yield Pair("few microbatches", short, Change(schedule=schedule, chunks=2), _job(4, torch, 4, OPS))
    gpipe = _job(4, "GPipe", 8, LONG_OPS)
    yield Pair("GPipe", gpipe, Change(schedule="1f1b"), _job(4, "1F1B", 8, LONG_OPS))
    yield Pair("GPipe", gpipe, Change(schedule="interleaved", chunks=2), _job(4, "Interleaved1F1B", 8, OPS))
    yield from _splits()
    yield from _repairs()
    yield from _links()


def _splits() -> Iterator[Pair]:
    """A stage of 4 layers among stages of 2: 2, 2, 3, 3 instead."""
    resplit = Change(layers=(2, 2, 3, 3), layers_now=(2, 2, 4, 2))
    for schedule, microbatches in (("1F1B", 8), ("GPipe", 8)):
        before = _job(4, schedule, microbatches, f"{OPS} --stage-factor 2:2")
        after = _job(4, schedule, microbatches, f"{OPS} --stage-factor 2:1.5 --stage-factor 3:1.5")
        yield Pair("slow stage", before, resplit, after)


def _repairs() -> Iterator[Pair]:
    for schedule in ("1F1B", "Interleaved1F1B"):
        before = _job(4, schedule, 8, f"{OPS} --stage-factor 1:2.5")
        yield Pair("slow stage", before, Change(repair=(Place("stage", 1),)), _job(4, schedule, 8, OPS))
    twins = f"{OPS} --replicas 2"
    before = _job(4, "1F1B", 8, f"{twins} --rank-factor 2:2")
    yield Pair("slow twin", before, Change(repair=(Place("rank", 2),)), _job(4, "1F1B", 8, twins))


def _links() -> Iterator[Pair]:
    """A link four times as fast, in delay or in rate."""
    faster = Change(links=(LinkFactor((1, 2), 4.0),))
    for schedule in ("1F1B", "GPipe"):
        before, after = (_job(4, schedule, 8, OPS, f"1-2:{delay}:10000") for delay in (24, 6))
        yield Pair("slow link", before, faster, after)
    large = f"{OPS} --rows 512"
    before, after = (_job(4, "1F1B", 8, large, f"1-2:0:{mbit}") for mbit in (2, 8))
    yield Pair("low-rate link", before, faster, after)


def read(job: Job, folder: Path, forge: Forge | None) -> Trace | None:
    """The record of a job; None where it is not there and may not be made, or failed."""
    try:
        run_dir = recorded(job, folder, forge)
    except JobFailed as error:
        print(error, file=sys.stderr)
        return None
    return None if run_dir is None else RunDirectory().read([run_dir], None)


def main() -> int:
    args = options(__doc__, "predicted-jobs").parse_args()
    forge = forge_of(args)
    chosen = [pair for pair in pairs() if can_shape_links() or not pair.before.links]
    print(f"{'planted':<17}{'schedule':<17}{'change':<42}{'before':>8}{'predicted':>10}{'measured':>9}{'error':>8}")
    good = []
    for number, pair in enumerate(chosen):
        before = read(pair.before, args.folder / f"{number}-before", forge)
        after = read(pair.after, args.folder / f"{number}-after", forge)
        if before is not None and after is not None:
            good.append(compare(pair, before, after))
    print(f"\n{sum(good)} of {len(chosen)} predictions within {MOST_ERROR:.0%} of the measured step; times in ms")
    return 0 if sum(good) >= LEAST_GOOD * len(chosen) else 1


def compare(pair: Pair, before: Trace, after: Trace) -> bool:
    """Prints a row; says whether the prediction was met."""
    run = run_of(analyse(before))
    was_s, became_s = (float(np.median(analyse(trace).steps.duration_s)) for trace in (before, after))
    predicted_s = predict(run, pair.change).step_s
    error = predicted_s / became_s - 1
    times = f"{1e3 * was_s:>8.0f}{1e3 * predicted_s:>10.0f}{1e3 * became_s:>9.0f}{error:>+8.1%}"
    print(f"{pair.fault:<17}{run.job.schedule_name:<17}{pair.change.words:<42}{times}", flush=True)
    return abs(error) <= MOST_ERROR


if __name__ == "__main__":
    sys.exit(main())
