"""DeepSpeed cut the model by parameters or by count, and one stage is heavy.

What it finds: Imbalance between stages is the verdict in a job of DeepSpeed.

Why it matters: Its partition balances numbers of parameters or layers, not time: an output layer has many parameters
and takes long, an embedding has as many and takes none; small models end with stages of 2, 2, 1 and 0 layers.

What to try: Balance what takes the time, or give the parts yourself.

Source: deepspeedai/DeepSpeed#2974, deepspeedai/DeepSpeed PR#4312.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import DEEPSPEED, in_words_of, is_verdict, severity
from ppdiag.analyzers.symptoms.imbalance import if_general
from ppdiag.diagnosis import Advice, Cause, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    deepspeed="PipelineModule(partition_method='type:NAME') with the class of the layers that take the time; or a "
    "subclass with its own _partition_layers, which sets the first and last layer of each stage",
    other="bounds of your own between the stages",
)
MEASURE_AFTER = "compute time of each stage: within 10 % of each other"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where imbalance is DeepSpeed's verdict, and lies between stages."""
    split = evidence.diagnosis.imbalance
    between_stages = split.stage >= max(split.microbatch, split.rank)
    if evidence.framework != DEEPSPEED or not is_verdict(evidence, Cause.IMBALANCE) or not between_stages:
        return None
    share = evidence.diagnosis.why.imbalance
    times = [
        f"stage {row.stage} {(row.forward_s + row.backward_s) * 1e3:.1f} ms" for row in evidence.diagnosis.stages[:16]
    ]
    gain = evidence.gain_of_evening_out("stage")
    advice = Advice(
        action="Cut the model by measured time",
        how=evidence.says(HOW),
        gain_fraction=gain.fraction,
        gain_range=gain.over_steps,
        source="replay of the run with all stages alike, which layers can only come near to",
        measure_after=MEASURE_AFTER,
    )
    numbers = (f"imbalance {percent(share)} of the step", f"F and B of a microbatch: {', '.join(times)}")
    return Symptom(
        "uneven-partition", "A partition that is not by time", severity(share), numbers, (advice,), if_general(evidence)
    )
