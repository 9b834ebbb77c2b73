"""The first message of each pair is slow: connections are made when they are first used.

What it finds: A first message between two ranks that took 20 times as long as later ones, and a good part of the
recorded time.

Why it matters: NCCL connects a pair of ranks at its first message, 0.2 s instead of microseconds; device_id at the
start connects the group, not its pairs. In a pipeline the pairs come one after the other, so that the first step pays
for each.

What to try: A small message for each pair before the training; leave the first step out of every measurement.

Source: NVIDIA/nccl#1487, NVIDIA/nccl#552, NVIDIA/nccl#1691, pytorch/pytorch#136248, pytorch/pytorch#135267,
sail-sg/zero-bubble-pipeline-parallelism#24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.messages import MISSING
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import WORTH_SAYING, Advice, Symptom, percent
from ppdiag.model import Kind

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

TIMES_AS_LONG = 20.0
LEAST_S = 0.1
HOW = in_words_of(
    other="before the first step, one small isend and irecv between each pair of neighbours over the pipeline's group, "
    "both directions"
)
MEASURE_AFTER = "length of the first step"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where first messages that are far slower than the others take 5 % of the recorded time."""
    first, later_s = _transfers(evidence)
    slow = {pair: time for pair, time in first.items() if time >= max(LEAST_S, TIMES_AS_LONG * later_s)}
    spans = evidence.trace.spans
    recorded_s = float(spans["end_ns"].max() - spans["start_ns"].min()) / 1e9
    share = sum(slow.values()) / recorded_s
    if share < WORTH_SAYING:
        return None
    (source, destination), longest = max(slow.items(), key=lambda item: item[1])
    advice = Advice(
        action="Connect the pairs of ranks before the first step",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="first and later transfers of the record",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        (
            f"the first message from rank {source} to rank {destination} took {longest * 1e3:.0f} ms, later ones "
            f"{later_s * 1e3:.2f} ms (median)"
        ),
        (
            f"first messages of {len(slow)} pairs: {sum(slow.values()):.1f} s in all, {percent(share)} of the record, "
            "once; the first step is not analysed"
        ),
    )
    return Symptom("first-messages", "The first messages are slow", "info", numbers, (advice,))


def _transfers(evidence: Evidence) -> tuple[dict[tuple[int, int], float], float]:
    """Time of the first transfer of each (source, destination), and the median of the others, in seconds."""
    spans, partner = evidence.trace.spans, evidence.analysis.program.messages.partner
    index = np.flatnonzero((spans["kind"] == Kind.RECV) & (partner != MISSING))
    ready = np.maximum(spans["post_ns"][index], spans["post_ns"][partner[index]])
    time_s = np.maximum(spans["end_ns"][index] - ready, 0) / 1e9
    pairs = np.stack([spans["peer"][index], spans["rank"][index]])
    order = np.lexsort((spans["post_ns"][index], pairs[1], pairs[0]))
    pairs, time_s = pairs[:, order], time_s[order]
    new = np.append(True, (np.diff(pairs, axis=1) != 0).any(axis=0)) if len(order) else np.zeros(0, bool)
    first = {(int(a), int(b)): float(time) for a, b, time in zip(*pairs[:, new], time_s[new], strict=True)}
    return first, float(np.median(time_s[~new])) if (~new).any() else 0.0
