"""Traces of torch.profiler: what is kept of a file is what a few lines of json find in it, exactly."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.sources.kineto import workers
from ppdiag.analyzers.sources.kineto.events import Category, read_events
from ppdiag.analyzers.sources.kineto.rank import read_rank
from ppdiag.analyzers.sources.kineto.source import Kineto
from ppdiag.errors import NoPipelineFound, NotARun

DATA = Path(__file__).parents[2] / "data" / "kineto"
FILES = sorted(DATA.glob("hta_*.json.gz"))
ON_A_HOST = ("cpu_only", "distributed_info_unavailable", "mixed_files", "rank_unavailable")
ON_A_DEVICE = [path for path in FILES if not any(word in path.name for word in ON_A_HOST)]
GLOO = sorted(DATA.glob("gloo/*rank0.json.gz"))
KERNELS = ("kernel", "Kernel")
COPIES = ("gpu_memcpy", "gpu_memset")


@cache
def raw(path):
    """All of a file by the standard library, numbers with all their digits."""
    return json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)


def complete(path, *categories):
    return [event for event in raw(path)["traceEvents"] if event["ph"] == "X" and event["cat"] in categories]


def interval(event, base):
    start = base + int(event["ts"] * 1000)
    return start, start + int(event["dur"] * 1000)


def covered(intervals):
    """The length of a union, by walking along it."""
    total, reach = 0, None
    for start, end in sorted(intervals):
        if reach is None or start > reach:
            total, reach = total + end - start, end
        elif end > reach:
            total, reach = total + end - reach, end
    return total


def name(path):
    return path.name.split(".")[0]


@pytest.mark.parametrize("path", [*FILES, *GLOO], ids=name)
def test_every_kernel_copy_and_annotation_is_read_to_the_nanosecond(path):
    events = read_events(path)
    base = raw(path).get("baseTimeNanoseconds", 0)
    for category, words in (
        (Category.KERNEL, KERNELS),
        (Category.COPY, COPIES),
        (Category.LABEL, ("user_annotation",)),
        (Category.DEVICE_LABEL, ("gpu_user_annotation",)),
    ):
        chosen = events.of(category)
        found = sorted(zip(events.start_ns[chosen].tolist(), events.end_ns[chosen].tolist(), strict=True))
        assert found == sorted(interval(event, base) for event in complete(path, *words))
    assert not events.left_out
    assert not events.damage


@pytest.mark.parametrize("path", [*FILES, *GLOO], ids=name)
def test_every_op_of_the_host_is_read_where_they_are_asked_for(path):
    events = read_events(path, "cpu")
    base = raw(path).get("baseTimeNanoseconds", 0)
    chosen = events.of(Category.CPU_OP, Category.COMMUNICATION_OP)
    found = sorted(zip(events.start_ns[chosen].tolist(), events.end_ns[chosen].tolist(), strict=True))
    assert found == sorted(interval(event, base) for event in complete(path, "cpu_op"))


@pytest.mark.parametrize("path", ON_A_DEVICE, ids=name)
def test_the_sums_of_a_rank_are_those_of_the_raw_events(path):
    sums = read_rank(path).sums
    base = raw(path).get("baseTimeNanoseconds", 0)
    kernels, copies = complete(path, *KERNELS), complete(path, *COPIES)
    talks = [interval(event, base) for event in kernels if "nccl" in event["name"].lower()]
    computes = [interval(event, base) for event in kernels if "nccl" not in event["name"].lower()]
    everything = [*talks, *computes, *(interval(event, base) for event in copies)]
    assert sums.kernels == len(kernels)
    assert sums.communication_kernels == len(talks)
    assert sums.compute_ns == covered(computes)
    assert sums.communication_ns == covered(talks)
    assert sums.exposed_ns == covered([*talks, *computes]) - covered(computes)
    assert sums.idle_ns == max(end for _, end in everything) - min(everything)[0] - covered(everything)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_trace_without_a_pipeline_says_what_it_can_and_what_it_cannot(path):
    with pytest.raises(NoPipelineFound) as found:
        read_trace([path])
    assert "bubble and imbalance of stages cannot be told" in str(found.value)
    assert str(read_rank(path).sums) in str(found.value)


@pytest.mark.parametrize(
    ("file", "rank"),
    [
        ("hta_cpu_only_rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", 34),  # the file says so
        ("hta_large_integer_trace_rank-70.Mar_25_20_48_12.2861.pt.trace.json.gz", 70),  # its name does
        ("hta_trace_file_list_inference_rank_1.json.gz", 1),  # said behind the events
        ("hta_rank_unavailable_rank_not_found.json.gz", None),
        ("hta_distributed_info_unavailable_distributed_info_not_found.json.gz", None),
    ],
)
def test_the_rank_is_that_of_the_file_then_of_its_name(file, rank):
    assert read_rank(DATA / file).rank == rank


def test_collectives_of_nccl_are_known_by_name_and_by_their_arguments():
    path = DATA / "hta_nccl_parser_config_nccl_data.json.gz"
    events = read_events(path)
    told = [event["args"]["Collective name"] for event in complete(path, *KERNELS) if "nccl" in event["name"]]
    kernels = np.flatnonzero(events.is_communication())
    assert sorted(str(events.arguments[kernel].collective) for kernel in kernels.tolist()) == sorted(told)
    assert len(told) == 21


def test_ranks_that_left_no_trace_are_named():
    with pytest.raises(NoPipelineFound, match=r"1 of 2 ranks left no trace here \(rank 1\)"):
        read_trace([DATA / "hta_nccl_parser_config_nccl_data.json.gz"])


def test_kernels_of_all_to_all_are_no_pipeline():
    with pytest.raises(NoPipelineFound, match="kernels of sends and receives were left out"):
        read_trace([DATA / "hta_timeline_analysis_sampled_rank-0.json.gz"])


def test_a_rank_that_is_in_no_file_can_be_given():
    path = DATA / "hta_rank_unavailable_rank_not_found.json.gz"
    with pytest.raises(NoPipelineFound, match="rank 5 in"):
        Kineto(ranks=[5]).read([path], None)
    with pytest.raises(NoPipelineFound, match="says no rank, taken for rank 0"):
        Kineto().read([path], None)


def test_files_of_other_sorts_in_a_folder_are_named(tmp_path):
    for file in GLOO[:1]:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "settings.json").write_text('{"a": 1}')
    (tmp_path / "notes.txt").write_text("nothing")
    found = Kineto().read([tmp_path], None)
    assert "left out, no traces of torch.profiler: settings.json" in found.warnings


def test_other_json_is_not_taken_for_a_trace(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2, 3]}')
    assert not Kineto().recognises(path)
    with pytest.raises(NotARun):
        read_trace([path])


def test_files_read_in_processes_give_the_same(monkeypatch, tmp_path):
    damaged = tmp_path / "rank9.json"
    damaged.write_text("{}")
    files = [*GLOO, damaged, *ON_A_DEVICE[:3]]
    alone, failures = workers.read_ranks(files, None)
    monkeypatch.setattr(workers, "WORTH_BYTES", 0)
    monkeypatch.setattr(workers, "_processors", lambda: 2)
    together, same_failures = workers.read_ranks(files, None)
    assert [record.name for record in together] == [record.name for record in alone]
    assert all((one.spans == other.spans).all() for one, other in zip(alone, together, strict=True))
    assert [str(failure) for failure in same_failures] == [str(failure) for failure in failures]
    assert len(failures) == 1


def test_what_a_trace_does_not_hold_is_no_zero():
    file = DATA / "hta_ns_resolution_trace_rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz"
    assert not [event for event in complete(file, *KERNELS) if "nccl" in event["name"].lower()]
    assert "no kernel of NCCL or RCCL" in str(read_rank(file).sums)
    alone = DATA / "hta_large_integer_trace_rank-70.Mar_25_20_48_12.2861.pt.trace.json.gz"
    assert "nothing that computes, communicating 0.050 ms" in str(read_rank(alone).sums)


@pytest.mark.parametrize(
    ("called", "rank"),
    [
        ("rank3.json", 3),
        ("torch_rank-12.json", 12),
        ("trace-3-of-8.json", 3),
        ("5_of_16.json", 5),
        ("crank3.json", None),
        ("best-of-8.json", None),
    ],
)
def test_a_rank_in_a_name_is_taken_where_the_file_says_none(tmp_path, called, rank):
    path = tmp_path / called
    path.write_text('{"schemaVersion": 1, "traceEvents": []}')
    assert read_rank(path).rank == rank
