"""Records that are odd but legal: what a recorder can write when ranks die, probes fail, or jobs do the unusual."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.validation import plausible
from ppdiag.errors import PpdiagError
from ppdiag.model import Flag, Kind
from ppdiag.trace import Trace, sorted_spans
from tests.analyzers.factory import MS
from tests.analyzers.test_diagnose import check_sums
from tests.analyzers.test_hand_calculations import pipeline

if TYPE_CHECKING:
    from tests.analyzers.factory import Pipeline

TIMES = ("start_ns", "end_ns", "post_ns")
RUNS = {
    "1F1B": pipeline("1F1B", ranks=3, microbatches=4, host_gap=MS, transfer=lambda _src, _dst: MS),
    "rendezvous": pipeline(ranks=2, rendezvous=True, tail=3 * MS, tail_of_all=True),
    "replicas": pipeline("1F1B", microbatches=4, replicas=2, tail=5 * MS),
    "interleaved": pipeline("Interleaved1F1B", chunks=2, microbatches=4),
    "zero bubble": pipeline("ZBVZeroBubble", chunks=2, microbatches=4),
}


def changed(trace: Trace, spans: np.ndarray) -> Trace:
    """The trace with these spans, as a reader would give them: sorted, and without what cannot be."""
    return replace(trace, spans=sorted_spans(spans[plausible(spans)]))


def lost(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return spans[~chosen]


def twice(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return np.concatenate([spans, spans[chosen]])


def in_no_time(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    spans["end_ns"][chosen] = spans["start_ns"][chosen]
    return spans


def long(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    spans["end_ns"][chosen] += 10_000 * MS
    return spans


def an_hour_late(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    for name in TIMES:
        spans[name][chosen] += 3_600_000 * MS
    return spans


def early(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Ops overlap those before them."""
    for name in ("start_ns", "post_ns"):
        spans[name][chosen] -= 15 * MS
    return spans


def at_once(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """All begin when the first does."""
    for name in ("start_ns", "post_ns"):
        spans[name][chosen] = spans[name][chosen].min(initial=0)
    return spans


def unlabelled(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    for name in ("stage", "microbatch", "peer", "group", "seq"):
        spans[name][chosen] = -1
    return spans


def far_off(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    for name in ("stage", "microbatch", "peer", "group", "step"):
        spans[name][chosen] += 500
    return spans


def to_oneself(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    message = chosen & np.isin(spans["kind"], (Kind.SEND, Kind.RECV))
    spans["peer"][message] = spans["rank"][message]
    return spans


def a_step_further(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    spans["step"][chosen] += 1
    return spans


def by_another_thread(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    spans["thread"][chosen] = 1
    return spans


CHANGES = (
    lost, twice, in_no_time, long, an_hour_late, early, at_once, unlabelled, far_off, to_oneself, a_step_further,
    by_another_thread,
)  # fmt: skip


@st.composite
def odd_traces(draw: st.DrawFn) -> Trace:
    """One of the runs, with a change or two of some of its spans."""
    trace = draw(st.sampled_from(sorted(RUNS)).map(lambda name: TRACES[name]))
    spans = trace.spans.copy()
    for change in draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=3)):
        spans = change(spans, draw(st.sampled_from(SOME))(spans, draw(st.integers(0, 99))))
    flag, number = draw(st.sampled_from([0, *Flag])), draw(st.integers(0, 99))
    spans["flags"] |= np.where(of_one_kind(spans, number), flag, 0).astype(np.uint16)
    return changed(trace, spans)


def of_one_kind(spans: np.ndarray, number: int) -> np.ndarray:
    kinds = np.unique(spans["kind"])
    return spans["kind"] == kinds[number % len(kinds)] if len(kinds) else np.zeros(0, bool)


def of_one_rank(spans: np.ndarray, number: int) -> np.ndarray:
    return spans["rank"] == number % (int(spans["rank"].max(initial=0)) + 1)


def of_one_step(spans: np.ndarray, number: int) -> np.ndarray:
    return spans["step"] == number % (int(spans["step"].max(initial=0)) + 1)


def of_one_rank_and_step(spans: np.ndarray, number: int) -> np.ndarray:
    return of_one_rank(spans, number) & of_one_step(spans, number // 7)


def of_one_rank_and_kind(spans: np.ndarray, number: int) -> np.ndarray:
    return of_one_rank(spans, number) & of_one_kind(spans, number // 7)


def each_seventh(spans: np.ndarray, number: int) -> np.ndarray:
    return np.arange(len(spans)) % 7 == number % 7


SOME = (of_one_kind, of_one_rank, of_one_step, of_one_rank_and_step, of_one_rank_and_kind, each_seventh)
TRACES = {name: run.trace() for name, run in RUNS.items()}


@settings(max_examples=60)
@given(odd_traces())
def test_whatever_was_recorded_it_is_refused_or_the_parts_sum(trace: Trace) -> None:
    try:
        found = diagnose(trace)
    except PpdiagError:
        return
    check_sums(found)
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "run",
    [
        pipeline(ranks=1, microbatches=1),
        pipeline("1F1B", ranks=4, microbatches=1),
        replace(pipeline(ranks=1, microbatches=1), steps=1),
        pipeline(duration=lambda _op, _rank, _step: 0),
        pipeline(duration=lambda _op, rank, _step: 0 if rank else 10 * MS),
        pipeline(duration=lambda _op, _rank, step: (1_000 if step == 2 else 1) * MS),
    ],
    ids=["P=1, M=1", "M=1", "P=1, M=1, one step", "no op takes time", "nor does one stage's", "a step of 1000 times"],
)
def test_the_smallest_and_the_oddest_pipelines_are_explained(run: Pipeline) -> None:
    found = diagnose(run.trace())
    check_sums(found)
    assert found.why.unexplained == pytest.approx(0.0, abs=1e-6)
