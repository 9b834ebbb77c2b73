"""The single formulas of pipeline parallelism, each with its derivation and source.

Two bubble ratios exist and are never mixed: over the total time, and over the ideal time without bubble. Tutorials also
print a third, the rule of thumb; it is shown as such beside the exact value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

STATE_BYTES = 18
"""Bytes of one parameter and its state: bf16 weight 2, fp32 gradient 4, fp32 master copy 4 and two Adam moments 8.
Source: Megatron-LM, docs of the distributed optimizer ("theoretical memory usage")."""
SHARED_STATE_BYTES = 12
"""Of those, what ZeRO-1 divides over the data-parallel ranks: master copy and moments."""
ALL_REDUCES_OF_A_LAYER = 4
"""Tensor parallelism sums after attention and after MLP, forward and backward (Shoeybi et al. 2019, section 3)."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number of an answer.

    Attributes:
        name: what it is.
        value: the number.
        unit: ``fraction``, ``bytes``, ``s``, ``bytes/s``, or empty for a count.
    """

    name: str
    value: float
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a formula gives, and why it is so."""

    title: str
    quantities: tuple[Quantity, ...]
    formula: str
    derivation: str
    source: str
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """The answer as JSON-serialisable data."""
        return {
            "title": self.title,
            "quantities": [{"name": q.name, "value": q.value, "unit": q.unit} for q in self.quantities],
            "formula": self.formula,
            "derivation": self.derivation,
            "source": self.source,
            "notes": list(self.notes),
        }


def bubble_of_total(ranks: int, chunks: int, microbatches: int) -> float:
    """Bubble over total time of GPipe, 1F1B (V = 1) and interleaved 1F1B.

    >>> round(bubble_of_total(4, 1, 4), 4), round(bubble_of_total(8, 4, 64), 4)
    (0.4286, 0.0266)
    """
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def bubble_of_ideal(ranks: int, chunks: int, microbatches: int) -> float:
    """Bubble over the ideal time, the one without bubble.

    >>> bubble_of_ideal(4, 1, 4)
    0.75
    """
    return (ranks - 1) / (chunks * microbatches)


def bubble_rule_of_thumb(ranks: int, chunks: int, microbatches: int) -> float:
    """What tutorials give for interleaved 1F1B: the bubble of 1F1B divided by V. Too low where V > 1.

    >>> round(bubble_rule_of_thumb(8, 4, 64), 4)
    0.0246
    """
    return (ranks - 1) / (microbatches + ranks - 1) / chunks


def bubble(ranks: int, chunks: int, microbatches: int) -> Answer:
    """How much of a step the schedule leaves idle."""
    exact = bubble_of_total(ranks, chunks, microbatches)
    quantities = [
        Quantity("bubble / total", exact, "fraction"),
        Quantity("bubble / ideal", bubble_of_ideal(ranks, chunks, microbatches), "fraction"),
        Quantity("utilisation without microbatches (naive), 1/P", 1 / ranks, "fraction"),
    ]
    notes = []
    if chunks > 1:
        thumb = bubble_rule_of_thumb(ranks, chunks, microbatches)
        quantities.append(Quantity("rule of thumb, bubble of 1F1B / V", thumb, "fraction"))
        notes.append("The rule of thumb divides the bubble by V but not the total that the bubble is part of.")
        if microbatches % ranks:
            notes.append(f"Megatron interleaves only where P divides M; {ranks} does not divide {microbatches}.")
    if microbatches < 2 * ranks:
        notes.append(f"M should be 2 to 3 times P: {2 * ranks} to {3 * ranks} microbatches.")
    return Answer(
        f"bubble of {'1F1B and GPipe' if chunks == 1 else 'interleaved 1F1B'}, P={ranks} V={chunks} M={microbatches}",
        tuple(quantities),
        "bubble / total = (P-1) / (V M + P-1);  bubble / ideal = (P-1) / (V M)",
        "Count in the time t of one stage's forward and backward. Each rank works V M t. The last rank cannot start "
        "before the ranks before it have passed on the first microbatch, and the first cannot end before its last "
        "gradient has come back: together (P-1) t. So the step takes (V M + P-1) t, "
        "of which (P-1) t are idle on every rank.",
        "Huang et al. 2019 (GPipe), section 2.3; Narayanan et al. 2021 (Megatron-LM), sections 2.2.1 and 2.2.2",
        tuple(notes),
    )


def message(  # noqa: PLR0913  (the quantities of the formula)
    *, micro_batch: int, seq: int, hidden: int, value_bytes: int, tensor: int, bytes_per_s: float
) -> Answer:
    """Bytes of an activation at a stage boundary, and how long they travel."""
    size_bytes = micro_batch * seq * hidden * value_bytes
    per_rank = size_bytes / tensor
    quantities = [
        Quantity("activation of one microbatch", size_bytes, "bytes"),
        Quantity("in MiB (2^20 bytes)", size_bytes / 2**20),
        Quantity("one message", per_rank, "bytes"),
        Quantity("time of one message", per_rank / bytes_per_s, "s"),
        Quantity("at", bytes_per_s, "bytes/s"),
    ]
    return Answer(
        f"message of one microbatch ({micro_batch}, {seq}, {hidden})",
        tuple(quantities),
        "bytes = b s h (bytes a value) / TP;  time = bytes / bandwidth",
        "A stage passes on one vector of h values for each token. With sequence parallelism each tensor-parallel rank "
        "holds and sends its own part of them (TP > 1). The gradient on the way back is as large.",
        "Narayanan et al. 2021 (Megatron-LM), sections 3.2 and 4.1",
    )


def microbatches_for_bubble(ranks: int, chunks: int, limit: float) -> int:
    """The fewest microbatches with which bubble / total is at most ``limit``.

    >>> microbatches_for_bubble(8, 1, 0.10)
    63
    """
    exact = (ranks - 1) * (1 - limit) / (limit * chunks)
    return max(1, math.ceil(round(exact, 9)))


def microbatches(
    *, ranks: int, chunks: int, bubble_limit: float, budget_bytes: float | None, per_microbatch_bytes: float | None
) -> Answer:
    """How many microbatches: from below by the bubble, from above by the memory of each schedule."""
    needed = microbatches_for_bubble(ranks, chunks, bubble_limit)
    quantities = [
        Quantity(f"M for a bubble of {100 * bubble_limit:g} % of the total", needed),
        Quantity("bubble / total with that M", bubble_of_total(ranks, chunks, needed), "fraction"),
        Quantity("rule of thumb: 2 P", 2 * ranks),
        Quantity("rule of thumb: 3 P", 3 * ranks),
    ]
    notes: list[str] = []
    if budget_bytes is not None and per_microbatch_bytes is not None:
        kept = int(budget_bytes // per_microbatch_bytes)
        quantities.append(Quantity("microbatches whose activations fit", kept))
        quantities.append(Quantity("M that GPipe can have", kept))
        notes.append(
            f"1F1B keeps at most P = {ranks} activations whatever M is: "
            + ("it fits with any M." if kept >= ranks else f"only {kept} fit, so it does not fit.")
        )
        if kept and kept < needed:
            percent = 100 * bubble_of_total(ranks, 1, kept)
            notes.append(f"With GPipe and M = {kept} the bubble is {percent:.1f} % of the total.")
    return Answer(
        f"microbatches for P={ranks} V={chunks}",
        tuple(quantities),
        "M >= (P-1) (1-x) / (x V) for a bubble x of the total;  GPipe keeps M activations, 1F1B at most P",
        "Solve x = (P-1) / (V M + P-1) for M. GPipe runs all M forwards before the first backward; in 1F1B the first "
        "rank has run P forwards when the first gradient comes back, and from then on each backward frees what the "
        "next forward takes.",
        "Huang et al. 2019 (GPipe), section 2.3; Narayanan et al. 2021 (Megatron-LM), section 2.2.1",
        tuple(notes),
    )


def accumulation(*, gpus: int, tensor: int, pipeline: int, global_batch: int, micro_batch: int) -> Answer:
    """Data-parallel size and accumulation steps, which are the microbatches of a pipeline."""
    data, left_over = divmod(gpus, tensor * pipeline)
    notes = []
    quantities = [Quantity("DP = GPUs / (TP PP)", gpus / (tensor * pipeline) if left_over else data)]
    if left_over:
        notes.append(f"{gpus} GPUs are no multiple of TP x PP = {tensor * pipeline}: {left_over} would be left over.")
    steps = global_batch * tensor * pipeline / (micro_batch * gpus)
    quantities.append(Quantity("accumulation steps M = global batch / (micro batch x DP)", steps))
    if not left_over and global_batch % (micro_batch * data):
        below, above = (micro_batch * data * f(steps) for f in (math.floor, math.ceil))
        near = f"{below} or {above}" if below else str(above)
        notes.append(
            f"A global batch of {global_batch} is no multiple of micro batch x DP = {micro_batch * data}: M would be "
            f"{steps:.2f}. Frameworks refuse it; the nearest global batches that divide are {near}."
        )
    at_least = math.floor(steps)
    if pipeline > 1 and at_least:
        bubble_fraction = bubble_of_total(pipeline, 1, at_least)
        quantities.append(Quantity(f"bubble / total of 1F1B with M = {at_least}", bubble_fraction, "fraction"))
        quantities.append(Quantity("bubble / ideal", bubble_of_ideal(pipeline, 1, at_least), "fraction"))
    return Answer(
        f"accumulation on {gpus} GPUs with TP={tensor} PP={pipeline}",
        tuple(quantities),
        "global batch = micro batch x accumulation steps x DP;  DP = GPUs / (TP PP)",
        "TP x PP GPUs hold one copy of the model; the rest of the GPUs hold further copies. Each copy takes an equal "
        "share of the global batch, one microbatch at a time.",
        "Narayanan et al. 2021 (Megatron-LM), section 3.1",
        tuple(notes),
    )


def parameters(*, parameter_count: int, tensor: int, pipeline: int, data: int) -> Answer:
    """What a model's weights and their state take, whole and on one rank."""
    share = parameter_count / (tensor * pipeline)
    zero1 = share * (STATE_BYTES - SHARED_STATE_BYTES + SHARED_STATE_BYTES / data)
    return Answer(
        f"weights and state of {parameter_count / 1e9:.1f} B parameters, TP={tensor} PP={pipeline} DP={data}",
        (
            Quantity("parameters", parameter_count),
            Quantity("weights in 2 bytes", 2 * parameter_count, "bytes"),
            Quantity("weights, gradients and optimizer", STATE_BYTES * parameter_count, "bytes"),
            Quantity("share of one rank, 1 / (TP PP)", 1 / (tensor * pipeline), "fraction"),
            Quantity("state of one rank", STATE_BYTES * share, "bytes"),
            Quantity("with ZeRO-1 (distributed optimizer)", zero1, "bytes"),
        ),
        "bytes of one rank = 18 N / (TP PP), with ZeRO-1 (6 + 12 / DP) N / (TP PP)",
        "For each parameter: bf16 weight 2, fp32 gradient 4, fp32 master copy 4, two fp32 moments of Adam 8. Layers "
        "are divided over PP, each layer's matrices over TP; ZeRO-1 divides master copy and moments over DP. Embedding "
        "and head lie on the first and the last stage, so those hold more than the mean.",
        "Megatron-LM, documentation of the distributed optimizer; Rajbhandari et al. 2020 (ZeRO), section 3.1",
    )


def volume(  # noqa: PLR0913  (the quantities of the formula)
    *, layers: int, micro_batch: int, seq: int, hidden: int, tensor: int, pipeline: int
) -> Answer:
    """What tensor and pipeline parallelism send for one microbatch, on one rank."""
    activation = 2 * micro_batch * seq * hidden
    own = layers / pipeline
    ring = 2 * (tensor - 1) / tensor
    tensor_bytes = ALL_REDUCES_OF_A_LAYER * own * activation * ring
    pipeline_bytes = 2 * activation / tensor if pipeline > 1 else 0.0
    quantities = [
        Quantity("all-reduces of one layer, forward and backward", ALL_REDUCES_OF_A_LAYER),
        Quantity("tensor parallelism sends", tensor_bytes, "bytes"),
        Quantity("pipeline parallelism sends", pipeline_bytes, "bytes"),
    ]
    if pipeline_bytes and tensor_bytes:
        quantities.append(Quantity("ratio", tensor_bytes / pipeline_bytes))
    return Answer(
        f"bytes that one rank sends for one microbatch, TP={tensor} PP={pipeline}",
        tuple(quantities),
        "TP: 4 x (layers / PP) x 2 (TP-1)/TP x 2 b s h;  PP: 2 x 2 b s h / TP",
        "Each layer sums its partial results over the TP ranks after attention and after the MLP, forward and "
        "backward; a ring sends 2 (TP-1)/TP of the data. A stage passes on one activation and takes back one gradient, "
        "divided over TP.",
        "Shoeybi et al. 2019 (Megatron-LM), section 3; Narayanan et al. 2021, section 3.2",
    )
