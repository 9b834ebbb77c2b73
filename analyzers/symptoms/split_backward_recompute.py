"""A split backward with activation recomputation: slower than no zero bubble at all.

What it finds: A schedule that splits the weight gradient off (zero bubble, DualPipeV), in a job whose arguments
recompute activations, or whose B and W together take 3.5 forwards or more on all stages between the ends (about two
without recomputation).

Why it matters: The recomputed activations are needed twice, by the input's gradient and by the weights', and are kept
or computed again for both. In the thread below the interleaved zero-bubble schedule made 13 tokens a second where
interleaved 1F1B made 128; without recomputation it was the faster of the two (339 to 304).

What to try: No recomputation with a split backward, or 1F1B with it.

Source: pytorch/torchtitan#773.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    torch="torchtitan: activation_checkpoint.mode = 'none'; or ScheduleInterleaved1F1B",
    other="no checkpointing of modules, or a schedule whose backward is whole",
)
MEASURE_AFTER = "step time, and peak memory of each stage"

FORWARDS = 3.5
"""So many forwards do B and W take at least, where both compute a forward again (4), and not where one does (3)."""


def find(evidence: Evidence) -> Symptom | None:
    """Fires where W is an op of its own, and arguments or times say that activations are recomputed."""
    said = _recomputes(evidence) or _times_say_so(evidence)
    stages = [stage for stage in evidence.diagnosis.stages if stage.weight_s > 0]
    if not said or not stages:
        return None
    slowest = max(stages, key=lambda stage: stage.backward_s + stage.weight_s)
    advice = Advice(
        action="Switch recomputation off, or take a schedule with a whole backward",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="pytorch/torchtitan#773",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        f"schedule {evidence.diagnosis.job.schedule_name}, and {said}",
        (
            f"stage {slowest.stage}: F {slowest.forward_s * 1e3:.1f} ms, B {slowest.backward_s * 1e3:.1f} ms, "
            f"W {slowest.weight_s * 1e3:.1f} ms"
        ),
    )
    return Symptom("split-backward-recompute", "A split backward that recomputes", "warning", numbers, (advice,))


def _recomputes(evidence: Evidence) -> str:
    options = evidence.options
    for name, harmless in (("activation-checkpoint.mode", ("none", "")), ("recompute-granularity", ("",))):
        if options.get(name, "") not in harmless:
            return f"--{name} {options[name]} among the arguments"
    return ""


def _times_say_so(evidence: Evidence) -> str:
    """The same by the times of the stages between the ends: these have no embedding and no loss."""
    middle = [stage for stage in evidence.diagnosis.stages[1:-1] if stage.weight_s > 0 and stage.forward_s > 0]
    forwards = [(stage.backward_s + stage.weight_s) / stage.forward_s for stage in middle]
    return f"B and W take {min(forwards):.1f} forwards or more" if forwards and min(forwards) >= FORWARDS else ""
