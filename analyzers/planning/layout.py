"""Candidate layouts, many at once, and what each rank of them holds.

Shape letters: C candidates, R ranks along the pipeline. A function over ``position_RC`` takes any ranks: all of one
plan, or the three that decide of many (:func:`telling_ranks`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ppdiag.analyzers.planning.hardware import Cluster
    from ppdiag.analyzers.planning.models import Model

PLANNED = ("1f1b", "interleaved", "gpipe", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
"""Schedules that a plan may have; ``schedule_C`` is an index in it."""
LOOPED = PLANNED.index("interleaved")
V_SHAPED = (PLANNED.index("zb-v"), PLANNED.index("dualpipe-v"))


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained, and on what.

    Attributes:
        model: the model.
        cluster: the GPUs.
        global_batch: sequences of a step.
        efficiency: share of the device's peak that its kernels reach while they run.
        reserve_bytes: memory of a GPU that is not for tensors: CUDA context, NCCL buffers, fragments.
        flash: attention keeps no score matrices.
        any_split: stages may differ by a layer anywhere, not only at the ends.
    """

    model: Model
    cluster: Cluster
    global_batch: int
    efficiency: float = 0.6
    reserve_bytes: int = 4 << 30
    flash: bool = True
    any_split: bool = False


@dataclass(frozen=True, slots=True)
class Layouts:
    """Candidates, one an element of each array.

    Attributes:
        tensor_C, pipeline_C, data_C: sizes of the three parallel dimensions.
        chunks_C: stages a rank, V.
        micro_C: sequences of a microbatch.
        schedule_C: index in ``PLANNED``.
        expert_C: data-parallel ranks over which the experts of a layer are spread; 1 without experts.
        recompute_C: every layer is computed again in its backward; only its input is kept.
        zero1_C: optimizer state divided over the data-parallel ranks.
    """

    tensor_C: np.ndarray
    pipeline_C: np.ndarray
    data_C: np.ndarray
    chunks_C: np.ndarray
    micro_C: np.ndarray
    schedule_C: np.ndarray
    expert_C: np.ndarray
    recompute_C: np.ndarray
    zero1_C: np.ndarray

    def __len__(self) -> int:
        return len(self.tensor_C)

    def take(self, index: np.ndarray) -> Layouts:
        """Some of the candidates, by index or mask."""
        return replace(self, **{name: getattr(self, name)[index] for name in self.__slots__})

    def microbatches_C(self, job: Job) -> np.ndarray:
        """M, rounded down where it does not divide."""
        return np.maximum(1, job.global_batch // np.maximum(1, self.micro_C * self.data_C))


def telling_ranks(layouts: Layouts) -> np.ndarray:
    """Positions of the first, the second and the last rank (3 x C).

    Between the second and the last all ranks have as many layers and fewer activations, so nothing peaks there.
    """
    last_C = layouts.pipeline_C - 1
    return np.stack([0 * last_C, np.minimum(1, last_C), last_C])


def stage_layers(job: Job, layouts: Layouts) -> tuple[np.ndarray, np.ndarray]:
    """Layers of an inner stage, and how many fewer the first and the last one have (0 or 1).

    As :func:`ppdiag.analyzers.planning.orders.layers_of_stages`; where layers are left over, the larger count.
    """
    stages_C = layouts.pipeline_C * layouts.chunks_C
    even_C = (job.model.layers % stages_C == 0) | (stages_C == 1)
    inner_C = np.where(even_C, job.model.layers // stages_C, -(-(job.model.layers + 2) // stages_C))
    return inner_C, np.where(even_C, 0, 1)


def holds_ends(layouts: Layouts, position_RC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each rank holds the first stage, and whether it holds the last."""
    first_RC = position_RC == 0
    v_shaped_C = np.isin(layouts.schedule_C, V_SHAPED)
    return first_RC, np.where(v_shaped_C, first_RC, position_RC == layouts.pipeline_C - 1)


def rank_layers(job: Job, layouts: Layouts, position_RC: np.ndarray) -> np.ndarray:
    """Layers of each rank, over all its stages."""
    inner_C, fewer_C = stage_layers(job, layouts)
    first_RC, last_RC = holds_ends(layouts, position_RC)
    return layouts.chunks_C * inner_C - fewer_C * (first_RC.astype(int) + last_RC)


def rank_parameters(job: Job, layouts: Layouts, position_RC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parameters of each rank: those that all data-parallel ranks have, and its experts' (R x C each)."""
    model, tensor_C = job.model, layouts.tensor_C
    layers_RC = rank_layers(job, layouts, position_RC)
    first_RC, last_RC = holds_ends(layouts, position_RC)
    shared_RC = layers_RC * float(model.layer_parameters - model.expert_parameters)
    shared_RC += first_RC * model.embedding_parameters + last_RC * model.head_parameters
    # One stage that holds both ends shares a tied weight instead of copying it.
    shared_RC -= (first_RC & last_RC) * model.vocab * model.hidden * model.tied
    return shared_RC / tensor_C, layers_RC * float(model.expert_parameters) / (tensor_C * layouts.expert_C)


def kept_stages(job: Job, layouts: Layouts, position_RC: np.ndarray) -> np.ndarray:
    """Activations that each rank keeps at most, in stages of one microbatch.

    Of schedules that split off W, until W: as long as ZB-H1 delays it, every rank keeps as much as the first.
    Source: the orders themselves (tested); Narayanan et al. 2021, section 2.2; Qi et al. 2024, sections 2 and 6.
    """
    ranks_C, chunks_C, every_C = layouts.pipeline_C, layouts.chunks_C, layouts.microbatches_C(job)
    after_RC = ranks_C - 1 - position_RC
    looped_RC = (chunks_C - 1) * ranks_C + 2 * after_RC + 1
    by_name = {
        "gpipe": every_C + 0 * after_RC,
        "1f1b": after_RC + 1,
        "interleaved": looped_RC,
        "zb-h1": ranks_C + 0 * after_RC,
        "zb-h2": 2 * ranks_C - 1 + 0 * after_RC,
        "zb-v": 2 * ranks_C + 0 * after_RC,
        "dualpipe-v": 2 * ranks_C + 1 + 0 * after_RC,
    }
    kept_RC = np.choose(layouts.schedule_C, [by_name[name] for name in PLANNED])
    return np.minimum(kept_RC, every_C * chunks_C)
