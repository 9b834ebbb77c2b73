"""Clocks of several hosts that nothing compared well enough.

What it finds: Ranks whose clocks may be off by more than 5 % of the step, or by more than messages take, so that they
had to be moved by the messages themselves.

Why it matters: Which rank was late, and how long a transfer took, compares the clocks of two hosts. Traces that were
laid side by side by the hosts' time of day are off by hundreds of microseconds to milliseconds, and show messages that
arrive before they are sent.

What to try: Let ppdiag compare the clocks while the job runs; where it cannot, keep them by PTP or by chrony with
hardware timestamps.

Source: pytorch/pytorch#128292, attention-gym PR#487, vllm PR#51881.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.analyzers.verdict import MOST_CLOCK_ERROR
from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    other="ppdiag run, with UDP open from every host to that of rank 0; chrony with hwtimestamp, or ptp4l and phc2sys"
)
MEASURE_AFTER = "clock error of the report: below what a transfer takes"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where the clocks' error is too large for a verdict, or was too large before ranks were moved."""
    recorded_s, left_s = evidence.analysis.recorded.clock_error_s, evidence.diagnosis.clock_error_s
    moved = evidence.analysis.recorded is not evidence.trace and recorded_s > left_s
    undecided = left_s > MOST_CLOCK_ERROR * evidence.diagnosis.steps.median_s
    if not moved and not undecided:
        return None
    advice = Advice(
        action="Have the hosts' clocks compared",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="the clocks' error, and the ends of messages for which both ends waited",
        measure_after=MEASURE_AFTER,
    )
    median_ms = evidence.diagnosis.steps.median_s * 1e3
    numbers = [f"the clocks may be off by {recorded_s * 1e3:.2f} ms; the median step takes {median_ms:.1f} ms"]
    if moved:
        numbers.append(f"by their messages ranks were moved, to within {left_s * 1e3:.2f} ms")
    severity = "warning" if undecided else "info"
    return Symptom("clocks-apart", "Clocks that nothing compared", severity, tuple(numbers), (advice,))
