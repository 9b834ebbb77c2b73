"""What a rank's memory holds at its peak: weights and their state, activations, logits.

Shape letters as in :mod:`ppdiag.analyzers.planning.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.planning.formulas import SHARED_STATE_BYTES, STATE_BYTES, Answer, Quantity
from ppdiag.analyzers.planning.layout import (
    Job,
    Layouts,
    holds_ends,
    kept_stages,
    rank_layers,
    rank_parameters,
    telling_ranks,
)
from ppdiag.analyzers.planning.models import VALUE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.analyzers.planning.models import Model

LOGIT_BYTES = 6
"""Of one logit: bf16 as the head gives it, fp32 for the loss (its gradient takes the same place)."""
TORCH_LOGIT_BYTES = 14
"""The same with torch's cross entropy: bf16, then in fp32 itself, its log-softmax and its gradient."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of each rank at its peak (R x C each).

    Attributes:
        state_RC: weights, gradients, optimizer.
        activations_RC: kept for the backwards to come.
        working_RC: of the one op that runs: a layer that is computed again, the logits on the last stage.
    """

    state_RC: np.ndarray
    activations_RC: np.ndarray
    working_RC: np.ndarray

    @property
    def total_RC(self) -> np.ndarray:
        """All of it."""
        return self.state_RC + self.activations_RC + self.working_RC


def peak(job: Job, layouts: Layouts, position_RC: np.ndarray, *, fsdp: bool = False) -> Memory:
    """The peak of each rank.

    Args:
        job: the job.
        layouts: the candidates.
        position_RC: positions along the pipeline.
        fsdp: as torchtitan runs a pipeline, instead of Megatron: see :func:`_sharded_state` and
            :func:`_torch_buffers`.
    """
    model, tensor_C = job.model, layouts.tensor_C
    layers_RC = rank_layers(job, layouts, position_RC)
    _, last_RC = holds_ends(layouts, position_RC)
    shared_RC, experts_RC = rank_parameters(job, layouts, position_RC)
    state = _sharded_state if fsdp else _state
    state_RC = shared_RC * state(job, layouts, layouts.data_C)
    state_RC += experts_RC * state(job, layouts, layouts.data_C / layouts.expert_C)
    whole = model.layer_activation_bytes(flash=job.flash)
    per_layer_C = np.where(layouts.recompute_C, float(model.boundary_bytes), whole) * layouts.micro_C / tensor_C
    # The layer whose backward runs: its tensors where they are computed again, as much for their gradients, and its
    # input gathered from the tensor-parallel ranks (sequence parallelism).
    layer_C = (1 + layouts.recompute_C) * whole * layouts.micro_C / tensor_C
    layer_C += np.where(tensor_C > 1, float(model.boundary_bytes), 0.0) * layouts.micro_C
    logits_C = model.seq * layouts.micro_C * model.vocab * float(LOGIT_BYTES) / tensor_C
    kept_RC = kept_stages(job, layouts, position_RC) * layers_RC / layouts.chunks_C
    working_RC = np.maximum(layer_C, last_RC * logits_C)
    if fsdp:
        working_RC = working_RC + _torch_buffers(job, layouts, last_RC)
    return Memory(state_RC, kept_RC * per_layer_C, working_RC)


def _state(job: Job, layouts: Layouts, copies_C: np.ndarray) -> np.ndarray:  # noqa: ARG001  (as the other)
    """Bytes of a parameter that so many ranks hold a copy of."""
    return STATE_BYTES - layouts.zero1_C * SHARED_STATE_BYTES * (1 - 1 / copies_C)


def _sharded_state(job: Job, layouts: Layouts, copies_C: np.ndarray) -> np.ndarray:
    """Bytes of a parameter under FSDP within a pipeline.

    fp32 weight, gradient and two moments are divided over DP. The bf16 weight stays gathered, and the fp32 gradient
    whole until its stage's last backward has reduced it. Up to P microbatches, a rank ends all backwards of one of its
    stages before it begins those of the next, so that the gradients of one stage at a time are whole.
    """
    whole_C = np.where(layouts.microbatches_C(job) <= layouts.pipeline_C, 1 / layouts.chunks_C, 1.0)
    return 16 / copies_C + VALUE_BYTES + 4 * whole_C


def _torch_buffers(job: Job, layouts: Layouts, last_RC: np.ndarray) -> np.ndarray:
    """What torch.distributed.pipelining and FSDP hold beside: bytes of each rank.

    Buffers for the inputs and the gradients of all microbatches of each stage, made once and kept; all outputs of the
    last stage; two layers' fp32 gradients in reduction. Source: torch 2.13, ``pipelining/stage.py``.
    """
    model, tensor_C = job.model, layouts.tensor_C
    rows_C = layouts.microbatches_C(job) * layouts.micro_C * float(model.seq * VALUE_BYTES) / tensor_C
    buffers_RC = rows_C * (2 * layouts.chunks_C * model.hidden + last_RC * model.vocab)
    return buffers_RC + 2 * 4.0 * model.layer_parameters / tensor_C


def sharded_bytes(model: Model, *, ranks: int, micro_batch: int, tensor: int = 1, flash: bool = True) -> float:
    """Peak of a rank under ZeRO-3 or FSDP without a pipeline, every layer computed again.

    16 bytes of each parameter (fp32 weight, gradient and two moments) are divided over the ranks; two layers are whole
    at a time in bf16, one of them with its gradient. With tensor parallelism layers and activations are divided too,
    and two gathered inputs stay while a layer runs. Source: Rajbhandari et al. 2020 (ZeRO), section 5.3.
    """
    gathered = 3 * VALUE_BYTES * max(model.layer_parameters, model.vocab * model.hidden)
    kept = model.layers * model.boundary_bytes + 2 * model.layer_activation_bytes(flash=flash)
    logits = model.seq * model.vocab * TORCH_LOGIT_BYTES
    whole = 2 * model.boundary_bytes * (tensor > 1)
    return 16.0 * model.parameters / ranks + (gathered + micro_batch * (kept + logits)) / tensor + micro_batch * whole


def answer(job: Job, layout: Layouts, *, fsdp: bool = False, notes: Sequence[str] = ()) -> Answer:
    """The peak of the first, the second and the last rank of one layout, part by part."""
    parts = peak(job, layout, telling_ranks(layout), fsdp=fsdp)
    ranks = int(layout.pipeline_C[0])
    names = ["first rank"] + ["second rank"] * (ranks > 2) + ["last rank"] * (ranks > 1)
    rows = [0, 1, 2] if ranks > 2 else [0, 2][:ranks]
    quantities = []
    for name, row in zip(names, rows, strict=True):
        for label, values_RC in (
            ("weights, gradients, optimizer", parts.state_RC),
            ("activations kept", parts.activations_RC),
            ("work in progress", parts.working_RC),
            ("together", parts.total_RC),
        ):
            quantities.append(Quantity(f"{name}: {label}", float(values_RC[row, 0]), "bytes"))
    return Answer(
        f"memory of {job.model.parameters / 1e9:.1f} B parameters, TP={int(layout.tensor_C[0])} PP={ranks} "
        f"DP={int(layout.data_C[0])} V={int(layout.chunks_C[0])} M={int(layout.microbatches_C(job)[0])}",
        tuple(quantities),
        ("(16/DP + 2 + 4 while whole) N / TP" if fsdp else "18 N / TP (ZeRO-1: 6 + 12/DP)")
        + " + kept stages x layers / V x bytes of a layer + larger of layer and logits"
        + " + torch's buffers" * fsdp,
        "State by what lies on the rank; activations by how many forwards the schedule runs ahead of their backwards "
        "there; in progress are the layer whose backward runs, or on the last stage the logits.",
        "Korthikanti et al. 2022, equations 2 to 5; "
        + ("torch 2.13, pipelining/stage.py" if fsdp else "Megatron-LM, documentation of the distributed optimizer"),
        tuple(notes),
    )
