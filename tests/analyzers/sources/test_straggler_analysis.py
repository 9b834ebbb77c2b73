"""Op tables of StragglerAnalysis: two real jobs are read and explained; nothing damaged brings the reader down."""

from __future__ import annotations

import contextlib
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.sources.straggler_analysis import StragglerAnalysis
from ppdiag.errors import BadRecord, MissingPackage, NotARun
from ppdiag.model import Collective, Kind

DATA = Path(__file__).parents[2] / "data" / "straggler_analysis"
ST, SE = DATA / "trace-ST.parquet", DATA / "trace-SE.parquet"

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@cache
def trace_of(path):
    return read_trace([path])


@cache
def diagnosis_of(path):
    return diagnose(trace_of(path))


def changed(path, folder, **columns):
    """A copy of a table with other columns (None drops one)."""
    table = pq.read_table(path)
    for name, column in columns.items():
        table = table.drop_columns([name]) if name in table.column_names else table
        if column is not None:
            table = table.append_column(name, pa.array(column))
    copy = folder / path.name
    pq.write_table(table, copy)
    return copy


def column(path, name):
    return pq.read_table(path).column(name).to_numpy().copy()


def test_each_compute_op_of_the_tables_is_a_span():
    forwards = trace_of(ST).of_kind(Kind.FORWARD).spans
    assert len(forwards) == 8 * 4 * 32  # ranks x microbatches x steps
    assert sorted(set(forwards["stage"].tolist())) == [0, 1, 2, 3]
    assert sorted(set(forwards["microbatch"].tolist())) == [0, 1, 2, 3]
    assert len(trace_of(SE).of_kind(Kind.BACKWARD).spans) == 64 * 8 * 43


def test_steps_take_what_the_authors_say():
    spans = trace_of(ST).spans
    step = spans[spans["step"] == 5]  # step 259 of the job, result-ST.json
    assert trace_of(ST).ranks[0].facts["step_numbers"][5] == 259
    assert (step["end_ns"].max() - step["start_ns"].min()) / 1e9 == pytest.approx(2.210853338241577, abs=1e-6)


@pytest.mark.parametrize("path", [ST, SE])
def test_ops_of_one_rank_do_not_overlap(path):
    for spans in trace_of(path).by_rank().values():
        ops = spans[np.isin(spans["kind"], [Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.SEND, Kind.RECV])]
        batch = (ops["start_ns"][1:] == ops["start_ns"][:-1]) & (ops["end_ns"][1:] == ops["end_ns"][:-1])
        assert (batch | (ops["start_ns"][1:] >= ops["end_ns"][:-1])).all()


def test_a_collective_that_is_not_recorded_is_inferred_from_its_ranks_going_on_together():
    trace = trace_of(ST)
    inferred = trace.where(trace.spans["op"] == Collective.OTHER).of_kind(Kind.COLLECTIVE).spans
    assert sorted(set(inferred["rank"].tolist())) == [6, 7]  # the twins of the last stage
    assert any("not in the record" in warning for warning in trace.warnings)


def test_the_stage_partitioning_job_is_explained_by_its_last_stage():
    found = diagnosis_of(ST)
    assert (found.job.pp, found.job.dp, found.job.microbatches, found.job.world_size) == (4, 2, 4, 8)
    assert (found.job.schedule_name, found.job.schedule_match) == ("1F1B", 1.0)
    assert found.steps.count == 30  # of 32: the first is warm-up, of the last the end is unknown
    assert (found.verdict.cause, found.verdict.stage, found.verdict.confidence) == ("imbalance", 3, "measured")
    last, others = found.stages[3], found.stages[:3]
    assert last.forward_s == pytest.approx(0.140, abs=0.001)
    assert last.backward_s == pytest.approx(0.2035, abs=0.002)
    assert all(stage.forward_s == pytest.approx(0.067, abs=0.0015) for stage in others)
    assert all(stage.backward_s == pytest.approx(0.143, abs=0.003) for stage in others)


def test_the_sequence_length_job_is_explained_by_its_microbatches_and_its_last_stage():
    found = diagnosis_of(SE)
    assert (found.job.pp, found.job.dp, found.job.microbatches, found.job.world_size) == (2, 32, 8, 128)
    assert found.verdict.cause == "imbalance"
    assert "between microbatches; besides, stage 1 computes" in found.verdict.text
    assert found.imbalance.microbatch > 5 * max(found.imbalance.stage, found.imbalance.rank)
    assert found.why.imbalance > 0.25


@pytest.mark.parametrize("path", [ST, SE])
def test_the_replay_reproduces_the_steps(path):
    assert diagnosis_of(path).replay_error_fraction <= 0.02
    assert diagnosis_of(path).why.unexplained <= 0.001


def test_a_job_of_64_ranks_and_43_steps_is_explained_in_a_few_seconds_of_cpu_time():
    trace = trace_of(SE)
    begin = time.process_time()
    diagnose(trace)
    assert time.process_time() - begin < 4  # 0.7 s where nothing else runs; benchmarks/stragglers.py measures it


def test_sizes_are_taken_from_the_ops_where_there_is_no_file_of_them(tmp_path):
    copy = tmp_path / ST.name
    copy.write_bytes(ST.read_bytes())
    trace = read_trace([copy])
    assert trace.job.world_size == 8
    assert trace.job.tp is None
    assert any("no meta-*.yaml" in warning for warning in trace.warnings)


def test_ops_of_unknown_types_are_named(tmp_path):
    optype = np.where(column(ST, "optype") == "gc", "a new op", column(ST, "optype"))
    trace = read_trace([changed(ST, tmp_path, optype=optype.tolist())])
    assert "ops of unknown types were left out: a new op" in trace.warnings


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"gmc": None}, "columns gmc are missing"),
        ({"stage": "names"}, "cannot be read"),
        ({"duration": "negative"}, "expected times in seconds"),
        ({"start_ts": "nan"}, "expected times in seconds"),
        ({"rank": "huge"}, "no small numbers"),
        ({"mc": "chunks"}, "vpp_size > 1"),
        ({"dp_rank": "gaps"}, "empty cells"),
        ({"optype": "names"}, "no op of a known type"),
    ],
)
def test_a_table_of_something_else_is_refused_in_one_line(tmp_path, columns, message):
    rows = len(column(ST, "rank"))
    bad = {
        "names": ["x"] * rows,
        "negative": np.full(rows, -1.0),
        "nan": np.full(rows, np.nan),
        "huge": np.full(rows, 2**40),
        "chunks": np.ones(rows, int),
        "gaps": [None] * rows,
    }
    changes = {name: bad.get(kind) if kind else None for name, kind in columns.items()}
    with pytest.raises(BadRecord, match=message) as caught:
        read_trace([changed(ST, tmp_path, **changes)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [4, 100, 40_000])
def test_a_cut_off_file_is_refused_in_one_line(tmp_path, keep):
    cut = tmp_path / "trace-ST.parquet"
    cut.write_bytes(ST.read_bytes()[:keep])
    with pytest.raises(BadRecord, match="cannot be read") as caught:
        read_trace([cut])
    assert "\n" not in str(caught.value)


def test_damaged_bytes_give_a_trace_or_the_error_of_a_bad_record(tmp_path):
    random = np.random.default_rng(0)
    whole = np.frombuffer(ST.read_bytes(), np.uint8)
    damaged = tmp_path / "trace-ST.parquet"
    for _ in range(60):
        copy = whole.copy()
        copy[random.integers(4, len(copy), 8)] = random.integers(0, 256, 8)
        damaged.write_bytes(copy.tobytes())
        with contextlib.suppress(BadRecord):
            assert len(read_trace([damaged]))


def test_a_column_whose_name_is_no_text_is_a_bad_record(tmp_path):
    damaged = tmp_path / "trace-ST.parquet"
    damaged.write_bytes(ST.read_bytes().replace(b"optype", b"opt\xff\xffe"))
    with pytest.raises(BadRecord, match="expected a table of ops in Parquet, and it cannot be read"):
        read_trace([damaged])


def test_tables_of_two_jobs_are_not_mixed():
    with pytest.raises(BadRecord, match="a job of its own"):
        read_trace([ST, SE])


def test_a_file_without_the_magic_of_parquet_is_not_recognised(tmp_path):
    other = tmp_path / "other.parquet"
    other.write_bytes(b"not Parquet")
    assert not StragglerAnalysis().recognises(other)
    with pytest.raises(NotARun):
        read_trace([other])


def test_without_pyarrow_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackage, match=r"pip install 'ppdiag\[parquet\]'"):
        read_trace([ST])
