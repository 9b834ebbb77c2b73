"""Low utilisation, gaps uneven: one stage computes longer than the others.

What it finds: Unequal work is the largest loss: a stage that takes longer than the others, microbatches of unequal
cost, or one slow rank among those that do the same work.

Why it matters: The slowest stage sets the pace of the whole pipeline; more microbatches or another schedule do not
help. A stage 30 % over the others comes before any other tuning.

What to try: Move layers off the slow stage by measured time, not by number of layers: embedding, loss head and
mixture-of-experts layers cost what they cost. For unequal microbatches, balance them by their cost.

Source: the rule of thumb of 30 % is from practice; Lin et al., Understanding Stragglers in Large Model Training (2025),
for stage and sequence-length imbalance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of, is_verdict, severity
from ppdiag.analyzers.what_if import Change, predict, run_of
from ppdiag.diagnosis import Advice, Cause, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers, or "
    "--pipeline-model-parallel-layout",
    torch="other layers for each PipelineStage (or other split points in pipeline(split_spec=...))",
    deepspeed="partition_method of PipelineModule: 'parameters' or 'type:REGEX' (layers of a class) are balanced",
    other="the layers of each stage, where your script splits the model",
)
MEASURE_AFTER = "compute time of each stage (the bar chart): within 10 % of each other"
MEASURE = {
    "stage": MEASURE_AFTER,
    "microbatch": "imbalance between microbatches",
    "rank": "compute time of the ranks that hold one stage: within 10 % of each other",
}


def find(evidence: Evidence) -> Symptom | None:
    """Fires where imbalance is the verdict."""
    if not is_verdict(evidence, Cause.IMBALANCE):
        return None
    share = evidence.diagnosis.why.imbalance
    return Symptom(
        id="imbalance",
        title="Low utilisation, gaps uneven",
        severity=severity(share),
        evidence=tuple(_numbers(evidence)),
        advice=(_advice(evidence),),
    )


def _numbers(evidence: Evidence) -> list[str]:
    split = evidence.diagnosis.imbalance
    parts = (
        f"between stages {percent(split.stage)}, between microbatches {percent(split.microbatch)}, "
        f"between ranks of one stage {percent(split.rank)}"
    )
    rows = [f"imbalance {percent(evidence.diagnosis.why.imbalance)} of the step: {parts}"]
    stages = evidence.diagnosis.stages
    busy = [stage.busy_fraction for stage in stages]
    slowest = max(stages, key=lambda stage: stage.forward_s + stage.backward_s + stage.weight_s)
    rows.append(
        f"stage {slowest.stage}: F {slowest.forward_s * 1e3:.1f} ms, B {slowest.backward_s * 1e3:.1f} ms, "
        f"busy {percent(slowest.busy_fraction)}; "
        f"all stages busy {percent(min(busy))} to {percent(max(busy))}"
    )
    return rows


def _advice(evidence: Evidence) -> Advice:
    split = evidence.diagnosis.imbalance
    if split.microbatch > max(split.stage, split.rank):
        even = "microbatch"
        action, how = "Give microbatches equal cost", "pack or sort samples by the sum of their squared lengths"
    elif split.rank > split.stage:
        even = "rank"
        action, how = (
            "Look at the slow ranks' machines",
            "clocks, throttling and other processes on the slow rank's host",
        )
    else:
        even = "stage"
        verdict = evidence.diagnosis.verdict
        places = {"stage": verdict.stage, "rank": verdict.rank}
        named = next((f"{kind} {number}" for kind, number in places.items() if number is not None), "the slow stages")
        action = f"Move layers off {named}, by measured time"
        how = evidence.says(HOW)
    found = predict(run_of(evidence.analysis), Change(even=even))
    return Advice(
        action=action,
        how=how,
        gain_fraction=max(0.0, found.gain),
        gain_range=found.gain_range,
        source=f"replay of the run with {found.change.words}, which layers and samples can only come near to",
        measure_after=MEASURE[even],
    )
