"""Low utilisation, gaps even over ranks: the pipeline bubble.

What it finds: The schedule itself leaves the ranks idle while the pipeline fills and drains, and that is the largest
loss of the step.

Why it matters: With P ranks and M microbatches GPipe and 1F1B stand idle for (P-1)/(M+P-1) of the pipeline's time,
interleaved 1F1B with V stages a rank for (P-1)/(V M+P-1).

What to try: More microbatches where memory has room; else another schedule: interleaved where the network is fast
(communication below 20 % of the step), or one that splits the backward (zero bubble).

Source: Huang et al., GPipe (2019); Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters
(2021); Qi et al., Zero Bubble Pipeline Parallelism (2024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ppdiag.analyzers.symptoms import ANY, DEEPSPEED, TORCH, in_words_of, is_verdict, severity
from ppdiag.analyzers.what_if import Change, predict, run_of
from ppdiag.diagnosis import Advice, Cause, Symptom, percent
from ppdiag.errors import BadShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ppdiag.analyzers.symptoms import Evidence

FAST_NETWORK = 0.20
"""Interleaving multiplies the messages by V: below this share of communication that is likely to pay."""
HOW = in_words_of(
    torch="n_microbatches of the schedule's constructor (with a batch as much larger), ScheduleInterleaved1F1B, or "
    "ScheduleZBVZeroBubble",
    deepspeed="gradient_accumulation_steps in DeepSpeed's configuration (train_batch_size grows with it)",
    megatron="--global-batch-size, or --num-virtual-stages-per-pipeline-rank",
    other="more microbatches a step, or more stages a rank",
)
MEASURE_AFTER = "time of a microbatch, peak memory of the first stage, and that communication stays below 20 %"


class Option(NamedTuple):
    """A change that shrinks the bubble.

    Attributes:
        action: what to do.
        change: the same as the replay takes it.
        how: in the words of each framework; empty for one that has it not.
        measure_after: what to look at.
        many_messages: only for a fast network.
    """

    action: str
    change: Change
    how: dict[str, str]
    measure_after: str
    many_messages: bool = False


def find(evidence: Evidence) -> Symptom | None:
    """Fires where the bubble is the verdict."""
    if not is_verdict(evidence, Cause.BUBBLE):
        return None
    share = evidence.diagnosis.why.bubble
    job, phases = evidence.diagnosis.job, evidence.diagnosis.phases
    step_s = phases.pipeline_s + phases.tail_s + phases.between_s
    return Symptom(
        id="bubble",
        title="Low utilisation, gaps even over ranks",
        severity=severity(share),
        evidence=(
            f"bubble {percent(share)} of the step, {percent(share * step_s / phases.pipeline_s)} of its pipeline phase",
            f"schedule {job.schedule_name} with P={job.pp}, V={job.vpp}, M={job.microbatches}",
        ),
        advice=tuple(_advice(evidence)),
    )


def _advice(evidence: Evidence) -> Iterator[Advice]:
    """What a replay of the run says that it gains; what gains nothing, or cannot be, is not advised."""
    run = run_of(evidence.analysis)
    slow = evidence.diagnosis.why.communication >= FAST_NETWORK
    for option in _options(evidence):
        how = option.how.get(evidence.framework, option.how.get(ANY, ""))
        if not how or (option.many_messages and slow):
            continue
        try:
            found = predict(run, option.change)
        except BadShape:
            continue
        if found.gain > 0:
            yield Advice(
                action=option.action,
                how=how,
                gain_fraction=found.gain,
                gain_range=found.gain_range,
                source="replay of the run with the change, for the same samples; ppdiag whatif tries others",
                measure_after=option.measure_after,
            )


def _options(evidence: Evidence) -> list[Option]:
    job = evidence.diagnosis.job
    doubled = 2 * job.microbatches
    found = [
        Option(
            action=f"Run {doubled} microbatches a step instead of {job.microbatches}, if memory has room",
            change=Change(microbatches=doubled),
            how=in_words_of(
                torch=f"n_microbatches={doubled} in the schedule's constructor (with a batch as much larger)",
                deepspeed=f"gradient_accumulation_steps: {doubled} in DeepSpeed's configuration "
                "(train_batch_size grows with it)",
                megatron=f"--global-batch-size of {doubled} x micro batch x DP",
                other=f"microbatches a step: {doubled}",
            ),
            measure_after="time a microbatch, and peak memory of the first stage",
        )
    ]
    if job.vpp > 1:
        return found
    return [
        *found,
        Option(
            action="Interleave two stages a rank",
            change=Change(schedule="interleaved", chunks=2),
            how={
                **in_words_of(
                    torch="ScheduleInterleaved1F1B with 2 PipelineStages a rank",
                    megatron="--num-virtual-stages-per-pipeline-rank 2",
                    other="stages a rank: 2",
                ),
                DEEPSPEED: "",
            },
            measure_after="step time, and that communication stays below 20 %",
            many_messages=True,
        ),
        Option(
            action="Split the backward, two stages a rank in a V (zero bubble)",
            change=Change(schedule="zb-v"),
            how={TORCH: "ScheduleZBVZeroBubble with PipelineStages r and 2P-1-r on rank r"},
            measure_after="step time, and peak memory of every stage",
            many_messages=True,
        ),
    ]
