"""Receives that nobody waited for: only one of several works is waited on.

What it finds: Receives of activations or gradients for which no wait was seen, in a tenth or more of a rank's
receives.

Why it matters: A forward that begins before its input has arrived computes with what was in the buffer. Versions of
torch before 2.8 waited for the last of a batch only; over gloo that gave wrong losses, and hangs.

What to try: Wait for every work that a batch returns.

Source: pytorch/pytorch#132644, pytorch/pytorch PR#152938.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom, percent
from ppdiag.model import NONE, Flag, Kind

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

LEAST_SHARE = 0.1
WAITS_FOR_ALL = (2, 8)
"""The first version of torch whose pipelines do."""
HOW = in_words_of(
    torch="torch 2.8 or later",
    other="for work in dist.batch_isend_irecv(ops): work.wait()",
)
MEASURE_AFTER = "the loss against a run without a pipeline"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where a rank shows no wait for a tenth of its receives; not where a new torch is trusted to wait."""
    rows = _unwaited(evidence)
    if not rows or (evidence.framework == "torch.distributed.pipelining" and evidence.torch_version >= WAITS_FOR_ALL):
        return None
    advice = Advice(
        action="Wait for every receive before its op",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="waits in the record; a wait by polling or through a future would not be seen",
        measure_after=MEASURE_AFTER,
    )
    version = ".".join(map(str, evidence.torch_version)) or "unknown"
    return Symptom(
        "receives-not-waited-for",
        "Receives that nobody waited for",
        "warning",
        (*rows[:8], f"torch {version}"),
        (advice,),
    )


def _unwaited(evidence: Evidence) -> list[str]:
    spans, steps = evidence.trace.spans, evidence.analysis.steps
    received = (spans["kind"] == Kind.RECV) & (spans["stage"] != NONE) & np.isin(steps.number, steps.kept)
    missing = received & ((spans["flags"] & np.uint16(Flag.NEVER_WAITED)) != 0)
    ranks = steps.ranks.tolist()
    of = np.bincount(spans["rank"][received], minlength=ranks[-1] + 1)
    count = np.bincount(spans["rank"][missing], minlength=ranks[-1] + 1)
    return [
        f"rank {rank}: no wait for {count[rank]} of {of[rank]} receives ({percent(count[rank] / of[rank])})"
        for rank in ranks
        if of[rank] and count[rank] >= max(1, LEAST_SHARE * of[rank])
    ]
