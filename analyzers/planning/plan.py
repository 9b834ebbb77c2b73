"""Finds the layouts that fit and ranks them: a closed form for all, an exact replay for those that come out first.

Shape letters as in :mod:`ppdiag.analyzers.planning.layout`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.analyzers.planning import memory, orders, rules, sharded, simulate
from ppdiag.analyzers.planning.cost import costs, estimate, inside_nodes, sums_of_a_pass, work
from ppdiag.analyzers.planning.layout import PLANNED, Job, Layouts, rank_layers, telling_ranks
from ppdiag.analyzers.planning.sharded import MICRO_BATCHES, Alternative

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLAYED = 16
"""Plans that are replayed exactly; the closed form has been within a few percent."""
MOST_OPS = 200_000
"""Ops of all schedules that are replayed, a second or two of work: of very long pipelines fewer plans are replayed."""
LONGEST = 128
"""Ranks of the longest pipeline that is planned; the longest published one has 64 (Narayanan et al. 2021)."""
MOST_STAGES_IN_ALL = 256
WARMED_UP = 4
"""A schedule of more than so many times P microbatches repeats itself from then on, P microbatches at a time."""
MOST_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """One layout with what it is predicted to cost. Times in seconds, fractions of the step.

    Attributes:
        tensor, pipeline, data, chunks, micro_batch, microbatches: TP, PP, DP, V, sequences of a microbatch, M.
        expert: EP, data-parallel ranks over which the experts are spread; 1 without experts.
        schedule: its name in :data:`ppdiag.analyzers.planning.orders.SCHEDULES`.
        recompute, zero1: activation checkpointing of every layer; optimizer state divided over DP.
        layers: of each stage.
        memory_bytes: peak of each rank of a pipeline.
        step_s: predicted step time.
        bubble_fraction: bubble over the total of the pipeline phase if all stages were equal and transfers free.
        imbalance_fraction: of the step, lost because stages differ; 0 where they happen to fill it better.
        transfer_fraction: of the step, waits for messages between stages.
        tensor_fraction: of the step, sums over the tensor-parallel ranks (mean of the ranks).
        expert_fraction: of the step, tokens to their experts and back (mean of the ranks).
        data_fraction: of the step, gradient reduction and weight gathering that no compute hides.
        mfu: model flops over the peak of all GPUs.
        message_bytes: one activation between stages.
        tensor_bytes, expert_bytes, pipeline_bytes, data_bytes: what the first rank sends in a step for each kind of
            parallelism.
        pipeline_in_node: a whole pipeline lies in one node.
    """

    tensor: int
    pipeline: int
    data: int
    chunks: int
    micro_batch: int
    microbatches: int
    schedule: str
    expert: int
    recompute: bool
    zero1: bool
    layers: tuple[int, ...]
    memory_bytes: tuple[float, ...]
    step_s: float
    bubble_fraction: float
    imbalance_fraction: float
    transfer_fraction: float
    tensor_fraction: float
    expert_fraction: float
    data_fraction: float
    mfu: float
    message_bytes: float
    tensor_bytes: float
    expert_bytes: float
    pipeline_bytes: float
    data_bytes: float
    pipeline_in_node: bool

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-serialisable data."""
        return {**asdict(self), "layers": list(self.layers), "memory_bytes": list(self.memory_bytes)}


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    candidates: int
    feasible: int
    plans: tuple[Plan, ...]
    alternatives: tuple[Alternative, ...]


def search(job: Job, *, schedules: Sequence[str] = ("1f1b", "interleaved"), micro: int | None = None) -> Found:
    """All feasible layouts, the fastest first (only those that were replayed are returned)."""
    layouts = candidates(job, schedules=schedules, micro=micro)
    feasible = rules.allowed(job, layouts)
    best = _distinct(job, feasible, REPLAYED)
    plans = sorted(evaluate(job, best), key=lambda plan: (plan.step_s, plan.pipeline))
    return Found(len(layouts), len(feasible), tuple(plans), (*sharded.ways(job), _tensor_and_data(job, feasible)))


def candidates(job: Job, *, schedules: Sequence[str], micro: int | None = None) -> Layouts:
    """Every combination whose sizes multiply to the number of GPUs; the rules come after."""
    gpus, layers = job.cluster.gpus, job.model.layers
    tensors = [size for size in _divisors(gpus) if size <= job.cluster.gpus_per_node]
    pipelines = [size for size in _divisors(gpus) if size <= min(LONGEST, layers + 2)]
    micros = MICRO_BATCHES if micro is None else (micro,)
    shapes = [(PLANNED.index(name), chunks) for name in schedules for chunks in _chunk_counts(name, layers)]
    spreads = [size for size in _divisors(max(1, job.model.experts)) if gpus % size == 0]
    axes = (tensors, pipelines, range(len(shapes)), micros, spreads, (False, True), (False, True))
    grids = [grid.ravel() for grid in np.meshgrid(*(np.array(axis) for axis in axes), indexing="ij")]
    short = grids[1] * np.array(shapes)[grids[2], 1] <= MOST_STAGES_IN_ALL
    fits = (gpus % (grids[0] * grids[1]) == 0) & short
    tensor_C, pipeline_C, shape_C, micro_C, expert_C, recompute_C, zero1_C = (grid[fits] for grid in grids)
    schedule_C, chunks_C = np.array(shapes).T[:, shape_C]
    data_C = gpus // (tensor_C * pipeline_C)
    return Layouts(tensor_C, pipeline_C, data_C, chunks_C, micro_C, schedule_C, expert_C, recompute_C, zero1_C)


def wish(**sizes: int | bool | str) -> Layouts:
    """One layout, from the names of the fields of :class:`Layouts` without their letter; ``expert`` may be left out."""
    sizes.setdefault("expert", 1)
    schedule = PLANNED.index(str(sizes.pop("schedule")))
    return Layouts(schedule_C=np.array([schedule]), **{f"{name}_C": np.array([size]) for name, size in sizes.items()})


def evaluate(job: Job, layouts: Layouts) -> list[Plan]:
    """Each layout with its exact costs."""
    return [_evaluate(job, layouts.take(np.array([c]))) for c in range(len(layouts))]


def _chunk_counts(name: str, layers: int) -> Sequence[int]:
    fixed = orders.SCHEDULES[name].chunks
    return (fixed,) if fixed is not None else range(2, min(MOST_CHUNKS, layers + 2) + 1)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _distinct(job: Job, feasible: Layouts, count: int) -> Layouts:
    """The fastest by the closed form; of layouts alike but for ZeRO-1 and recomputation only the faster."""
    order = np.argsort(estimate(job, feasible), kind="stable") if len(feasible) else np.zeros(0, int)
    kept: dict[tuple[int, ...], int] = {}
    replayed: dict[tuple[int, ...], int] = {}
    microbatches_C = feasible.microbatches_C(job)
    for c in order.tolist():
        key = tuple(int(getattr(feasible, name)[c]) for name in feasible.__slots__[:7])
        if key not in kept:
            shape = (key[1], key[3], key[5], int(microbatches_C[c]))
            replayed[shape] = _replayed_ops(*shape)
            if kept and sum(replayed.values()) > MOST_OPS:
                break
            kept[key] = c
        if len(kept) == count:
            break
    return feasible.take(np.array(list(kept.values()), dtype=int))


def _replayed_ops(ranks: int, chunks: int, schedule: int, microbatches: int) -> int:
    """Ops of the programs that :func:`_replay` runs for such a layout."""
    kinds = 3 if orders.SCHEDULES[PLANNED[schedule]].splits else 2
    counted = microbatches if microbatches <= (WARMED_UP + 2) * ranks else (2 * WARMED_UP + 1) * ranks
    return kinds * chunks * ranks * counted


def _evaluate(job: Job, layout: Layouts) -> Plan:
    ranks, chunks = int(layout.pipeline_C[0]), int(layout.chunks_C[0])
    every = int(layout.microbatches_C(job)[0])
    name = PLANNED[int(layout.schedule_C[0])]
    position_RC = np.arange(ranks)[:, None]
    parts = costs(job, layout, position_RC)
    counts = orders.layers_of_stages(job.model.layers, ranks * chunks)
    lengths_W = _replay(job, layout, name, (ranks, chunks, every), counts)
    equal, uneven, whole = (float(length) for length in lengths_W)
    data_s, optimizer_s = float(parts.data_RC.max()), float(parts.optimizer_RC.max())
    step = whole + data_s + optimizer_s
    busy = every * float((parts.forward_RC + parts.backward_RC).mean())
    return Plan(
        tensor=int(layout.tensor_C[0]),
        pipeline=ranks,
        data=int(layout.data_C[0]),
        chunks=chunks,
        micro_batch=int(layout.micro_C[0]),
        microbatches=every,
        schedule=name,
        expert=int(layout.expert_C[0]),
        recompute=bool(layout.recompute_C[0]),
        zero1=bool(layout.zero1_C[0]),
        layers=tuple(counts),
        memory_bytes=tuple(memory.peak(job, layout, position_RC).total_RC[:, 0].tolist()),
        step_s=step,
        bubble_fraction=max(0.0, 1 - busy / equal),
        imbalance_fraction=max(0.0, uneven - equal) / step,
        transfer_fraction=max(0.0, whole - uneven) / step,
        tensor_fraction=every * float(parts.tensor_RC.mean()) / step,
        expert_fraction=every * float(parts.expert_RC.mean()) / step,
        data_fraction=data_s / step,
        mfu=job.model.step_flops * job.global_batch / (step * job.cluster.gpus * job.cluster.device.flops_per_s),
        message_bytes=_message_bytes(job, layout),
        pipeline_in_node=bool(inside_nodes(job, layout)[0]),
        data_bytes=float(parts.data_bytes_RC[0, 0]),
        **_sent(job, layout, every),
    )


def _replay(job: Job, layout: Layouts, name: str, shape: tuple[int, int, int], counts: Sequence[int]) -> np.ndarray:
    """Length of the pipeline phase in three worlds: equal stages and free transfers, free transfers, all as predicted.

    Only as many microbatches are replayed as it takes until the schedule repeats itself; each further P of them add
    what the last P did.
    """
    ranks, chunks, every = shape
    durations = _durations(job, layout, counts)
    if every <= (WARMED_UP + 2) * ranks:
        return simulate.run(_program(name, ranks, chunks, every), durations).makespan_W
    short = WARMED_UP * ranks + every % ranks
    at_short, at_long = (
        simulate.run(_program(name, ranks, chunks, count), durations).makespan_W for count in (short, short + ranks)
    )
    return at_short + (every - short) // ranks * (at_long - at_short)


@lru_cache(maxsize=256)
def _program(name: str, ranks: int, chunks: int, microbatches: int) -> simulate.Program:
    return simulate.program(name, ranks=ranks, chunks=chunks, microbatches=microbatches)


def _durations(job: Job, layout: Layouts, counts: Sequence[int]) -> simulate.Durations:
    """F, B and W of every stage in the three worlds: by its layers, and the head on the last stage."""
    part = work(job, layout)
    forward, backward, weight, head = (
        float(seconds[0]) for seconds in (part.forward_C, part.backward_C, part.weight_C, part.head_C)
    )
    layers_S = np.array(counts, dtype=float)
    ends_S = np.zeros(len(counts))
    ends_S[-1] = head
    transfer = float(costs(job, layout, telling_ranks(layout)).transfer_C[0])

    def of_stages(seconds: float) -> np.ndarray:
        row_S = layers_S * seconds + ends_S
        return np.stack([np.full(len(counts), row_S.mean()), row_S, row_S], axis=1)

    return simulate.Durations(
        forward_SW=of_stages(forward),
        backward_SW=of_stages(backward - weight),
        weight_SW=of_stages(weight),
        transfer_W=np.array([0.0, 0.0, transfer]),
    )


def _message_bytes(job: Job, layout: Layouts) -> float:
    return float(job.model.boundary_bytes * layout.micro_C[0] / layout.tensor_C[0])


def _sent(job: Job, layout: Layouts, every: int) -> dict[str, float]:
    """What the first rank sends in a step for its layers and to its neighbours."""
    tensor, pipeline, chunks, spread = (
        int(getattr(layout, f"{name}_C")[0]) for name in ("tensor", "pipeline", "chunks", "expert")
    )
    activation = float(job.model.boundary_bytes * layout.micro_C[0])
    layers = float(rank_layers(job, layout, np.zeros((1, 1), int))[0, 0])
    passes = (2 + bool(layout.recompute_C[0])) * layers * every
    sums = passes * float(sums_of_a_pass(job, layout)[0])
    copies = activation * job.model.experts_per_token / tensor
    hops = 2 * chunks - 1 if pipeline > 1 else 0
    return {
        "tensor_bytes": sums * activation * 2 * (tensor - 1) / tensor,
        "expert_bytes": passes * 2 * copies * (spread - 1) / spread,
        "pipeline_bytes": hops * every * activation / tensor,
    }


def _tensor_and_data(job: Job, feasible: Layouts) -> Alternative:
    """The fastest feasible layout with PP = 1."""
    flat = feasible.take(feasible.pipeline_C == 1)
    name = "tensor and data parallelism alone"
    if len(flat):
        plan = evaluate(job, flat.take(np.array([int(np.argmin(estimate(job, flat)))])))[0]
        words = f"fits with TP = {plan.tensor}, DP = {plan.data}"
        return Alternative(name, fits=True, memory_bytes=max(plan.memory_bytes), step_s=plan.step_s, words=words)
    tensor = max(size for size in _divisors(job.cluster.gpus_per_node) if job.cluster.gpus % size == 0)
    layout = wish(tensor=tensor, pipeline=1, data=job.cluster.gpus // tensor, chunks=1, micro=1, schedule="1f1b",
                  recompute=True, zero1=True)  # fmt: skip
    size = float(memory.peak(job, layout, np.zeros((1, 1), int)).total_RC.max())
    reasons = "; ".join(words for _, words in rules.broken_rules(job, layout))
    return Alternative(name, fits=False, memory_bytes=size, step_s=None, words=reasons)
