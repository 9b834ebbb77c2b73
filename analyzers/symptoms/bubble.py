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

from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import MEGATRON, is_verdict, severity
from ppdiag.diagnosis import Advice, Cause, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

FAST_NETWORK = 0.20
"""Interleaving multiplies the messages by V: below this share of communication that is likely to pay."""
MORE_MICROBATCHES = {
    "torch.distributed.pipelining": "n_microbatches={m} in the schedule's constructor (with a batch as much larger)",
    "deepspeed": "gradient_accumulation_steps: {m} in DeepSpeed's configuration (train_batch_size grows with it)",
    **dict.fromkeys(MEGATRON, "--global-batch-size of {m} x micro batch x DP"),
}
INTERLEAVE = {
    "torch.distributed.pipelining": "ScheduleInterleaved1F1B with {v} PipelineStages a rank",
    **dict.fromkeys(MEGATRON, "--num-virtual-stages-per-pipeline-rank {v}"),
}
WITHOUT_INTERLEAVING = ("deepspeed",)
"""Frameworks that have no such schedule."""


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
        advice=tuple(_advice(evidence, share)),
    )


def _advice(evidence: Evidence, share: float) -> list[Advice]:
    """Gains by the bubble's own proportion: its time does not grow with M, and shrinks by V."""
    job = evidence.diagnosis.job
    doubled = 2 * job.microbatches
    found = [
        Advice(
            action=f"Run {doubled} microbatches a step instead of {job.microbatches}, if memory has room",
            how=_how(MORE_MICROBATCHES, evidence, m=doubled),
            gain_fraction=share / 2,
            source="bubble time does not grow with M: a step of twice the microbatches holds one bubble, not two",
            measure_after="time a microbatch, and peak memory of the first stage",
        )
    ]
    can_interleave = job.vpp == 1 and evidence.framework not in WITHOUT_INTERLEAVING
    if can_interleave and evidence.diagnosis.why.communication < FAST_NETWORK:
        found.append(
            Advice(
                action="Interleave two stages a rank",
                how=_how(INTERLEAVE, evidence, v=2),
                gain_fraction=share / 2,
                source="interleaving divides the bubble by V; Narayanan et al. 2021",
                measure_after="step time, and that communication stays below 20 %",
            )
        )
    return found


def _how(words: dict[str, str], evidence: Evidence, **values: int) -> str:
    """The change in the user's own framework's words; in plain ones where it is hand-written."""
    plain = "microbatches a step: {m}" if "m" in values else "stages a rank: {v}"
    return words.get(evidence.framework, plain).format(**values)
