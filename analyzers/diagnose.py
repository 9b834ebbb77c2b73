"""From a trace to a diagnosis: the one place that calls all parts of the analysis in their order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers import clock, links, message_clock, results, timeline, verdict
from ppdiag.analyzers import graph as step_graph
from ppdiag.analyzers import program as rank_program
from ppdiag.analyzers.attribution import attribute, by_step, split_host, split_imbalance
from ppdiag.analyzers.overhead import overhead, shortfall
from ppdiag.analyzers.replay import World, replay
from ppdiag.analyzers.root_cause import root_cause
from ppdiag.analyzers.shape import label
from ppdiag.analyzers.steps import find_steps
from ppdiag.analyzers.symptoms import Evidence, find_symptoms
from ppdiag.analyzers.where import measure
from ppdiag.analyzers.why import Shares, share_out
from ppdiag.analyzers.workers import workers
from ppdiag.diagnosis import Diagnosis, HostSplit, ImbalanceSplit, StepResult
from ppdiag.errors import BadRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppdiag.analyzers.attribution import Attribution
    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.program import Program
    from ppdiag.analyzers.shape import Shape
    from ppdiag.analyzers.steps import Steps
    from ppdiag.analyzers.where import Measured
    from ppdiag.trace import Trace

_PARTS = ("finding the steps", "matching messages", "replaying the step", "naming the cause", "done")


@dataclass(frozen=True, slots=True)
class Analysis:
    """A trace taken apart: what a diagnosis is made of, and what other questions to a run need too.

    Attributes:
        recorded: the trace on the clocks of the record; spans have the same places in ``trace``.
        trace: the labelled trace.
        steps: the analysed steps.
        left_out: steps whose messages contradict the order of their ops.
        shares: the step times of all steps, split; in the order of ``steps.kept``.
    """

    recorded: Trace
    trace: Trace
    steps: Steps
    shape: Shape
    program: Program
    graphs: tuple[Graph, ...]
    left_out: int
    measured: Measured
    shares: Shares


def analyse(trace: Trace, progress: Callable[[str, int, int], None] | None = None) -> Analysis:
    """Takes a trace apart into steps, graphs and the shares of its step time.

    Raises:
        NoPipelineFound: the trace has no pipeline, or no complete step.
        BadRecord: the messages of every step contradict the order of the ops.
    """
    tell = progress or (lambda *_: None)
    tell(_PARTS[0], 0, 4)
    recorded, trace = trace, message_clock.moved(trace)
    was_moved = trace is not recorded
    steps = find_steps(trace)
    trace, shape = label(trace, steps)
    tell(_PARTS[1], 1, 4)
    program = rank_program.build(trace, steps)
    trace = clock.checked(trace, program.messages)
    program = replace(program, trace=trace)
    recorded = recorded if was_moved else trace
    graphs, left_out = step_graph.build_graphs(program, steps)
    if not graphs:
        raise BadRecord(f"{trace.job.source}: the messages of every step contradict the order of its ops")
    steps = steps.only(np.concatenate([graph.steps_K for graph in graphs]))
    measured = measure(program, steps)
    tell(_PARTS[2], 2, 4)
    busy_K = measured.busy_RK.mean(axis=0)
    shares = _merge(graphs, [share_out(g, busy_K[np.searchsorted(steps.kept, g.steps_K)]) for g in graphs])
    return Analysis(recorded, trace, steps, shape, program, tuple(graphs), left_out, measured, shares)


def diagnose(trace: Trace, progress: Callable[[str, int, int], None] | None = None) -> Diagnosis:
    """Explains where the step time of a job went.

    Args:
        trace: all spans of the job.
        progress: told which part is being done.

    Raises:
        NoPipelineFound: the trace has no pipeline, or no complete step.
        BadRecord: the messages of every step contradict the order of the ops.
    """
    return explain(analyse(trace, progress), progress)


def explain(analysis: Analysis, progress: Callable[[str, int, int], None] | None = None) -> Diagnosis:
    """The diagnosis of a trace that has been taken apart."""
    tell = progress or (lambda *_: None)
    graphs, shares = analysis.graphs, analysis.shares
    attribution = attribute(shares, analysis.measured, np.sum([graph.work_R for graph in graphs], axis=0))
    tell(_PARTS[3], 3, 4)
    why = attribution.why()
    imbalance = ImbalanceSplit(**split_imbalance(why.imbalance, shares))
    own_K = np.isin(analysis.steps.kept, graphs[0].steps_K)
    context = verdict.Context(analysis.trace, analysis.shape, graphs[0], own_K, shares, why, imbalance)
    diagnosis = _with_details(_with_tables(analysis, attribution, context), analysis)
    evidence = Evidence(diagnosis, analysis, gains=verdict.gains(context))
    tell(_PARTS[4], 4, 4)
    return _stuck_first(replace(diagnosis, symptoms=find_symptoms(evidence)))


def _with_tables(analysis: Analysis, attribution: Attribution, context: verdict.Context) -> Diagnosis:
    """Both partitions, the tables of stages, links and ranks, and the verdict."""
    trace, steps, shape = analysis.trace, analysis.steps, analysis.shape
    recorded = analysis.recorded
    found = links.links(analysis.program, steps, recorded)
    said = (*results.warnings(trace, steps), *shortfall(trace), *links.clock_warnings(found, recorded.clock_error_s))
    return Diagnosis(
        source=trace.job.source,
        job=results.job(trace, steps, shape),
        steps=results.step_times(steps),
        phases=results.phases(analysis.program, steps),
        where=attribution.where(),
        why=context.why,
        imbalance=context.imbalance,
        stages=results.stages(trace, steps, shape, attribution),
        links=found,
        ranks=results.ranks(trace, steps, shape, attribution),
        replay_error_fraction=replay_error(context.graph),
        clock_error_s=trace.clock_error_s,
        verdict=verdict.decide(context),
        transports=tuple(dict(row) for row in trace.transports),
        overhead=overhead(trace),
        warnings=(*said, *_left_out(analysis.left_out)),
        step_times_s=tuple(steps.duration_s.tolist()),
    )


def _with_details(found: Diagnosis, analysis: Analysis) -> Diagnosis:
    """With what is behind the tables: the drawn step, where waits began, slow ranks, single steps."""
    steps, shape, graph = analysis.steps, analysis.shape, analysis.graphs[0]
    of_steps = zip(steps.recorded[steps.kept].tolist(), by_step(analysis.shares, analysis.measured), strict=True)
    return replace(
        found,
        timeline=timeline.median_step(analysis.program, steps, graph, analysis.measured),
        root_cause=root_cause(graph, analysis.trace, shape, idle=found.idle_fraction, step_of=steps.recorded),
        workers=workers(graph, shape),
        host=HostSplit(**split_host(found.why.host, analysis.shares)),
        step_results=tuple(StepResult(number, *parts) for number, parts in of_steps),
    )


def _stuck_first(diagnosis: Diagnosis) -> Diagnosis:
    """The verdict begins with the hang, where the job stands still: what its steps lost before comes second."""
    stuck = diagnosis.stuck
    if stuck is None:
        return diagnosis
    text = f"the job stands still. {stuck.advice[0].action}. In the steps before, {diagnosis.verdict.text}"
    return replace(diagnosis, verdict=replace(diagnosis.verdict, text=text))


def _left_out(steps: int) -> tuple[str, ...]:
    return (f"{steps} steps were left out: their messages contradict the order of their ops",) if steps else ()


def _merge(graphs: Sequence[Graph], parts: Sequence[Shares]) -> Shares:
    """The shares of all structures, in the order of the steps."""
    order = np.argsort(np.concatenate([graph.steps_K for graph in graphs]))

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    def table(name: str) -> dict[object, np.ndarray]:
        keys = getattr(parts[0], name)
        return {key: np.concatenate([getattr(part, name)[key] for part in parts])[order] for key in keys}

    return Shares(
        duration_K=column("duration_K"),
        busy_K=column("busy_K"),
        cause_K=table("cause_K"),  # type: ignore[arg-type]
        kept_K=column("kept_K"),
        without_K=table("without_K"),  # type: ignore[arg-type]
        equalised_K=table("equalised_K"),  # type: ignore[arg-type]
        prompt_K=table("prompt_K"),  # type: ignore[arg-type]
    )


def replay_error(graph: Graph) -> float:
    """How far the replayed steps are from the measured ones, as a fraction of them (median over steps).

    Each step is replayed with its own work and the medians over all steps of host time and transfers. Work stays the
    step's own: where the data make microbatches unequal, no step is like the median of each op.
    """
    typical = replace(
        graph,
        host_NK=_typical(graph.host_NK),
        transfer_EK=_typical(graph.transfer_EK),
    )
    replayed_K = replay(typical, [World()]).duration_WK[0]
    return float(np.median(np.abs(replayed_K - graph.duration_K) / graph.duration_K))


def _typical(times: np.ndarray) -> np.ndarray:
    """Each row's median over the steps, in every step."""
    return np.repeat(np.median(times, axis=1, keepdims=True), times.shape[1], axis=1)
