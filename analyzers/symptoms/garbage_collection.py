"""Python collects garbage on one rank after the other: each pause stops the whole pipeline.

What it finds: Pauses of Python's garbage collector that, over all ranks together, take 5 % of the step time or more.

Why it matters: Each process collects when its own counters say so. The pauses come at different times on different
ranks, and every one of them is waited for by all: a straggler that moves about.

What to try: Collect on all ranks at the same step, every so many steps, and never in between.

Source: pytorch/torchtitan PR#148, marin-community/marin#9205.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.host_time import gain_without, seconds_of, union_share
from ppdiag.analyzers.symptoms import in_words_of, severity
from ppdiag.diagnosis import WORTH_SAYING, Advice, Symptom, percent
from ppdiag.model import HostCause

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="--manual-gc --manual-gc-interval 100",
    torch="gc.disable() at the start and gc.collect(1) every 50 steps on all ranks; torchtitan: training.gc_freq",
    other="gc.disable() at the start and gc.collect(1) every 50 steps on all ranks",
)
MEASURE_AFTER = "host time of the stages, and the spread of the step times"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where the pauses of all ranks together cover 5 % of the time."""
    share = union_share(evidence.analysis, HostCause.GC)
    if share < WORTH_SAYING:
        return None
    paused_s = seconds_of(evidence.analysis, HostCause.GC)
    steps = len(evidence.analysis.steps.kept)
    worst = max(paused_s, key=lambda rank: paused_s[rank])
    gain = gain_without(evidence, HostCause.GC)
    advice = Advice(
        action="Collect garbage on all ranks at the same step",
        how=evidence.says(HOW),
        gain_fraction=gain.fraction,
        gain_range=gain.over_steps,
        source="replay of the run without these pauses",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        f"pauses on {len(paused_s)} ranks cover {percent(share)} of the time",
        f"rank {worst}: {paused_s[worst] / steps * 1e3:.1f} ms a step on average",
    )
    return Symptom("garbage-collection", "Garbage collection at different times", severity(share), numbers, (advice,))
