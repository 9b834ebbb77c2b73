"""How long the parts of a step take, and a closed form of the whole for the first sieve.

Shape letters as in :mod:`ppdiag.analyzers.planning.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppdiag.analyzers.planning.layout import (
    PLANNED,
    Job,
    Layouts,
    holds_ends,
    rank_layers,
    rank_parameters,
    telling_ranks,
)

OPTIMIZER_BYTES = 30
"""Read and written for one parameter by a step of Adam: fp32 gradient, master copy, two moments; bf16 weight."""
FILL = {
    "gpipe": 1.0,
    "1f1b": 1.0,
    "interleaved": 1.0,
    "zb-h1": 1 / 3,
    "zb-h2": 1 / 3,
    "zb-v": 1 / 3,
    "dualpipe-v": 1 / 3,
}
"""What of a stage's forward and backward the ranks wait while the pipeline fills and drains, F = B = W."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds (R x C, or C).

    Attributes:
        forward_RC, backward_RC: of one microbatch through all stages of a rank; tensor-parallel sums included.
        tensor_RC: those sums, forward and backward.
        expert_RC: tokens sent to their experts and back, forward and backward; part of both as well.
        transfer_C: one message between stages.
        data_RC: gradient reduction and weight gathering of a step that no compute hides.
        data_bytes_RC: what each rank sends for both.
        optimizer_RC: the optimizer's step.
    """

    forward_RC: np.ndarray
    backward_RC: np.ndarray
    tensor_RC: np.ndarray
    expert_RC: np.ndarray
    transfer_C: np.ndarray
    data_RC: np.ndarray
    data_bytes_RC: np.ndarray
    optimizer_RC: np.ndarray


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one microbatch (C each), tensor-parallel sums included.

    Attributes:
        forward_C, backward_C: of one layer; the backward computes the layer again where the layout says so.
        weight_C: what of that backward is the weight gradient.
        head_C: forward of the output projection; its backward takes twice as long.
        sums_C: the tensor-parallel sums of one pass through a layer, of the attention and of the MLP.
        exchange_C: its tokens to their experts and back.
    """

    forward_C: np.ndarray
    backward_C: np.ndarray
    weight_C: np.ndarray
    head_C: np.ndarray
    sums_C: np.ndarray
    exchange_C: np.ndarray


def work(job: Job, layouts: Layouts) -> Work:
    """How long a layer and the head take."""
    speed_C = job.cluster.device.flops_per_s * job.efficiency * layouts.tensor_C
    layer_C = job.model.layer_forward_flops * layouts.micro_C / speed_C
    sums_C = sums_of_a_pass(job, layouts) * _all_reduce_s(job, layouts)
    exchange_C = _exchange_s(job, layouts)
    forward_C = layer_C + sums_C + exchange_C
    return Work(
        forward_C=forward_C,
        backward_C=2 * layer_C + sums_C + exchange_C + layouts.recompute_C * forward_C,
        weight_C=layer_C,
        head_C=job.model.head_forward_flops * layouts.micro_C / speed_C,
        sums_C=sums_C,
        exchange_C=exchange_C,
    )


def costs(job: Job, layouts: Layouts, position_RC: np.ndarray) -> Costs:
    """The parts of a step on each rank."""
    part = work(job, layouts)
    layers_RC = rank_layers(job, layouts, position_RC)
    _, last_RC = holds_ends(layouts, position_RC)
    forward_RC = layers_RC * part.forward_C + last_RC * part.head_C
    backward_RC = layers_RC * part.backward_C + 2 * last_RC * part.head_C
    shared_RC, experts_RC = rank_parameters(job, layouts, position_RC)
    copies_C = layouts.data_C / layouts.expert_C
    sent_RC = shared_RC * _bytes_of_reduction(layouts, layouts.data_C)
    sent_RC = sent_RC + experts_RC * _bytes_of_reduction(layouts, copies_C)
    reduce_RC = sent_RC / _data_bandwidth(job, layouts)
    own_RC = shared_RC / np.where(layouts.zero1_C, layouts.data_C, 1)
    own_RC = own_RC + experts_RC / np.where(layouts.zero1_C, copies_C, 1)
    passes_C = 2 + layouts.recompute_C
    return Costs(
        forward_RC=forward_RC,
        backward_RC=backward_RC,
        tensor_RC=layers_RC * passes_C * part.sums_C,
        expert_RC=layers_RC * passes_C * part.exchange_C,
        transfer_C=_transfer_s(job, layouts),
        data_RC=np.maximum(0.0, reduce_RC - forward_RC - backward_RC),
        data_bytes_RC=sent_RC,
        optimizer_RC=own_RC * OPTIMIZER_BYTES / job.cluster.device.memory_bytes_per_s,
    )


def inside_nodes(job: Job, layouts: Layouts) -> np.ndarray:
    """Whether a whole pipeline lies in one node: then its messages take NVLink, and data parallelism the network."""
    return layouts.tensor_C * layouts.pipeline_C <= job.cluster.gpus_per_node


def sums_of_a_pass(job: Job, layouts: Layouts) -> np.ndarray:
    """Activations that a pass through a layer sums over TP: the attention's and the MLP's.

    A rank whose tokens came from other ranks has as many copies of each as a token has experts.
    """
    return 1.0 + np.where(layouts.expert_C > 1, job.model.experts_per_token, 1)


def estimate(job: Job, layouts: Layouts) -> np.ndarray:
    """Step time of each candidate by a closed form: M times the slowest rank, and once the others to fill and drain.

    Exact for equal stages and free transfers (GPipe, 1F1B, interleaved); the plans that come out first are replayed.
    """
    parts = costs(job, layouts, telling_ranks(layouts))
    every_C, ranks_C = layouts.microbatches_C(job), layouts.pipeline_C
    work_RC = parts.forward_RC + parts.backward_RC
    slowest_C = work_RC.max(axis=0)
    all_C = np.where(ranks_C == 1, work_RC[0], work_RC[0] + work_RC[2] + np.maximum(0, ranks_C - 2) * work_RC[1])
    fill_C = np.array([FILL[name] for name in PLANNED])[layouts.schedule_C] / layouts.chunks_C
    waits_C = np.where(layouts.chunks_C > 1, ranks_C - 1, every_C + ranks_C - 1) * (ranks_C > 1)
    pipeline_C = every_C * slowest_C + (all_C - slowest_C) * fill_C + 2 * waits_C * parts.transfer_C
    return pipeline_C + (parts.data_RC + parts.optimizer_RC).max(axis=0)


def _all_reduce_s(job: Job, layouts: Layouts) -> np.ndarray:
    """One sum of an activation over the tensor-parallel ranks: a ring sends 2 (t-1)/t of it."""
    cluster, tensor_C = job.cluster, layouts.tensor_C
    fits_C = tensor_C <= cluster.gpus_per_node
    bandwidth_C = np.where(fits_C, cluster.device.nvlink_bytes_per_s, cluster.network_bytes_per_s)
    return job.model.boundary_bytes * layouts.micro_C * 2.0 * (tensor_C - 1) / tensor_C / bandwidth_C


def _exchange_s(job: Job, layouts: Layouts) -> np.ndarray:
    """Tokens to their experts and back: two all-to-alls, of which each rank keeps its own part.

    Experts are spread over neighbouring data-parallel ranks, so the part within the node takes NVLink.
    """
    cluster, experts_C = job.cluster, layouts.expert_C
    inside_C = np.minimum(experts_C, np.maximum(1, cluster.gpus_per_node // layouts.tensor_C))
    size_C = job.model.boundary_bytes * layouts.micro_C * float(job.model.experts_per_token) / layouts.tensor_C
    near_C = (inside_C - 1) / experts_C / cluster.device.nvlink_bytes_per_s
    return 2 * size_C * (near_C + (experts_C - inside_C) / experts_C / cluster.network_bytes_per_s)


def _transfer_s(job: Job, layouts: Layouts) -> np.ndarray:
    """One activation between stages; each tensor-parallel rank sends its part."""
    cluster = job.cluster
    inside_C = inside_nodes(job, layouts)
    bandwidth_C = np.where(inside_C, cluster.device.nvlink_bytes_per_s, cluster.network_bytes_per_s)
    size_C = job.model.boundary_bytes * layouts.micro_C / layouts.tensor_C
    return size_C / bandwidth_C + np.where(inside_C, 0.0, cluster.network.latency_s)


def _bytes_of_reduction(layouts: Layouts, copies_C: np.ndarray) -> np.ndarray:
    """Bytes that each rank sends for one parameter of which so many ranks have a copy.

    fp32 gradients are all-reduced, or with ZeRO-1 reduce-scattered and bf16 weights gathered.
    """
    ring_C = (copies_C - 1) / copies_C
    return ring_C * np.where(layouts.zero1_C, 4 + 2, 2 * 4)


def _data_bandwidth(job: Job, layouts: Layouts) -> np.ndarray:
    """NVLink where the data-parallel ranks of a stage lie in one node, else the network."""
    cluster = job.cluster
    apart_C = layouts.tensor_C * np.where(inside_nodes(job, layouts), layouts.pipeline_C, 1) * layouts.data_C
    return np.where(apart_C <= cluster.gpus_per_node, cluster.device.nvlink_bytes_per_s, cluster.network_bytes_per_s)
