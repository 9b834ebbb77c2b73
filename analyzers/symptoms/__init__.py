"""Known patterns of slow pipeline jobs, one file each; a module's docstring is what a user reads about it.

Beside its docstring and ``find``, a module has ``HOW`` (what to do, by framework, as ``ppdiag explain`` shows it) and
``MEASURE_AFTER``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppdiag.diagnosis import CRITICAL, WORTH_A_WARNING
from ppdiag.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ppdiag.analyzers.diagnose import Analysis
    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.replay import World
    from ppdiag.analyzers.shape import Shape
    from ppdiag.diagnosis import Cause, Diagnosis, Symptom
    from ppdiag.trace import Trace

SYMPTOMS = Registry(
    "ppdiag.symptoms",
    {
        "stuck-in-recv": "ppdiag.analyzers.symptoms.stuck_in_recv:find",
        "message-mismatch": "ppdiag.analyzers.symptoms.message_mismatch:find",
        "facing-sends": "ppdiag.analyzers.symptoms.facing_sends:find",
        "stuck-in-data": "ppdiag.analyzers.symptoms.stuck_in_data:find",
        "unbatched-messages": "ppdiag.analyzers.symptoms.unbatched_messages:find",
        "shape-exchange": "ppdiag.analyzers.symptoms.shape_exchange:find",
        "large-batch-of-messages": "ppdiag.analyzers.symptoms.large_batch_of_messages:find",
        "skip-connections": "ppdiag.analyzers.symptoms.skip_connections:find",
        "evaluation-out-of-step": "ppdiag.analyzers.symptoms.evaluation_out_of_step:find",
        "nccl-errors": "ppdiag.analyzers.symptoms.nccl_errors:find",
        "bubble": "ppdiag.analyzers.symptoms.bubble:find",
        "imbalance": "ppdiag.analyzers.symptoms.imbalance:find",
        "slow-network": "ppdiag.analyzers.symptoms.slow_network:find",
        "slow-collectives": "ppdiag.analyzers.symptoms.slow_collectives:find",
        "tcp-fallback": "ppdiag.analyzers.symptoms.tcp_fallback:find",
        "activation-spike": "ppdiag.analyzers.symptoms.activation_spike:find",
        "host-stall": "ppdiag.analyzers.symptoms.host_stall:find",
        "heavy-ends": "ppdiag.analyzers.symptoms.heavy_ends:find",
        "mtp-on-last-stage": "ppdiag.analyzers.symptoms.mtp_on_last_stage:find",
        "uneven-partition": "ppdiag.analyzers.symptoms.uneven_partition:find",
        "sequence-lengths": "ppdiag.analyzers.symptoms.sequence_lengths:find",
        "layers-not-divisible": "ppdiag.analyzers.symptoms.layers_not_divisible:find",
        "few-microbatches": "ppdiag.analyzers.symptoms.few_microbatches:find",
        "full-recompute": "ppdiag.analyzers.symptoms.full_recompute:find",
        "split-backward-recompute": "ppdiag.analyzers.symptoms.split_backward_recompute:find",
        "uneven-memory": "ppdiag.analyzers.symptoms.uneven_memory:find",
        "head-of-line": "ppdiag.analyzers.symptoms.head_of_line:find",
        "batched-messages": "ppdiag.analyzers.symptoms.batched_messages:find",
        "receives-not-waited-for": "ppdiag.analyzers.symptoms.receives_not_waited_for:find",
        "no-gpu-direct": "ppdiag.analyzers.symptoms.no_gpu_direct:find",
        "net-channels": "ppdiag.analyzers.symptoms.net_channels:find",
        "direct-path-through-cpu": "ppdiag.analyzers.symptoms.direct_path_through_cpu:find",
        "gradients-not-overlapped": "ppdiag.analyzers.symptoms.gradients_not_overlapped:find",
        "timed-collectives": "ppdiag.analyzers.symptoms.timed_collectives:find",
        "nccl-profiler": "ppdiag.analyzers.symptoms.nccl_profiler:find",
        "data-wait": "ppdiag.analyzers.symptoms.data_wait:find",
        "garbage-collection": "ppdiag.analyzers.symptoms.garbage_collection:find",
        "synchronising-calls": "ppdiag.analyzers.symptoms.synchronising_calls:find",
        "no-launch-lead": "ppdiag.analyzers.symptoms.no_launch_lead:find",
        "op-overhead": "ppdiag.analyzers.symptoms.op_overhead:find",
        "first-messages": "ppdiag.analyzers.symptoms.first_messages:find",
        "serial-compilation": "ppdiag.analyzers.symptoms.serial_compilation:find",
        "busy-but-waiting": "ppdiag.analyzers.symptoms.busy_but_waiting:find",
        "spinning-receives": "ppdiag.analyzers.symptoms.spinning_receives:find",
        "clocks-apart": "ppdiag.analyzers.symptoms.clocks_apart:find",
    },
)
"""Of those as severe as each other the first is shown first: a job that stands still, then what costs most."""

MEGATRON = ("megatron", "megatron-core")
"""The framework as recordings of others call it, and as its adapter does."""
TORCH = "torch.distributed.pipelining"
DEEPSPEED = "deepspeed"
ANY = "any other"
"""Key of the words for every framework that has none of its own."""


def in_words_of(megatron: str = "", torch: str = "", deepspeed: str = "", *, other: str) -> dict[str, str]:
    """Words by framework; those for any other where one is left out."""
    words = {**dict.fromkeys(MEGATRON, megatron), TORCH: torch, DEEPSPEED: deepspeed}
    return {**{name: text for name, text in words.items() if text}, ANY: other}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a symptom may look at.

    Attributes:
        diagnosis: all findings but the symptoms.
        analysis: the trace taken apart: labelled spans, facts of the ranks, steps, messages, graphs to replay.
        gains: share of the step time that would go if the factor alone went (from the replay).
    """

    diagnosis: Diagnosis
    analysis: Analysis
    gains: Mapping[Cause, float]

    @property
    def trace(self) -> Trace:
        """The labelled spans and the facts of the ranks."""
        return self.analysis.trace

    @property
    def shape(self) -> Shape:
        """The pipeline."""
        return self.analysis.shape

    @property
    def framework(self) -> str:
        """The framework as recorded."""
        return self.diagnosis.job.framework

    @property
    def options(self) -> dict[str, str]:
        """The options that the job's script was called with, in one spelling (``-`` for ``_``), as far as recorded."""
        from ppdiag.analyzers.planning.arguments import options_of  # noqa: PLC0415  (no other symptom needs planning)

        argv = _first_fact(self.trace, "argv")
        return options_of([str(word) for word in argv]) if isinstance(argv, (list, tuple)) else {}

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of NCCL and CUDA that the first rank had, as far as recorded."""
        found = _first_fact(self.trace, "env")
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    @property
    def torch_version(self) -> tuple[int, ...]:
        """Major and minor version of torch; empty where not recorded."""
        match = re.match(r"(\d{1,3})\.(\d{1,3})", str(_first_fact(self.trace, "torch")))
        return (int(match[1]), int(match[2])) if match else ()

    def says(self, how: Mapping[str, str]) -> str:
        """What to do, in the words of the run's own framework."""
        return how.get(self.framework, how[ANY])

    def gain(self, world: Callable[[Graph], World]) -> Gain:
        """What a change saves, by a replay of all steps with it."""
        from ppdiag.analyzers.replay import World, replay  # noqa: PLC0415  (not to be loaded for the table alone)

        times = [replay(graph, [World(), world(graph)]).duration_WK for graph in self.analysis.graphs]
        kept_K, changed_K = np.concatenate(times, axis=1)
        low, high = np.percentile(1.0 - changed_K / kept_K, [10, 90]).tolist()
        return Gain(max(0.0, float(1.0 - changed_K.sum() / kept_K.sum())), (low, high))

    def gain_of_evening_out(self, what: str) -> Gain:
        """What is saved where the same work is spread evenly over each ``stage``, ``microbatch`` or ``rank``."""
        from ppdiag.analyzers.what_if import Change, predict, run_of  # noqa: PLC0415

        found = predict(run_of(self.analysis), Change(even=what))
        return Gain(max(0.0, found.gain), found.gain_range)


class Gain(NamedTuple):
    """What a change saves: shares of the step time."""

    fraction: float
    """Of all steps."""
    over_steps: tuple[float, float]
    """10th and 90th percentile over the steps."""


def _first_fact(trace: Trace, name: str) -> Any:  # noqa: ANN401  (facts are of any type)
    """A fact of the lowest rank that tells it."""
    told = (trace.ranks[rank].facts[name] for rank in sorted(trace.ranks) if name in trace.ranks[rank].facts)
    return next(told, None)


def find_symptoms(evidence: Evidence) -> tuple[Symptom, ...]:
    """The symptoms that a run shows, the most severe first; of a general and a special one the special one."""
    found = [symptom for name in SYMPTOMS.names() if (symptom := SYMPTOMS.load(name)(evidence)) is not None]
    replaced = {symptom.replaces for symptom in found}
    order = ("critical", "warning", "info")
    shown = [symptom for symptom in found if symptom.id not in replaced]
    return tuple(sorted(shown, key=lambda symptom: order.index(symptom.severity)))


def severity(share: float) -> str:
    """The band of a share of the step time."""
    return "critical" if share >= CRITICAL else "warning" if share >= WORTH_A_WARNING else "info"


def is_verdict(evidence: Evidence, cause: Cause) -> bool:
    """Whether the cause is the verdict, and not undecided: only then is a change advised."""
    verdict = evidence.diagnosis.verdict
    return verdict.cause == cause.value and verdict.confidence != "undecided"
