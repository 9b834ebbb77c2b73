"""How long the parts of a step take, and a closed form of the whole for the first sieve.

Shape letters as in :mod:`ppdiag.analyzers.planning.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppdiag.analyzers.planning.layout import PLANNED, Job, Layouts, holds_ends, rank_layers, telling_ranks

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
        transfer_C: one message between stages.
        data_RC: gradient reduction and weight gathering of a step that no compute hides.
        optimizer_RC: the optimizer's step.
    """

    forward_RC: np.ndarray
    backward_RC: np.ndarray
    tensor_RC: np.ndarray
    transfer_C: np.ndarray
    data_RC: np.ndarray
    optimizer_RC: np.ndarray


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one microbatch (C each), tensor-parallel sums included.

    Attributes:
        forward_C, backward_C: of one layer; the backward computes the layer again where the layout says so.
        weight_C: what of that backward is the weight gradient.
        head_C: forward of the output projection; its backward takes twice as long.
        sum_C: one tensor-parallel sum.
    """

    forward_C: np.ndarray
    backward_C: np.ndarray
    weight_C: np.ndarray
    head_C: np.ndarray
    sum_C: np.ndarray


def work(job: Job, layouts: Layouts) -> Work:
    """How long a layer and the head take."""
    speed_C = job.cluster.device.flops_per_s * job.efficiency * layouts.tensor_C
    layer_C = job.model.layer_forward_flops * layouts.micro_C / speed_C
    sum_C = _all_reduce_s(job, layouts)
    forward_C = layer_C + 2 * sum_C
    return Work(
        forward_C=forward_C,
        backward_C=2 * layer_C + 2 * sum_C + layouts.recompute_C * forward_C,
        weight_C=layer_C,
        head_C=job.model.head_forward_flops * layouts.micro_C / speed_C,
        sum_C=sum_C,
    )


def costs(job: Job, layouts: Layouts, position_RC: np.ndarray) -> Costs:
    """The parts of a step on each rank."""
    model, part = job.model, work(job, layouts)
    layers_RC = rank_layers(job, layouts, position_RC)
    first_RC, last_RC = holds_ends(layouts, position_RC)
    forward_RC = layers_RC * part.forward_C + last_RC * part.head_C
    backward_RC = layers_RC * part.backward_C + 2 * last_RC * part.head_C
    parameters_RC = layers_RC * float(model.layer_parameters) / layouts.tensor_C
    parameters_RC += (first_RC * model.embedding_parameters + last_RC * model.head_parameters) / layouts.tensor_C
    reduce_RC = parameters_RC * _bytes_of_reduction(layouts) / _data_bandwidth(job, layouts)
    share_C = np.where(layouts.zero1_C, layouts.data_C, 1)
    return Costs(
        forward_RC=forward_RC,
        backward_RC=backward_RC,
        tensor_RC=layers_RC * (4 + 2 * layouts.recompute_C) * part.sum_C,
        transfer_C=_transfer_s(job, layouts),
        data_RC=np.maximum(0.0, reduce_RC - forward_RC - backward_RC),
        optimizer_RC=parameters_RC / share_C * OPTIMIZER_BYTES / job.cluster.device.memory_bytes_per_s,
    )


def inside_nodes(job: Job, layouts: Layouts) -> np.ndarray:
    """Whether a whole pipeline lies in one node: then its messages take NVLink, and data parallelism the network."""
    return layouts.tensor_C * layouts.pipeline_C <= job.cluster.gpus_per_node


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


def _transfer_s(job: Job, layouts: Layouts) -> np.ndarray:
    """One activation between stages; each tensor-parallel rank sends its part."""
    cluster = job.cluster
    inside_C = inside_nodes(job, layouts)
    bandwidth_C = np.where(inside_C, cluster.device.nvlink_bytes_per_s, cluster.network_bytes_per_s)
    size_C = job.model.boundary_bytes * layouts.micro_C / layouts.tensor_C
    return size_C / bandwidth_C + np.where(inside_C, 0.0, cluster.network.latency_s)


def _bytes_of_reduction(layouts: Layouts) -> np.ndarray:
    """Bytes that each rank sends for one parameter.

    fp32 gradients are all-reduced, or with ZeRO-1 reduce-scattered and bf16 weights gathered.
    """
    ring_C = (layouts.data_C - 1) / layouts.data_C
    return ring_C * np.where(layouts.zero1_C, 4 + 2, 2 * 4)


def _data_bandwidth(job: Job, layouts: Layouts) -> np.ndarray:
    """NVLink where the data-parallel ranks of a stage lie in one node, else the network."""
    cluster = job.cluster
    apart_C = layouts.tensor_C * np.where(inside_nodes(job, layouts), layouts.pipeline_C, 1) * layouts.data_C
    return np.where(apart_C <= cluster.gpus_per_node, cluster.device.nvlink_bytes_per_s, cluster.network_bytes_per_s)
