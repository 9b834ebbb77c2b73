"""The columns of a trace and how they are sliced."""

from __future__ import annotations

import numpy as np
import pytest

from ppdiag.model import SPAN_FIELDS, Kind
from ppdiag.trace import SPAN_DTYPE, JobFacts, Trace, fact_names, make_spans, rank_slices, sorted_spans

ROWS = [
    {"rank": 1, "kind": Kind.SEND, "start_ns": 5, "end_ns": 6, "post_ns": 4},
    {"rank": 0, "kind": Kind.BACKWARD, "start_ns": 9, "end_ns": 12, "stage": 0},
    {"rank": 0, "kind": Kind.FORWARD, "start_ns": 2, "end_ns": 7, "microbatch": 3},
]


def test_spans_are_kept_by_rank_then_start():
    assert make_spans(ROWS)["start_ns"].tolist() == [2, 9, 5]


def test_what_a_row_leaves_out_is_unknown_or_nought():
    span = make_spans(ROWS)[0]
    assert [int(span[name]) for name in ("stage", "chunk", "peer", "microbatch", "post_ns", "seq")] == [
        -1,
        -1,
        -1,
        3,
        2,
        0,
    ]


def test_of_two_spans_that_start_at_once_the_shorter_comes_first():
    spans = make_spans([{"rank": 0, "start_ns": 1, "end_ns": 9}, {"rank": 0, "start_ns": 1, "end_ns": 2}])
    assert sorted_spans(spans)["end_ns"].tolist() == [2, 9]


def test_each_rank_has_its_own_spans_and_a_rank_without_any_is_not_there():
    by_rank = Trace(make_spans(ROWS)).by_rank()
    assert {rank: len(spans) for rank, spans in by_rank.items()} == {0: 2, 1: 1}
    assert rank_slices(np.array([], np.int32)) == {}


def test_spans_of_a_kind_keep_the_facts():
    trace = Trace(make_spans(ROWS), JobFacts(pp=2)).of_kind(Kind.FORWARD, Kind.SEND)
    assert trace.spans["kind"].tolist() == [Kind.FORWARD, Kind.SEND]
    assert (len(trace), trace.job.pp) == (2, 2)


def test_spans_of_other_columns_are_refused():
    with pytest.raises(ValueError, match="SPAN_DTYPE"):
        Trace(np.zeros(1, np.dtype([("rank", np.int32)])))


def test_a_table_for_notebooks_has_each_column():
    table = Trace(make_spans(ROWS)).to_pandas()
    assert list(table.columns) == list(SPAN_DTYPE.names or ())
    assert table["start_ns"].tolist() == [2, 9, 5]


def test_each_field_of_the_record_is_a_column():
    assert {name for name, _, _ in SPAN_FIELDS} <= set(SPAN_DTYPE.names or ())


def test_the_facts_that_a_record_may_tell_are_those_of_the_job():
    assert {"pp", "vpp", "schedule", "microbatches"} <= set(fact_names())
