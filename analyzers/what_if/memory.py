"""What the ranks hold at most under a plan: activations of microbatches whose backward is still to come, and bytes.

Shape letter: R ranks along the pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.analyzers.schedules import peak_activations
from ppdiag.analyzers.validation import whole_or_none
from ppdiag.analyzers.what_if.measured_layers import known_layers
from ppdiag.model import Kind, Payload

if TYPE_CHECKING:
    from ppdiag.analyzers.what_if.change import Change
    from ppdiag.analyzers.what_if.layout import Plan
    from ppdiag.analyzers.what_if.run import Run

GIB = 1 << 30


class Held(NamedTuple):
    """What each rank along the pipeline holds at most.

    Attributes:
        activations_R: in activations of one measured microbatch through all layers of the rank.
        bytes_R: all of the device's memory; None where the record does not tell.
    """

    activations_R: tuple[float, ...]
    bytes_R: tuple[float, ...] | None

    def refusal(self, limit_bytes: float) -> str | None:
        """Why it does not fit into this much memory a rank, or None."""
        if self.bytes_R is None or max(self.bytes_R) <= limit_bytes:
            return None
        rank = int(np.argmax(self.bytes_R))
        most, limit = self.bytes_R[rank] / GIB, limit_bytes / GIB
        return f"rank {rank} of the pipeline would hold {most:.1f} GiB, and {limit:.1f} GiB are allowed"


def device_bytes(run: Run) -> int | None:
    """The memory of the smallest device, where the record tells."""
    told = (whole_or_none(facts.facts, "device_memory_bytes") for facts in run.trace.ranks.values())
    return min((size for size in told if size is not None), default=None)


def held(run: Run, plan: Plan, now: Plan, change: Change) -> Held:
    """What the ranks hold under a plan, with the measured plan and its measured peaks to start from.

    The bytes are the rank's measured peak, and what the activations that it holds at that peak grow or shrink by.
    With other layers all of it grows with their number.
    """
    activations = _activations(plan)
    if len(activations) != len(run.shape.pipelines[0]):
        return Held(activations, None)
    bytes_R = []
    for position, (new, old) in enumerate(zip(activations, _activations(now), strict=True)):
        found = [_bytes(run, rank, new, old, change) for rank in (p[position] for p in run.shape.pipelines)]
        if not found or None in found:
            return Held(activations, None)
        bytes_R.append(max(size for size in found if size is not None))
    return Held(activations, tuple(bytes_R))


def _activations(plan: Plan) -> tuple[float, ...]:
    chunks = len(plan.stage_rank) / len(plan.orders)
    return tuple(peak * plan.size / chunks for peak in peak_activations(plan.orders))


def _bytes(run: Run, rank: int, new: float, old: float, change: Change) -> float | None:
    facts = run.trace.ranks[rank].facts if rank in run.trace.ranks else {}
    peak, each = whole_or_none(facts, "peak_memory_bytes"), whole_or_none(facts, "activation_bytes")
    if peak is None:
        return None
    ratio = _layer_ratio(run, rank, change)
    if each is None:
        return peak * ratio if new == old and not change.checkpoint else None
    kept = new * each
    if change.checkpoint:  # only inputs are kept, and the activations of the stage whose backward runs
        stages = len(run.shape.stages[rank])
        kept = min(kept, new * stages * _message_bytes(run) + each / stages)
    return (peak - old * each + kept) * ratio


def _layer_ratio(run: Run, rank: int, change: Change) -> float:
    """How many times as many layers a rank gets."""
    if change.layers is None:
        return 1.0
    now = known_layers(run, total=sum(change.layers), given=change.layers_now).counts
    own = list(run.shape.stages[rank])
    before = sum(now[stage] for stage in own)
    return sum(change.layers[stage] for stage in own) / before if before else 1.0


def _message_bytes(run: Run) -> float:
    spans = run.trace.spans
    received = (spans["kind"] == Kind.RECV) & (spans["op"] != Payload.GRADIENT) & (spans["microbatch"] >= 0)
    return float(np.median(spans["size_bytes"][received])) if received.any() else 0.0
