"""MegaScan's traces: a real interleaved job is explained as published; nothing damaged brings the reader down."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.analyzers import graph as step_graph
from ppdiag.analyzers import program as rank_program
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.replay import replay
from ppdiag.analyzers.shape import label
from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.sources.megascan import MegaScan
from ppdiag.analyzers.steps import find_steps
from ppdiag.analyzers.why import eight_worlds
from ppdiag.errors import BadRecord, PpdiagError
from ppdiag.model import Kind

DATA = Path(__file__).parents[2] / "data" / "megatronapp"
M8, ITERATION_10, RAW = (
    DATA / f"{name}.json" for name in ("interleaved_p4_v4_m8", "interleaved_p4_v4_iter10", "raw_rank0")
)


@cache
def trace_of(path):
    return read_trace([path])


@cache
def diagnosis_of(path):
    return diagnose(trace_of(path))


def pipeline_of(ranks=2, iterations=4):
    """A merged trace of GPipe with one microbatch: F of 1 ms down, B of 2 ms up, nothing between them."""
    events = []
    for iteration in range(iterations):
        begin = 10_000 * iteration
        last = begin + 3000 * ranks
        args = {"iteration": iteration}
        for rank in range(ranks):
            where = {"pid": rank, "tid": 0}
            labels = {**args, "microbatch": 0, "model_chunk": 0, "pp_rank": rank}
            times = {"forward": begin + 1000 * rank, "backward": last - 2000 * (rank + 1)}
            events.append({"name": "iteration begin", "ph": "i", "ts": begin, **where, "args": args})
            for name, start in times.items():
                length = 1000 if name == "forward" else 2000
                events.append({"name": name, "ph": "B", "ts": start, **where, "args": args})
                events.append({"name": name, "ph": "E", "ts": start + length, **where, "args": labels})
            events.append({"name": "reduce", "ph": "i", "ts": last, **where, "args": args})
            events.append({"name": "iteration end", "ph": "i", "ts": last, **where, "args": args})
    return sorted(events, key=lambda event: event["ts"])


def written(folder, events):
    path = folder / "trace.json"
    path.write_text(events if isinstance(events, str) else json.dumps(events))
    return path


def test_each_op_is_a_span_with_its_virtual_stage():
    spans = trace_of(M8).of_kind(Kind.FORWARD, Kind.BACKWARD).spans
    assert len(spans) == 2 * 4 * 4 * 8 * 20  # kinds x ranks x chunks x microbatches x iterations
    assert sorted(set(spans["stage"].tolist())) == list(range(16))
    assert (spans["stage"] == 4 * spans["chunk"] + spans["rank"]).all()


def test_ops_wait_for_the_message_of_the_stage_before():
    trace = trace_of(ITERATION_10)
    received = trace.of_kind(Kind.RECV).spans
    assert len(received) == 2 * 15 * 8  # activations and gradients between 16 stages
    assert set(zip(received["rank"].tolist(), received["peer"].tolist(), strict=True)) == {
        (rank, (rank + step) % 4) for rank in range(4) for step in (1, 3)
    }


def test_the_interleaved_job_is_explained_by_its_last_chunk():
    found = diagnosis_of(M8)
    assert (found.job.pp, found.job.vpp, found.job.microbatches) == (4, 4, 8)
    assert (found.job.schedule_name, found.job.schedule_match) == ("Interleaved1F1B", 1.0)
    assert found.steps.count == 18  # of 20: the first of 3.3 s is warm-up, of the last the end is unknown
    assert (found.verdict.cause, found.verdict.stage, found.verdict.confidence) == ("imbalance", 15, "inferred")
    last = next(stage for stage in found.stages if stage.stage == 15)
    assert last.forward_s == pytest.approx(17.1e-3, abs=0.2e-3)
    assert last.backward_s == pytest.approx(19.2e-3, abs=0.2e-3)
    assert found.replay_error_fraction <= 0.02
    assert found.why.unexplained <= 0.001


def test_the_idle_time_of_the_ranks_is_the_published_one():
    """Idle of the pipeline phase: .504 .527 .518 .208; our fractions are of the whole step."""
    found = diagnosis_of(M8)
    step_s = sum(found.step_times_s) / len(found.step_times_s)
    of_pipeline = step_s / found.phases.pipeline_s
    assert found.phases.pipeline_s == pytest.approx(0.6774, abs=0.003)
    idle = [1 - rank.busy_fraction * of_pipeline for rank in found.ranks]
    assert idle == pytest.approx([0.504, 0.527, 0.518, 0.208], abs=0.005)


SPLIT = [56.2, 5.3, 23.4, 15.1]
"""Work, bubble, imbalance and the rest, in per cent of the pipeline phase, as published."""


def test_the_diagnosis_splits_the_step_as_published():
    found = diagnosis_of(M8)
    of_pipeline = sum(found.step_times_s) / len(found.step_times_s) / found.phases.pipeline_s
    parts = [(1 - found.idle_fraction) * of_pipeline, found.why.bubble * of_pipeline, found.why.imbalance * of_pipeline]
    assert [100 * part for part in (*parts, 1 - sum(parts))] == pytest.approx(SPLIT, abs=1)


def test_the_worlds_of_the_replay_are_the_published_ones():
    """The published split takes communication, launches and host time away first, and evens out work last."""
    trace = trace_of(M8)
    steps = find_steps(trace)
    trace, _ = label(trace, steps)
    program = rank_program.build(trace, steps)
    (graph,), _ = step_graph.build_graphs(program, steps)
    worlds = eight_worlds(graph)
    chosen = [worlds[True, True, True], worlds[False, False, True], worlds[False, False, False]]
    _, own_work, equal_work = (1e3 * float(np.median(times)) for times in replay(graph, chosen).duration_WK)
    busy = 1e3 * float(np.median(graph.work_NK.sum(axis=0))) / len(graph.ranks_R)
    pipeline = 1e3 * diagnosis_of(M8).phases.pipeline_s
    assert own_work == pytest.approx(574.9, abs=0.5)
    assert equal_work == pytest.approx(416.1, abs=0.5)
    assert busy == pytest.approx(380.4, abs=0.5)
    assert equal_work == pytest.approx(busy / (1 - 3 / 35), rel=1e-3)
    parts = [busy, equal_work - busy, own_work - equal_work, pipeline - own_work]
    assert [100 * part / pipeline for part in parts] == pytest.approx(SPLIT, abs=0.3)


def test_repairing_the_last_chunk_is_worth_a_fifth_of_the_step():
    (advice, *_) = diagnosis_of(M8).symptoms[0].advice
    assert advice.gain_fraction == pytest.approx(0.21, abs=0.02)


def test_one_iteration_is_explained_too():
    found = diagnosis_of(ITERATION_10)
    assert found.steps.count == 1
    assert found.verdict.stage == 15


def test_the_file_of_one_rank_is_said_to_be_that():
    found = diagnosis_of(RAW)
    assert len(trace_of(RAW).of_kind(Kind.FORWARD)) == 4 * 8 * 20
    assert found.verdict.confidence == "undecided"
    assert any("only one rank is in this recording" in warning for warning in found.warnings)
    assert found.steps.median_s == pytest.approx(0.720, abs=0.005)


def raw_of(events, rank):
    """The raw file of one rank of a merged trace."""
    rows, zero, last = [], 0, 0
    for event in (event for event in events if event["pid"] == rank):
        now = event["ts"] * 1000
        labels = {name: value for name, value in event["args"].items() if name != "iteration"}
        if event["name"] == "iteration begin":
            rows.append({"name": "iteration", "ph": "B", "pad_before": now - last})
            zero = now
        elif event["name"] == "iteration end":
            rows.append({"name": "iteration", "ph": "E", "rel_ts": now - zero})
            last = now
        elif event["name"] != "reduce":
            rows.append({**labels, "name": event["name"], "ph": event["ph"], "rel_ts": now - zero})
    return rows


def test_raw_files_of_all_ranks_say_what_the_merged_file_says(tmp_path):
    merged = pipeline_of(ranks=3)
    for rank in range(3):
        (tmp_path / f"trace-rank{rank}.json").write_text(json.dumps(raw_of(merged, rank)))
    together = read_trace([tmp_path])
    alone = read_trace([written(tmp_path, merged)])
    ops = [trace.of_kind(Kind.FORWARD, Kind.BACKWARD).spans for trace in (together, alone)]
    for name in ("rank", "stage", "microbatch", "start_ns", "end_ns"):
        assert ops[0][name].tolist() == ops[1][name].tolist()
    assert together.clock_error_s == 0


def test_a_step_without_gaps_is_work_and_bubble(tmp_path):
    found = diagnose(read_trace([written(tmp_path, pipeline_of(ranks=2))]))
    assert found.step_times_s == pytest.approx([0.010, 0.010])
    # each rank works 3 of 10 ms; the pipeline takes 6, of which the other rank works 3; 4 lie between two iterations
    assert found.idle_fraction == pytest.approx(0.7)
    assert found.why.bubble == pytest.approx(0.3)
    assert found.why.imbalance == pytest.approx(0.0, abs=1e-9)


def test_a_file_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path):
    text = json.dumps(pipeline_of(), indent=2)
    trace = read_trace([written(tmp_path, text[: int(len(text) * 0.7)])])
    assert 0 < len(trace.of_kind(Kind.FORWARD)) < 8
    assert any("cut off" in warning for warning in trace.warnings)


def test_ops_without_an_end_and_odd_events_are_counted(tmp_path):
    events = pipeline_of()
    last_end = max(i for i, event in enumerate(events) if event["ph"] == "E")
    events[last_end] = {**events[last_end], "args": {"iteration": 3, "microbatch": "none"}}
    odd = [1, None, {"name": "forward", "ph": "B", "ts": float(2**70), "pid": 0, "args": {"iteration": 0}}]
    begun = {"name": "backward", "ph": "B", "ts": 99_000, "pid": 1, "tid": 0, "args": {"iteration": 3}}
    trace = read_trace([written(tmp_path, [*events, *odd, begun])])
    assert "4 events were left out: not as expected" in trace.warnings
    assert "1 backward begun, and never ended, were left out" in trace.warnings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"name": "iteration begin", "ph": "i", "ts": 0, "pid": 0, "args": {"iteration": 0}}]', "found none"),
        ('[{"name": "iteration", "ph": "B", "pad_before": 0}]', "found none"),
        ('["iteration begin"', "cannot be read"),
        ("[" * 100_000 + '"pad_before"', "cannot be read"),
    ],
)
def test_a_file_without_ops_is_refused_in_one_line(tmp_path, text, message):
    with pytest.raises(BadRecord, match=message) as caught:
        MegaScan().read([written(tmp_path, text)], None)
    assert "\n" not in str(caught.value)


def test_two_files_of_one_rank_are_not_mixed(tmp_path):
    for name in ("a_rank0.json", "b_rank0.json"):
        (tmp_path / name).write_text(json.dumps(raw_of(pipeline_of(), 0)))
    with pytest.raises(BadRecord, match="rank 0 is in an earlier file too"):
        read_trace([tmp_path])


@pytest.mark.parametrize("text", ["{}", '[{"name": "other"}]', ""])
def test_other_json_is_not_recognised(tmp_path, text):
    assert not MegaScan().recognises(written(tmp_path, text))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
NAMES = st.sampled_from(["iteration begin", "iteration end", "reduce", "iteration", "forward", "backward", "other"])
LABELS = st.dictionaries(
    st.sampled_from(["iteration", "microbatch", "model_chunk", "pp_rank"]), st.integers(0, 3) | SCALARS
)
EVENTS = st.fixed_dictionaries(
    {"name": NAMES | SCALARS, "ph": st.sampled_from(["B", "E", "i"]) | SCALARS},
    optional={
        "pid": st.integers(0, 2) | SCALARS,
        "ts": st.integers(0, 10**6) | SCALARS,
        "rel_ts": st.integers(0, 10**9) | SCALARS,
        "pad_before": st.integers(0, 10**9) | SCALARS,
        "args": LABELS | SCALARS,
        "microbatch": SCALARS,
    },
)


def explain(path):
    try:
        diagnose(MegaScan().read([path], None))
    except PpdiagError as error:
        assert "\n" not in str(error)  # noqa: PT017


@given(events=st.lists(EVENTS | SCALARS, max_size=30))
def test_any_events_give_a_diagnosis_or_one_clear_error(tmp_path_factory, events):
    explain(written(tmp_path_factory.mktemp("events"), json.dumps(events)))


@given(data=st.data())
def test_a_trace_with_damaged_events_gives_a_diagnosis_or_one_clear_error(tmp_path_factory, data):
    events = pipeline_of()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(events) - 1))
        event = events[place]
        if isinstance(event, dict):
            name = data.draw(st.sampled_from(sorted(event)))
            events[place] = {**event, name: data.draw(LABELS if name == "args" else st.integers(0, 5) | SCALARS)}
    explain(written(tmp_path_factory.mktemp("events"), json.dumps(events)))
