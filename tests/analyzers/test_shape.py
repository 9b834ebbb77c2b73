"""The pipeline's shape, from labels and from messages alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ppdiag.analyzers.shape import Shape, label
from ppdiag.analyzers.steps import find_steps
from ppdiag.model import Flag, Kind
from ppdiag.stated import StatedLayout
from tests.analyzers.test_diagnose import renumbered
from tests.analyzers.test_hand_calculations import bracketed, job, pipeline

if TYPE_CHECKING:
    from ppdiag.trace import Trace


def shape_of(trace: Trace) -> Shape:
    return label(trace, find_steps(trace))[1]


def without_labels(trace: Trace) -> Trace:
    spans = trace.spans.copy()
    for name in ("stage", "chunk", "microbatch"):
        spans[name] = -1
    spans["flags"] |= np.uint16(Flag.INFERRED)
    return replace(trace, spans=spans)


def test_named_stages_are_kept() -> None:
    shape = shape_of(pipeline("Interleaved1F1B", chunks=2, microbatches=4).trace())
    assert (shape.pipelines, shape.stages) == (((0, 1),), {0: (0, 2), 1: (1, 3)})
    assert (shape.pp, shape.vpp, shape.microbatches, shape.accumulation, shape.inferred) == (2, 2, 4, 1, False)


@pytest.mark.parametrize("number", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_the_order_along_an_unnamed_pipeline_is_that_of_the_first_microbatch(number: list[int]) -> None:
    trace = without_labels(renumbered(pipeline("1F1B", ranks=4, microbatches=4).trace(), np.array(number)))
    shape = shape_of(trace)
    assert shape.pipelines == (tuple(number),)
    assert shape.stages == {rank: (position,) for position, rank in enumerate(number)}
    assert shape.inferred


def test_unnamed_microbatches_are_numbered_in_their_order() -> None:
    trace = pipeline("1F1B", ranks=3, microbatches=4).trace()
    labelled, _ = label(without_labels(trace), find_steps(trace))
    ops = np.isin(trace.spans["kind"], (Kind.FORWARD, Kind.BACKWARD))
    assert (labelled.spans["microbatch"][ops] == trace.spans["microbatch"][ops]).all()


@pytest.mark.parametrize("lost", [Kind.SEND, Kind.RECV])
def test_one_end_of_each_message_is_enough_to_join_a_pipeline(lost: Kind) -> None:
    trace = pipeline("1F1B", ranks=3, microbatches=4, replicas=2, tail=0).trace()
    shape = shape_of(replace(trace, spans=trace.spans[trace.spans["kind"] != lost]))
    assert sorted(shape.pipelines) == [(0, 1, 2), (3, 4, 5)]


def test_replicas_are_pipelines_of_their_own() -> None:
    shape = shape_of(pipeline(replicas=3, tail=0).trace())
    assert sorted(shape.pipelines) == [(0, 1), (2, 3), (4, 5)]
    assert [shape.stages[rank] for rank in range(6)] == [(0,), (1,)] * 3


def test_the_calls_of_one_step_have_microbatches_of_their_own() -> None:
    trace = bracketed(job(calls=2))
    labelled, shape = label(trace, find_steps(trace))
    assert (shape.microbatches, shape.accumulation) == (2, 2)
    forwards = labelled.spans[(labelled.spans["kind"] == Kind.FORWARD) & (labelled.spans["step"] == 2)]
    assert sorted(forwards["microbatch"][forwards["rank"] == 0].tolist()) == [0, 1, 2, 3]


def test_a_stated_layout_names_the_stages_of_ranks_that_no_message_joins() -> None:
    trace = without_labels(pipeline("1F1B", ranks=2, microbatches=4, replicas=2, tail=0).trace())
    lost = np.isin(trace.spans["kind"], (Kind.SEND, Kind.RECV)) & (trace.spans["rank"] >= 2)
    silent = replace(trace, spans=trace.spans[~lost])
    assert sorted(shape_of(silent).pipelines) == [(0, 1), (2,), (3,)]
    told, shape = label(replace(silent, layout=StatedLayout(pp=2, dp=2, order="pp-dp-tp")), find_steps(silent))
    assert (shape.pipelines, shape.stages) == (((0, 1), (2, 3)), {0: (0,), 1: (1,), 2: (0,), 3: (1,)})
    assert (told.job.tp, told.job.dp) == (1, 2)
    assert told.warnings == silent.warnings


def test_a_stated_layout_that_messages_contradict_is_not_used() -> None:
    trace = pipeline("1F1B", ranks=2, microbatches=4, replicas=2, tail=0).trace()  # pipelines 0, 1 and 2, 3
    told, shape = label(replace(trace, layout=StatedLayout(pp=2, dp=2)), find_steps(trace))
    assert sorted(shape.pipelines) == [(0, 1), (2, 3)]
    assert any("ranks 0 and 1 are of two pipelines, and messages join them" in text for text in told.warnings)


def test_virtual_stages_that_the_record_does_not_have_are_spoken_of() -> None:
    trace = pipeline("1F1B", ranks=2, microbatches=4).trace()
    told, _ = label(replace(trace, layout=StatedLayout(pp=2, vpp=2)), find_steps(trace))
    assert "the record has 1 virtual stages a rank, and --vpp 2 was stated" in told.warnings
