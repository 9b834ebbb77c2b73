"""A GPU that looks busy and waits: utilisation is not progress.

What it finds: Ranks whose device reports nearly full utilisation, although they stand still or are idle for a large
part of the step.

Why it matters: A kernel of NCCL spins while it waits, and counts as busy. A dashboard at 100 % says that a kernel
runs, not that work is done.

What to try: Read the busy column of this report, or power instead of utilisation: a spinning kernel draws little.

Source: hpcaitech/ColossalAI#2897.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.stuck import find_hang
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import CRITICAL, Advice, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

LOOKS_BUSY_PERCENT = 90.0
HOW = in_words_of(other="for dashboards: power draw or SM activity (DCGM) beside utilisation")
MEASURE_AFTER = "the busy column of the stages, not utilisation"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where a device looks busy whose rank is idle for a fifth of the step, or stands still."""
    hang = find_hang(evidence.trace.ranks, evidence.diagnosis.steps.median_s)
    stuck = set(hang.waits) if hang is not None else set()
    rows = [
        f"rank {row.rank}: utilisation {use:.0f} %, idle {percent(row.idle_fraction)}"
        + (", now stuck" if row.rank in stuck else "")
        for row in evidence.diagnosis.ranks
        if (use := _utilisation(evidence, row.rank)) >= LOOKS_BUSY_PERCENT
        and (row.idle_fraction >= CRITICAL or row.rank in stuck)
    ]
    if not rows:
        return None
    advice = Advice(
        action="Do not take utilisation for progress",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="samples of NVML beside the measured idle time",
        measure_after=MEASURE_AFTER,
    )
    return Symptom("busy-but-waiting", "A GPU that looks busy and waits", "info", tuple(rows[:8]), (advice,))


def _utilisation(evidence: Evidence, rank: int) -> float:
    """Mean of what NVML said, in per cent; 0 where it said nothing."""
    samples = evidence.trace.ranks[rank].facts.get("nvml") if rank in evidence.trace.ranks else None
    return float(samples.get("gpu_percent", 0.0)) if isinstance(samples, dict) else 0.0
