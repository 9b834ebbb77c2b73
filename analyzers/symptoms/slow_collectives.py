"""Collectives hold the step up: gradients and parameters, not the pipeline's messages.

What it finds: Communication is the largest loss, and most of it would go if collectives alone were free.

Why it matters: The reduction of gradients over data-parallel replicas (and the gathering of sharded parameters) stands
at a step's end, where nothing is left to compute beside it. The pipeline's own messages are fast enough: to lay out
the ranks anew for them can put the collectives onto slower links.

What to try: Let the reduction overlap with the backwards of the last microbatches, in larger buckets or smaller types;
more microbatches a step, so that it comes less often. Collectives inside the ops are tensor parallelism's: less of it,
or inside one machine.

Source: Megatron-LM's, DeepSpeed's and PyTorch's manuals on --overlap-grad-reduce, overlap_comm and DDP's buckets;
NVIDIA/Megatron-LM#1468, NVIDIA/Megatron-LM#636.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.program import COMPUTE
from ppdiag.analyzers.replay import World
from ppdiag.analyzers.symptoms import in_words_of, is_verdict, severity
from ppdiag.diagnosis import Advice, Cause, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="--overlap-grad-reduce, and --overlap-param-gather with --use-distributed-optimizer; "
    "--grad-reduce-in-bf16 where the loss allows it",
    torch="DistributedDataParallel or fully_shard around each stage, which reduce beside the last backwards; a larger "
    "bucket_cap_mb",
    deepspeed="overlap_comm: true and a larger reduce_bucket_size in DeepSpeed's configuration",
    other="a reduction that starts with the last microbatch's backward, layer by layer",
)
MOSTLY = 0.5
INSIDE = "Keep tensor parallelism inside a machine, or take less of it and a longer pipeline"
HOW_INSIDE = (
    "collectives inside forwards and backwards are tensor or context parallelism's: TP no larger than the GPUs that "
    "NVLink joins; ppdiag plan compares layouts"
)
MEASURE_AFTER = "collective wait of the stage table, and the tail of the step"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where communication is the verdict, and collectives are the larger part of it."""
    if not is_verdict(evidence, Cause.COMMUNICATION) or not are_collectives(evidence):
        return None
    gain = evidence.gain(lambda graph: free(graph, collectives=True))
    inside = _share_inside_ops(evidence)
    advice = Advice(
        action=INSIDE if inside > MOSTLY else "Let collectives overlap with the backwards",
        how=HOW_INSIDE if inside > MOSTLY else evidence.says(HOW),
        gain_fraction=gain.fraction,
        source="replay of the run with free collectives: an upper bound",
        measure_after=MEASURE_AFTER,
    )
    share, phases = evidence.diagnosis.why.communication, evidence.diagnosis.phases
    numbers = (
        f"communication {percent(share)} of the step; without collectives it would be {percent(gain.fraction)} shorter",
        (
            f"ranks stand in collectives for {percent(evidence.diagnosis.where.collective)} of the step, most of it in "
            f"{_largest_group(evidence)}; the tail takes {phases.tail_s * 1e3:.1f} ms"
        ),
        f"{percent(inside)} of the collectives' time lies inside forwards and backwards",
    )
    return Symptom("slow-collectives", "Collectives hold the step up", severity(share), numbers, (advice,))


def are_collectives(evidence: Evidence) -> bool:
    """Whether free collectives would gain more than free messages of the pipeline."""
    of_collectives = evidence.gain(lambda graph: free(graph, collectives=True)).fraction
    of_messages = evidence.gain(lambda graph: free(graph, collectives=False)).fraction
    return of_collectives > of_messages


def free(graph: Graph, *, collectives: bool) -> World:
    """Free collectives, or free messages."""
    of_group = np.array([link.dst is None for link in graph.links], bool)
    return World(transfer_L=np.where(of_group == collectives, 0.0, 1.0))


def _share_inside_ops(evidence: Evidence) -> float:
    """Share of the collectives' time for which ranks wait inside an op: between two parts of one forward, say."""
    inside_s = total_s = 0.0
    for graph in evidence.analysis.graphs:
        of_group = np.array([link.dst is None for link in graph.links], bool)
        edges = np.flatnonzero((graph.link_E >= 0) & of_group[graph.link_E])
        waits = graph.joins_J[graph.dst_E[edges]]
        took_E = np.maximum(graph.transfer_EK[edges], 0.0).sum(axis=1)
        compute = np.flatnonzero(graph.what_N == COMPUTE)
        after = np.minimum(np.searchsorted(compute, waits), len(compute) - 1)
        ops = graph.span_NK[compute, 0]
        inside_s += float(took_E[(after > 0) & (ops[after] == ops[after - 1])].sum())
        total_s += float(took_E.sum())
    return inside_s / total_s if total_s > 0 else 0.0


def _largest_group(evidence: Evidence) -> str:
    """Name of the process group whose collectives take most time."""
    time_s: dict[int, float] = defaultdict(float)
    for graph in evidence.analysis.graphs:
        took_E = np.maximum(graph.transfer_EK, 0.0).sum(axis=1)
        for number, link in enumerate(graph.links):
            if link.dst is None:
                time_s[link.src] += float(took_E[graph.link_E == number].sum())
    return f"process group {evidence.trace.groups[max(time_s, key=lambda group: time_s[group])].name!r}"
