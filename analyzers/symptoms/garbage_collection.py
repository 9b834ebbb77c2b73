"""Python collects garbage on one rank after the other: each pause stops the whole pipeline.

What it finds: Pauses of Python's garbage collector that, over all ranks together, take 5 % of the step time or more.

Why it matters: Each process collects when its own counters say so. The pauses come at different times on different
ranks, and every one of them is waited for by all: a straggler that moves about.

What to try: Collect on all ranks at the same step, every so many steps, and never in between.

Source: pytorch/torchtitan PR#148, marin-community/marin#9205.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.host_time import symptom_of
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom
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
    advice = Advice(
        action="Collect garbage on all ranks at the same step",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="replay of the run without these pauses",
        measure_after=MEASURE_AFTER,
    )
    words = Symptom("garbage-collection", "Garbage collection at different times", "", (), (advice,))
    return symptom_of(evidence, HostCause.GC, words, "pauses")
