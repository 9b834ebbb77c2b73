"""What makes a layout impossible, rule by rule: for the search as masks, for one layout in words.

Shape letters as in :mod:`ppdiag.analyzers.planning.layout`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppdiag.analyzers.planning import memory
from ppdiag.analyzers.planning.layout import LOOPED, PLANNED, V_SHAPED, Job, Layouts, telling_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 1 << 30


class Rule(NamedTuple):
    """One rule.

    Attributes:
        name: in a word or two.
        broken: mask of the candidates that break it.
        words: why the first candidate breaks it, with the numbers.
    """

    name: str
    broken: Callable[[Job, Layouts], np.ndarray]
    words: Callable[[Job, Layouts], str]


def usable_bytes(job: Job) -> int:
    """Memory of a GPU that tensors may take."""
    return job.cluster.device.memory_bytes - job.reserve_bytes


def broken_rules(job: Job, layout: Layouts) -> list[tuple[str, str]]:
    """All rules that the one layout breaks, as (name, words)."""
    return [(rule.name, rule.words(job, layout)) for rule in RULES if rule.broken(job, layout)[0]]


def allowed(job: Job, layouts: Layouts) -> Layouts:
    """The candidates that break no rule; memory is asked last, and only of those that are left."""
    for rule in RULES:
        layouts = layouts.take(~rule.broken(job, layouts))
    return layouts


def _one(values: np.ndarray) -> int:
    return int(values[0])


def _world_words(job: Job, layouts: Layouts) -> str:
    sizes = [_one(values) for values in (layouts.tensor_C, layouts.pipeline_C, layouts.data_C)]
    product = sizes[0] * sizes[1] * sizes[2]
    return f"TP x PP x DP = {sizes[0]} x {sizes[1]} x {sizes[2]} = {product}, but there are {job.cluster.gpus} GPUs"


def _heads_words(job: Job, layouts: Layouts) -> str:
    return f"{job.model.heads} attention heads cannot be divided over TP = {_one(layouts.tensor_C)}"


def _groups_broken(job: Job, layouts: Layouts) -> np.ndarray:
    groups = job.model.kv_heads
    return (groups % layouts.tensor_C != 0) & (layouts.tensor_C % groups != 0)


def _groups_words(job: Job, layouts: Layouts) -> str:
    return f"{job.model.kv_heads} key/value heads and TP = {_one(layouts.tensor_C)}: neither divides the other"


def _width_broken(job: Job, layouts: Layouts) -> np.ndarray:
    return (job.model.ffn % layouts.tensor_C != 0) | (job.model.seq % layouts.tensor_C != 0)


def _width_words(job: Job, layouts: Layouts) -> str:
    tensor = _one(layouts.tensor_C)
    return f"TP = {tensor} must divide the MLP's width {job.model.ffn} and the sequence {job.model.seq}"


def _node_words(job: Job, layouts: Layouts) -> str:
    per_node, tensor = job.cluster.gpus_per_node, _one(layouts.tensor_C)
    if tensor > per_node:
        return f"TP = {tensor} is larger than a node of {per_node} GPUs: every layer's sums would cross the network"
    return f"TP = {tensor} does not divide a node of {per_node} GPUs: some groups would lie across two nodes"


def _layers_broken(job: Job, layouts: Layouts) -> np.ndarray:
    stages_C = layouts.pipeline_C * layouts.chunks_C
    uneven_C = (job.model.layers % stages_C != 0) & ((job.model.layers + 2) % stages_C != 0)
    return (job.model.layers < stages_C) | (uneven_C & (not job.any_split))


def _layers_words(job: Job, layouts: Layouts) -> str:
    layers, pipeline, chunks = job.model.layers, _one(layouts.pipeline_C), _one(layouts.chunks_C)
    stages = f"PP x V = {pipeline} x {chunks} = {pipeline * chunks} stages"
    return f"{layers} layers cannot be divided over {stages}, nor {layers} + 2 with embedding and head as a layer each"


def _experts_broken(job: Job, layouts: Layouts) -> np.ndarray:
    spread_C = layouts.expert_C
    return (max(1, job.model.experts) % spread_C != 0) | (layouts.data_C % spread_C != 0)


def _experts_words(job: Job, layouts: Layouts) -> str:
    spread, data = _one(layouts.expert_C), _one(layouts.data_C)
    if not job.model.experts:
        return f"EP = {spread}, but the model has no experts"
    return f"EP = {spread} must divide the {job.model.experts} experts of a layer and DP = {data}"


def _batch_words(job: Job, layouts: Layouts) -> str:
    micro, data = _one(layouts.micro_C), _one(layouts.data_C)
    return (
        f"a global batch of {job.global_batch} is no multiple of micro batch x DP = {micro} x {data} = {micro * data}: "
        f"M would be {job.global_batch / (micro * data):.2f}"
    )


def _schedule_broken(job: Job, layouts: Layouts) -> np.ndarray:
    every_C, ranks_C, chunks_C = layouts.microbatches_C(job), layouts.pipeline_C, layouts.chunks_C
    looped_C = layouts.schedule_C == LOOPED
    v_shaped_C = np.isin(layouts.schedule_C, V_SHAPED)
    chunks_wrong_C = np.where(looped_C, chunks_C < 2, chunks_C != np.where(v_shaped_C, 2, 1))
    few_C = (looped_C & (every_C % ranks_C != 0)) | (v_shaped_C & (every_C < 2 * ranks_C))
    return chunks_wrong_C | few_C | ((ranks_C == 1) & (layouts.schedule_C != PLANNED.index("1f1b")))


def _schedule_words(job: Job, layouts: Layouts) -> str:
    name, ranks, chunks = PLANNED[_one(layouts.schedule_C)], _one(layouts.pipeline_C), _one(layouts.chunks_C)
    every = _one(layouts.microbatches_C(job))
    needs = {
        "interleaved": "two stages a rank or more, more than one rank, and M a multiple of PP",
        "zb-v": "two stages a rank, more than one rank, and M of at least 2 PP",
        "dualpipe-v": "two stages a rank, more than one rank, and M of at least 2 PP",
    }
    return f"{name} needs {needs.get(name, 'one stage a rank')}; here PP = {ranks}, V = {chunks}, M = {every}"


def _memory_broken(job: Job, layouts: Layouts) -> np.ndarray:
    total_RC = memory.peak(job, layouts, telling_ranks(layouts)).total_RC
    return total_RC.max(axis=0) > usable_bytes(job)


def _memory_words(job: Job, layouts: Layouts) -> str:
    total_RC = memory.peak(job, layouts, telling_ranks(layouts)).total_RC
    room = usable_bytes(job) / GIB
    return f"the fullest rank needs {total_RC.max() / GIB:.1f} GiB, and tensors have {room:.1f} GiB of a GPU"


RULES = (
    Rule(
        "world size",
        lambda job, layouts: layouts.tensor_C * layouts.pipeline_C * layouts.data_C != job.cluster.gpus,
        _world_words,
    ),
    Rule("heads", lambda job, layouts: job.model.heads % layouts.tensor_C != 0, _heads_words),
    Rule("key/value heads", _groups_broken, _groups_words),
    Rule("width", _width_broken, _width_words),
    Rule("node", lambda job, layouts: job.cluster.gpus_per_node % layouts.tensor_C != 0, _node_words),
    Rule("layers", _layers_broken, _layers_words),
    Rule("experts", _experts_broken, _experts_words),
    Rule(
        "batch",
        lambda job, layouts: job.global_batch % (layouts.micro_C * layouts.data_C) != 0,
        _batch_words,
    ),
    Rule("schedule", _schedule_broken, _schedule_words),
    Rule("memory", _memory_broken, _memory_words),
)
"""In the order in which to look at them: what must divide, then where it lies, then whether it fits."""
