"""Microbatches of unequal cost on every stage alike: sequences of different lengths.

What it finds: Imbalance between microbatches is the verdict, and the microbatches that are slow on one stage are slow
on the others too: it is the data, not the machines.

Why it matters: The cost of attention grows with the square of a sequence's length. Packs with equal numbers of tokens,
but of one long or many short sequences, differ by several times; the pipeline waits for the longest of each step.

What to try: Balance the packs of a step by the sum of their squared lengths.

Source: NVIDIA/Megatron-LM PR#2282, verl PR#2452; Lin et al., Understanding Stragglers in Large Model Training (2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.symptoms import in_words_of, is_verdict, severity
from ppdiag.diagnosis import Advice, Cause, Symptom, percent
from ppdiag.model import Kind

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

ALIKE = 0.8
"""Correlation of the forwards' times of two stages from which on their microbatches are slow together."""
LEAST_MICROBATCHES = 8
HOW = in_words_of(
    megatron="sort or pack the samples of a global batch by the sum of their squared lengths; verl: use_dynamic_bsz",
    other="sort or pack the samples of a global batch by the sum of their squared lengths",
)
MEASURE_AFTER = "imbalance between microbatches"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where imbalance between microbatches is the verdict and the same ones are slow on all stages."""
    split = evidence.diagnosis.imbalance
    if not is_verdict(evidence, Cause.IMBALANCE) or split.microbatch <= max(split.stage, split.rank):
        return None
    time_SM = _forwards(evidence)
    alike = _least_correlation(time_SM)
    if alike < ALIKE:
        return None
    ratio_M = (time_SM / time_SM.mean(axis=1, keepdims=True)).mean(axis=0)
    gain = evidence.gain_of_evening_out("microbatch")
    advice = Advice(
        action="Give the microbatches of a step equal cost",
        how=evidence.says(HOW),
        gain_fraction=gain.fraction,
        gain_range=gain.over_steps,
        source="replay of the run with all microbatches alike, which samples can only come near to",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        f"imbalance between microbatches {percent(split.microbatch)} of the step",
        (
            f"forwards take {ratio_M.min():.2f} to {ratio_M.max():.2f} times their stage's mean; "
            f"correlation between stages at least {alike:.2f}"
        ),
    )
    title = "Microbatches of unequal cost"
    return Symptom("sequence-lengths", title, severity(split.microbatch), numbers, (advice,), replaces="imbalance")


def _forwards(evidence: Evidence) -> np.ndarray:
    """Times of the forwards of the first pipeline's stages (S), each microbatch of each step in one column (M)."""
    spans, steps = evidence.trace.spans, evidence.analysis.steps
    chosen = (spans["kind"] == Kind.FORWARD) & np.isin(steps.number, steps.kept)
    chosen &= np.isin(spans["rank"], evidence.shape.pipelines[0])
    forwards, number = spans[chosen], steps.number[chosen]
    order = np.lexsort((forwards["microbatch"], number, forwards["stage"]))
    time = (forwards["end_ns"] - forwards["start_ns"])[order].astype(np.float64)
    counts = np.unique(forwards["stage"], return_counts=True)[1]
    return time.reshape(len(counts), -1) if len(set(counts.tolist())) == 1 else np.zeros((0, 0))


def _least_correlation(time_SM: np.ndarray) -> float:
    """The least correlation between two stages; 0 where there are too few microbatches, or one that does not vary."""
    if time_SM.shape[0] < 2 or time_SM.shape[1] < LEAST_MICROBATCHES or (time_SM.std(axis=1) == 0).any():
        return 0.0
    return float(np.corrcoef(time_SM).min())
