"""Runs for the symptoms: whole ones with facts of their ranks, and stand-ins where only one finding matters."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.messages import match
from ppdiag.analyzers.symptoms import SYMPTOMS, Evidence
from ppdiag.diagnosis import Cause
from ppdiag.trace import Waiting
from tests.analyzers.factory import spans_of, trace_of
from tests.analyzers.test_hand_calculations import pipeline
from tests.reports.factory import make_diagnosis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ppdiag.diagnosis import Diagnosis, Symptom
    from ppdiag.trace import Trace

MEGATRON, TORCH, DEEPSPEED = "megatron-core", "torch.distributed.pipelining", "deepspeed"


def found(trace: Trace, framework: str = "", *, tp: int | None = None, dp: int | None = None) -> dict[str, Symptom]:
    """The symptoms of a run."""
    trace = replace(trace, job=replace(trace.job, framework=framework, tp=tp, dp=dp))
    return {symptom.id: symptom for symptom in diagnose(trace).symptoms}


def told(trace: Trace, *arguments: str, env: Mapping[str, str] | None = None, **facts: Any) -> Trace:
    """The run with these arguments, variables and facts on all ranks."""
    more = {"argv": ["train.py", *arguments], "env": dict(env or {}), **facts}
    return replace(trace, ranks={rank: replace(old, facts={**old.facts, **more}) for rank, old in trace.ranks.items()})


def wait(peer: int, *, is_send: bool = False, size_bytes: int = 1024, seq: int = 3, tag: int = 0) -> Waiting:
    return Waiting(is_send=is_send, peer=peer, seq=seq, tag=tag, size_bytes=size_bytes, step=7)


def hung(trace: Trace, waits: Mapping[int, Waiting], *, seconds: float = 30.0) -> Trace:
    """The run standing still: these ranks in their waits, the others in no op."""
    ranks = {}
    for rank, old in trace.ranks.items():
        message = waits.get(rank)
        inside = "" if message is None else f"the wait for a message of rank {message.peer}"
        ranks[rank] = replace(old, status="killed", inside=inside, inside_s=seconds, waiting=message)
    return replace(trace, ranks=ranks)


def messages(rows: Sequence[Mapping[str, int]]) -> Trace:
    """A trace of these spans alone."""
    return trace_of(spans_of(rows), [(0, 1, 2)])


def evidence(
    diagnosis: Diagnosis | None = None,
    trace: Trace | None = None,
    *,
    step_ns: int = 1_000_000_000,
    stages: Mapping[int, tuple[int, ...]] | None = None,
) -> Evidence:
    """What a symptom looks at, where one step of this length, from 0 on, is all there is."""
    trace = trace if trace is not None else pipeline().trace()
    ranks = np.unique(trace.spans["rank"])
    steps = SimpleNamespace(
        number=np.zeros(len(trace.spans), np.int64),
        kept=np.array([0]),
        ranks=ranks,
        start_ns=np.array([0]),
        end_ns=np.array([step_ns]),
        duration_s=np.array([step_ns / 1e9]),
    )
    stages = stages or {int(rank): (int(rank),) for rank in ranks}
    analysis = SimpleNamespace(
        trace=trace,
        steps=steps,
        shape=SimpleNamespace(stages=stages, pipelines=(tuple(stages),)),
        program=SimpleNamespace(messages=match(trace)),
        graphs=(),
    )
    return Evidence(diagnosis or make_diagnosis(), cast(Any, analysis), gains=dict.fromkeys(Cause, 0.2))


def symptom(name: str, of: Evidence) -> Symptom | None:
    return SYMPTOMS.load(name)(of)
