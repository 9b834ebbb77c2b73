"""Low utilisation, gaps uneven: one stage computes longer than the others.

What it finds: Unequal work is the largest loss: a stage that takes longer than the others, microbatches of unequal
cost, or one slow rank among those that do the same work.

Why it matters: The slowest stage sets the pace of the whole pipeline; more microbatches or another schedule do not
help. A stage 30 % over the others comes before any other tuning.

What to try: Move layers off the slow stage by measured time, not by number of layers: embedding, loss head and
mixture-of-experts layers cost what they cost. Where the run was recorded with --layer-times, the advice names the
best split. For unequal microbatches, balance them by their cost.

Source: the rule of thumb of 30 % is from practice; Lin et al., Understanding Stragglers in Large Model Training (2025),
for stage and sequence-length imbalance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.symptoms import in_words_of, is_verdict, severity
from ppdiag.analyzers.what_if import Change, memory, predict, run_of
from ppdiag.analyzers.what_if.measured_layers import measured_layers
from ppdiag.analyzers.what_if.survey import best_layers
from ppdiag.diagnosis import WORTH_SAYING, Advice, Cause, Symptom, percent
from ppdiag.errors import BadShape

if TYPE_CHECKING:
    from collections.abc import Sequence

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

STANDS_OUT = 1.3
"""A layer that takes so many times as long as the median is named; the rule of thumb for stages."""


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


def if_general(evidence: Evidence) -> str:
    """Name of this symptom where one of a heavy stage says all that it does; empty where it names a split of layers."""
    return "imbalance" if measured_layers(evidence.trace, evidence.shape) is None else ""


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
    return [*rows, *_slowest_layer(evidence)]


def _slowest_layer(evidence: Evidence) -> list[str]:
    """The layer that takes longest, where layers were recorded and it stands out; a stage of which all layers do."""
    measured = measured_layers(evidence.trace, evidence.shape)
    if measured is None:
        return []
    times_L, names = np.concatenate(measured.weights), [name for own in measured.names for name in own]
    slowest, usual = int(np.argmax(times_L)), float(np.median(times_L))
    if times_L[slowest] < STANDS_OUT * usual:
        return []
    for stage, own_L in enumerate(measured.weights):
        if len(own_L) > 1 and len(own_L) < len(times_L) / 2 and own_L.min() >= STANDS_OUT * usual:
            least = f"{own_L.min() / usual:.1f} times the median layer or more"
            return [f"all {len(own_L)} layers of stage {stage} take {least}: is its device slow, or are they heavier?"]
    took = f"{times_L[slowest] * 1e3:.1f} ms of each microbatch, {times_L[slowest] / usual:.1f} times the median layer"
    return [f"layer {slowest} ({names[slowest] or 'unnamed'}) takes {took}"]


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
    elif (split_advice := _split_advice(evidence)) is not None:
        return split_advice
    else:
        even = "stage"
        verdict = evidence.diagnosis.verdict
        places = {"stage": verdict.stage, "rank": verdict.rank}
        named = next((f"{kind} {number}" for kind, number in places.items() if number is not None), "the slow stages")
        action = f"Move layers off {named}, by measured time"
        how = f"{evidence.says(HOW)}; ppdiag run --layer-times names the split"
    found = predict(run_of(evidence.analysis), Change(even=even))
    return Advice(
        action=action,
        how=how,
        gain_fraction=max(0.0, found.gain),
        gain_range=found.gain_range,
        source=f"replay of the run with {found.change.words}, which layers and samples can only come near to",
        measure_after=MEASURE[even],
    )


def _split_advice(evidence: Evidence) -> Advice | None:
    """The best split of the layers, where the record has their times and the replay gains by it."""
    run = run_of(evidence.analysis)
    if measured_layers(run.trace, run.shape) is None:
        return None
    try:
        change = best_layers(run, limit_bytes=memory.device_bytes(run))
    except BadShape:  # no split fits into the memory
        return None
    found = predict(run, change)
    if found.gain < WORTH_SAYING:
        return None
    return Advice(
        action=f"Split the layers {_counts(change.layers)} instead of {_counts(change.layers_now)}",
        how=evidence.says(HOW),
        gain_fraction=found.gain,
        gain_range=found.gain_range,
        source="replay of the run with this split, by what was measured of each layer",
        measure_after=MEASURE_AFTER,
    )


def _counts(layers: Sequence[int] | None) -> str:
    return ",".join(map(str, layers or ()))
