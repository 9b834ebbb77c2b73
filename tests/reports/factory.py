"""Makes plausible diagnoses from a few numbers: a 1F1B step is simulated, and its idle time is shared out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ppdiag.diagnosis import (
    Advice,
    Diagnosis,
    ImbalanceSplit,
    Job,
    LinkResult,
    Overhead,
    Phases,
    Place,
    RankResult,
    StageResult,
    Steps,
    Symptom,
    Verdict,
    Where,
    Why,
)
from ppdiag.drawn_step import IDLE_DTYPE, TIMELINE_DTYPE, Timeline
from ppdiag.model import Kind

HOSTILE = '</script><img src=x onerror="window.hacked=1">{{7*7}}[red]\x1b[31mred\x07\u202e\n</style>\'"`${1}'
TAIL_S = 0.012
PLACES = list(Place)


@dataclass
class Simulated:
    """Compute and idle intervals of one step, as the rows of a timeline."""

    ops: np.ndarray
    idle: np.ndarray
    end_s: float


def order_1f1b(stage: int, stages: int, microbatches: int) -> list[tuple[Kind, int]]:
    warm_up = min(stages - stage - 1, microbatches)
    ops = [(Kind.FORWARD, m) for m in range(warm_up)]
    for m in range(microbatches - warm_up):
        ops += [(Kind.FORWARD, warm_up + m), (Kind.BACKWARD, m)]
    return ops + [(Kind.BACKWARD, m) for m in range(microbatches - warm_up, microbatches)]


def simulate(forward_s: list[float], microbatches: int, transfer_s: float = 0.0) -> Simulated:
    """A 1F1B step; a backward takes twice its forward."""
    stages = len(forward_s)
    orders = [order_1f1b(s, stages, microbatches) for s in range(stages)]
    done: dict[tuple[Kind, int, int], float] = {}
    clock, position = [0.0] * stages, [0] * stages
    ops: list[tuple[Any, ...]] = []
    idle: list[tuple[Any, ...]] = []
    while any(position[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            while position[s] < len(orders[s]):
                kind, m = orders[s][position[s]]
                source = s - 1 if kind is Kind.FORWARD else s + 1
                has_source = 0 <= source < stages
                if has_source and (kind, source, m) not in done:
                    break
                sent = done[kind, source, m] if has_source else 0.0
                start = max(clock[s], sent + transfer_s) if has_source else clock[s]
                _wait(idle, s, clock[s], min(max(sent, clock[s]), start), start)
                end = start + forward_s[s] * (1 if kind is Kind.FORWARD else 2)
                ops.append((s, int(kind), s, m, start, end))
                done[kind, s, m] = clock[s] = end
                position[s] += 1
    end_s = max(clock)
    idle += [(s, PLACES.index(Place.COLLECTIVE), clock[s], end_s) for s in range(stages) if clock[s] < end_s]
    idle += [(s, PLACES.index(Place.HOST), end_s, end_s + TAIL_S) for s in range(stages)]
    return Simulated(np.array(ops, list(TIMELINE_DTYPE)), np.array(idle, list(IDLE_DTYPE)), end_s + TAIL_S)


def _wait(idle: list[tuple[Any, ...]], rank: int, begin: float, sent: float, arrived: float) -> None:
    if begin < sent:
        idle.append((rank, PLACES.index(Place.LATE_SENDER), begin, sent))
    if sent < arrived:
        idle.append((rank, PLACES.index(Place.TRANSFER), sent, arrived))


def where_of(simulated: Simulated, rank: int) -> Where:
    rows = simulated.idle[simulated.idle["rank"] == rank]
    shares = {
        place.value: float((rows["end_s"] - rows["start_s"])[rows["place"] == i].sum() / simulated.end_s)
        for i, place in enumerate(PLACES)
    }
    return Where(**shares)


def why_of(where: Where, *, bubble: float) -> Why:
    """Transfers are communication, the tail is host, and the rest is bubble up to ``bubble``, then imbalance."""
    waiting = where.late_sender + where.collective
    bubble = min(bubble, waiting)
    return Why(bubble, waiting - bubble, where.transfer, where.host, where.unexplained)


def mean_of(parts: list[Any]) -> Any:
    kind = type(parts[0])
    return kind(*(float(np.mean([getattr(part, name) for part in parts])) for name in kind.__dataclass_fields__))


def make_diagnosis(
    *,
    stages: int = 4,
    microbatches: int = 8,
    heavy: dict[int, float] | None = None,
    forward_s: float = 0.010,
    transfer_s: float = 0.001,
    weight_s: float = 0.0,
    text: str = "node",
) -> Diagnosis:
    """A job of one rank a stage under 1F1B.

    Args:
        stages: P; V is 1.
        microbatches: M.
        heavy: by stage, how many times as long it works as the others.
        forward_s: F of a stage that is not heavy.
        transfer_s: time of each message.
        weight_s: W shown in the tables (the timeline has none).
        text: stands wherever the record's own words go.
    """
    heavy = {2: 2.0} if heavy is None else heavy
    forwards = [forward_s * heavy.get(s, 1.0) for s in range(stages)]
    measured = simulate(forwards, microbatches, transfer_s)
    equal = simulate([sum(forwards) / stages] * stages, microbatches)
    bubble = (stages - 1) / (microbatches + stages - 1) * 0.6
    where = [where_of(measured, s) for s in range(stages)]
    why = [why_of(w, bubble=bubble) for w in where]
    rows: list[dict[str, Any]] = [
        {
            "forward_s": forwards[s],
            "backward_s": 2 * forwards[s],
            "weight_s": weight_s,
            "busy_fraction": 1 - where[s].total,
            "idle_fraction": where[s].total,
            "where": where[s],
            "why": why[s],
            "peak_memory_bytes": 61_000_000_000 if s == 0 else None,
        }
        for s in range(stages)
    ]
    total = mean_of(why)
    return Diagnosis(
        source=f"/runs/{text}/ppdiag-run",
        job=Job(stages, stages, 1, None, None, microbatches, "torch.distributed.pipelining", "1F1B", 1.0),
        steps=Steps(
            count=20, dropped=2, median_s=measured.end_s, p10_s=measured.end_s * 0.98, p90_s=measured.end_s * 1.05
        ),
        phases=Phases(measured.end_s - TAIL_S, TAIL_S * 0.75, TAIL_S * 0.25),
        where=mean_of(where),
        why=total,
        imbalance=ImbalanceSplit(stage=total.imbalance),
        stages=tuple(StageResult(stage=s, ranks=(s,), **row) for s, row in enumerate(rows)),
        links=make_links(stages, transfer_s, text),
        ranks=tuple(RankResult(rank=s, host=f"{text}-{s // 8}", stage=(s,), **row) for s, row in enumerate(rows)),
        replay_error_fraction=0.012,
        clock_error_s=0.0,
        verdict=make_verdict(max(heavy, key=lambda s: heavy[s], default=0), total.imbalance, text),
        symptoms=(make_symptom(text),),
        overhead=Overhead(0.003, 0.001, 0.005),
        transports=(),
        warnings=(f"Rank 3 on {text} stopped in step 22: that step is left out.",),
        step_times_s=tuple(float(measured.end_s * (1 + 0.02 * np.sin(i) + 0.05 * (i % 7 == 6))) for i in range(20)),
        timeline=Timeline(12, measured.end_s, equal.end_s - TAIL_S, measured.ops, equal.ops, measured.idle),
    )


def make_links(stages: int, transfer_s: float, text: str) -> tuple[LinkResult, ...]:
    forward = [LinkResult(s, s + 1, "forward", 8_388_608, transfer_s, 8e9, f"{text} TCP") for s in range(stages - 1)]
    backward = [LinkResult(s + 1, s, "backward", 8_388_608, transfer_s * 1.5, None, None) for s in range(stages - 1)]
    return (*forward, *backward)


def make_verdict(stage: int, share: float, text: str) -> Verdict:
    words = f"Stage {stage} on {text} works 2.0 times as long as the mean of the others, which wait for it."
    return Verdict("imbalance", stage, None, None, share, "measured", words)


def make_symptom(text: str) -> Symptom:
    return Symptom(
        id="heavy-stage",
        title=f"One stage works longer than the others ({text})",
        severity="critical",
        evidence=(
            "Stage 2: F 20.0 ms, B 40.0 ms; the other stages: F 10.0 ms, B 20.0 ms.",
            "Stages 0, 1 and 3 stand idle 58 % of the step, stage 2 idles 9 %.",
        ),
        advice=(
            Advice(
                action="Move layers from stage 2 to its neighbours until F + B is equal.",
                how=f"pipeline(model, ..., split_spec={{'layers.{text}': SplitPoint.BEGINNING}})",
                gain_fraction=0.31,
                source="https://docs.pytorch.org/docs/stable/distributed.pipelining.html",
                measure_after="F + B of each stage: within 10 % of their mean; then the median step time.",
            ),
            Advice(
                action="Give stage 2 activation checkpointing last.",
                how="checkpoint_wrapper",
                gain_fraction=None,
                source="DESIGN",
            ),
        ),
    )


def make_single() -> Diagnosis:
    """P=1, nothing to blame."""
    diagnosis = make_diagnosis(stages=1, microbatches=2, heavy={}, text="solo")
    verdict = Verdict(None, None, None, None, 0.0, "measured", "No cause takes 5 % of the step time.")
    return replace(diagnosis, verdict=verdict, symptoms=(), warnings=(), overhead=None, step_times_s=(), timeline=None)


def make_undecided() -> Diagnosis:
    """The replay missed too much of the step for a verdict."""
    diagnosis = make_diagnosis(heavy={})
    verdict = Verdict(
        None, None, None, None, 0.11, "undecided", "11 % of the step time is unexplained, so no cause is named."
    )
    return replace(diagnosis, verdict=verdict, symptoms=(), why=replace(diagnosis.why, unexplained=0.11))


def make_slow_link() -> Diagnosis:
    """Communication on the link from stage 1 to stage 2."""
    diagnosis = make_diagnosis(heavy={}, transfer_s=0.012, text="节点")
    verdict = Verdict(
        "communication", None, (1, 2), None, 0.27, "inferred", "Messages from stage 1 to stage 2 take 12 ms each."
    )
    return replace(diagnosis, verdict=verdict, clock_error_s=14e-6)


def make_late_host() -> Diagnosis:
    """One of 64 ranks is late."""
    diagnosis = make_diagnosis(stages=64, microbatches=128, heavy={40: 1.3}, text="gpu-pod-7.example.internal")
    verdict = Verdict(
        "host", None, None, 41, 0.18, "measured", "Rank 41 starts each step 100 ms after its inputs are there."
    )
    return replace(diagnosis, verdict=verdict)


def make_huge(*, ranks: int = 1024, ops_per_rank: int = 400, seed: int = 7) -> Diagnosis:
    """A timeline of over a million jittered intervals (ops, idle, equal work)."""
    rng = np.random.default_rng(seed)
    ops = np.zeros((ranks, ops_per_rank), list(TIMELINE_DTYPE))
    gaps_s = rng.gamma(2.0, 2e-4, ops.shape)
    durations_s = rng.normal(1.0, 0.03, ops.shape).clip(0.5) * np.where(np.arange(ops_per_rank) % 2, 4e-3, 2e-3)
    ends_s = np.cumsum(gaps_s + durations_s, axis=1)
    ops["rank"] = np.arange(ranks)[:, None]
    ops["kind"] = np.where(np.arange(ops_per_rank) % 2, int(Kind.BACKWARD), int(Kind.FORWARD))
    ops["stage"] = np.arange(ranks)[:, None] // 64
    ops["microbatch"] = np.arange(ops_per_rank) // 2
    ops["start_s"], ops["end_s"] = ends_s - durations_s, ends_s
    idle = np.zeros(ops.shape, list(IDLE_DTYPE))
    idle["rank"], idle["place"] = ops["rank"], np.arange(ops_per_rank) % 3
    idle["start_s"], idle["end_s"] = ends_s - durations_s - gaps_s, ends_s - durations_s
    equal = ops.copy()
    equal["start_s"] = np.arange(ops_per_rank)[None, :] * 3e-3
    equal["end_s"] = equal["start_s"] + 2.9e-3
    timeline = Timeline(3, float(ends_s.max()), float(equal["end_s"].max()), ops.ravel(), equal.ravel(), idle.ravel())
    return replace(make_diagnosis(stages=16, microbatches=32), timeline=timeline)
