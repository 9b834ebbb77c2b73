"""Stuck around an evaluation: some ranks evaluate while others train.

What it finds: A job that stands still while the last ops of some ranks are an evaluation's and those of others a
training step's.

Why it matters: The messages of both look alike. A rank that begins its evaluation a step early or late takes its
neighbour's training message for its own, or waits for one that does not come.

What to try: Let all ranks decide by the same counter, and meet before and after each evaluation.

Source: deepspeedai/DeepSpeed PR#1944, microsoft/DeepSpeed#4708.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.stuck import find_hang
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom
from ppdiag.model import PIPELINE_KINDS, Flag
from ppdiag.trace import rank_slices

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    deepspeed="torch.distributed.barrier() before and after eval_batch, and data loaders of equal length on all stages",
    other="torch.distributed.barrier() before and after each evaluation; the same number of batches on all ranks",
)
MEASURE_AFTER = "that every rank reaches the next step"


def find(evidence: Evidence) -> Symptom | None:
    """Fires on a hang in which the ranks' last ops are of different modes."""
    if find_hang(evidence.trace.ranks, evidence.diagnosis.steps.median_s) is None:
        return None
    evaluating = _last_op_evaluates(evidence)
    groups = {mode: [rank for rank, own in evaluating.items() if own is mode] for mode in (True, False)}
    if not (groups[True] and groups[False]):
        return None
    numbers = (
        f"the last op of ranks {_listed(groups[True])} was an evaluation's",
        f"the last op of ranks {_listed(groups[False])} was a training step's",
    )
    advice = Advice(
        action="Let all ranks enter and leave an evaluation together",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="deepspeedai/DeepSpeed PR#1944",
        measure_after=MEASURE_AFTER,
    )
    return Symptom("evaluation-out-of-step", "Stuck around an evaluation", "critical", numbers, (advice,))


def _last_op_evaluates(evidence: Evidence) -> dict[int, bool]:
    spans = evidence.trace.spans
    work = spans[np.isin(spans["kind"], PIPELINE_KINDS)]
    flagged = (work["flags"] & np.uint16(Flag.EVALUATION)) != 0
    return {rank: bool(flagged[own][-1]) for rank, own in rank_slices(work["rank"]).items()}


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
