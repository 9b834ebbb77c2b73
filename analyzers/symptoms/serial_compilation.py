"""The stages compile one after the other: the first microbatch drags through the pipeline.

What it finds: First forwards that took ten times as long as later ones on several stages, and a good part of the
recorded time.

Why it matters: A stage compiles its kernels when its first input arrives, and that is when the stage before it has
done so: the times add up along the pipeline. In the thread below the first step took twenty minutes longer.

What to try: Let every stage run once on made-up input before the first step, all at the same time.

Source: radixark/miles PR#1830.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import WORTH_SAYING, Advice, Symptom, percent
from ppdiag.model import Kind

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

TIMES_AS_LONG = 10.0
LEAST_S = 1.0
LEAST_STAGES = 2
HOW = in_words_of(
    torch="stage.submod on torch.empty of its input's shape, forward and backward, before schedule.step",
    other="one forward and backward of each stage on made-up input of the right shape, before the first step",
)
MEASURE_AFTER = "length of the first step"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where first forwards on two stages or more took that long, and 5 % of the recorded time together."""
    late_s = {
        stage: first - usual
        for stage, (first, usual) in _forwards(evidence).items()
        if first >= max(LEAST_S, TIMES_AS_LONG * usual)
    }
    spans = evidence.trace.spans
    recorded_s = float(spans["end_ns"].max() - spans["start_ns"].min()) / 1e9
    share = sum(late_s.values()) / recorded_s
    if len(late_s) < LEAST_STAGES or share < WORTH_SAYING:
        return None
    longest = max(late_s, key=lambda stage: late_s[stage])
    advice = Advice(
        action="Warm up all stages at the same time, before the first step",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="first and later forwards of the record",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        (
            f"first forwards of {len(late_s)} stages took {sum(late_s.values()):.1f} s longer than later ones, "
            f"one after the other; {late_s[longest]:.1f} s of it on stage {longest}"
        ),
        f"{percent(share)} of the recorded time, once; together the stages would need {late_s[longest]:.1f} s",
    )
    return Symptom("serial-compilation", "The stages compile one after the other", "info", numbers, (advice,))


def _forwards(evidence: Evidence) -> dict[int, tuple[float, float]]:
    """The first and the median forward of each stage of the first pipeline, in seconds; those of a set-up count."""
    spans = evidence.trace.spans
    chosen = (spans["kind"] == Kind.FORWARD) & np.isin(spans["rank"], evidence.shape.pipelines[0])
    forwards = spans[chosen & (spans["stage"] >= 0)]
    forwards = forwards[np.argsort(forwards["start_ns"])]
    time_s = (forwards["end_ns"] - forwards["start_ns"]) / 1e9
    own = {int(stage): time_s[forwards["stage"] == stage] for stage in np.unique(forwards["stage"])}
    return {stage: (float(times[0]), float(np.median(times))) for stage, times in own.items()}
