"""Known patterns of slow pipeline jobs, one file each; a module's docstring is what a user reads about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppdiag.diagnosis import CRITICAL, WORTH_A_WARNING
from ppdiag.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ppdiag.analyzers.shape import Shape
    from ppdiag.diagnosis import Cause, Diagnosis, Symptom
    from ppdiag.trace import Trace

SYMPTOMS = Registry(
    "ppdiag.symptoms",
    {
        "bubble": "ppdiag.analyzers.symptoms.bubble:find",
        "imbalance": "ppdiag.analyzers.symptoms.imbalance:find",
        "slow-network": "ppdiag.analyzers.symptoms.slow_network:find",
        "tcp-fallback": "ppdiag.analyzers.symptoms.tcp_fallback:find",
        "activation-spike": "ppdiag.analyzers.symptoms.activation_spike:find",
        "stuck-in-recv": "ppdiag.analyzers.symptoms.stuck_in_recv:find",
        "host-stall": "ppdiag.analyzers.symptoms.host_stall:find",
    },
)

MEGATRON = ("megatron", "megatron-core")
"""The framework as recordings of others call it, and as its adapter does."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a symptom may look at.

    Attributes:
        diagnosis: all findings but the symptoms.
        trace: the labelled spans and the facts of the ranks.
        shape: the pipeline.
        gains: share of the step time that would go if the factor alone went (from the replay).
    """

    diagnosis: Diagnosis
    trace: Trace
    shape: Shape
    gains: Mapping[Cause, float]

    @property
    def framework(self) -> str:
        """The framework as recorded."""
        return self.diagnosis.job.framework


def find_symptoms(evidence: Evidence) -> tuple[Symptom, ...]:
    """The symptoms that a run shows, the most severe first."""
    found = [symptom for name in SYMPTOMS.names() if (symptom := SYMPTOMS.load(name)(evidence)) is not None]
    order = ("critical", "warning", "info")
    return tuple(sorted(found, key=lambda symptom: order.index(symptom.severity)))


def severity(share: float) -> str:
    """The band of a share of the step time."""
    return "critical" if share >= CRITICAL else "warning" if share >= WORTH_A_WARNING else "info"


def is_verdict(evidence: Evidence, cause: Cause) -> bool:
    """Whether the cause is the verdict, and not undecided: only then is a change advised."""
    verdict = evidence.diagnosis.verdict
    return verdict.cause == cause.value and verdict.confidence != "undecided"
