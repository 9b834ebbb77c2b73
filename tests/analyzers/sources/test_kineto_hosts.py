"""Traces of several hosts: which ranks share a clock, and how far the clocks may be apart."""

from __future__ import annotations

import json

import pytest

from ppdiag.analyzers.clock import WALL_CLOCK_ERROR_S
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.sources import read_trace
from tests.analyzers.sources.kineto_factory import write_job

PROCESS = 5
"""Of the factory's traces."""


def on_hosts(folder, names, ahead_us=0.0, **header):
    """The factory's job, as tensorboard_trace_handler names the files of hosts; rank 1's clock is ahead."""
    paths = []
    for rank, (path, host) in enumerate(zip(write_job(folder), names, strict=True)):
        trace = json.loads(path.read_text())
        for event in trace["traceEvents"]:
            event["ts"] += 1e6 + rank * ahead_us
        path.unlink()
        named = f"{host}_{PROCESS}.170000000000000{rank}.pt.trace.json" if host else f"rank{rank}.json"
        paths.append(folder / named)
        paths[-1].write_text(json.dumps({**trace, **header}))
    return paths


def test_the_error_of_several_hosts_is_what_their_messages_bound_it_to(tmp_path):
    trace = read_trace(on_hosts(tmp_path, ("node-a", "node-b")))
    # Each transfer takes 100 us, and each receive was there before its send.
    assert trace.clock_error_s == pytest.approx(100e-6)
    assert {facts.host for facts in trace.ranks.values()} == {"node-a", "node-b"}
    said = [warning for warning in trace.warnings if "clocks of their own" in warning]
    assert len(said) == 1
    assert said[0].endswith("taken as they are; by the messages between them they may be off by up to 0.10 ms")


@pytest.mark.parametrize("ahead_us", [-30_000.0, 30_000.0])
def test_a_host_ahead_by_three_steps_is_moved_back_as_far_as_messages_show_it(tmp_path, ahead_us):
    trace = read_trace(on_hosts(tmp_path, ("node-a", "node-b"), ahead_us))
    assert any("moved by up to 29.90 ms" in warning for warning in trace.warnings)
    assert trace.clock_error_s == pytest.approx(200e-6)
    assert diagnose(trace).job.schedule_match == 1.0


@pytest.mark.parametrize("names", [("node-a", "node-a"), ("", "")])
def test_one_host_or_none_that_is_known_is_one_clock(tmp_path, names):
    trace = read_trace(on_hosts(tmp_path, names))
    assert trace.clock_error_s == 0.0
    assert not any("clocks" in warning for warning in trace.warnings)


def test_hosts_are_told_by_the_header_too(tmp_path):
    paths = on_hosts(tmp_path, ("", ""))
    for path, host in zip(paths, ("left", "right"), strict=True):
        path.write_text(json.dumps({**json.loads(path.read_text()), "host_name": host}))
    assert read_trace(paths).clock_error_s == pytest.approx(100e-6)


def test_a_number_in_a_name_that_is_no_process_makes_no_host(tmp_path):
    paths = on_hosts(tmp_path, ("stage0", "stage1"))
    paths = [path.rename(tmp_path / path.name.replace(f"_{PROCESS}.", "_77.")) for path in paths]
    assert read_trace(paths).clock_error_s == 0.0


def test_more_ranks_than_a_host_has_devices_are_on_several(tmp_path):
    """Four ranks in two pipelines, of hosts with two devices: no message goes from one host to the other."""
    paths = []
    for first in (0, 2):
        folder = tmp_path / str(first)
        folder.mkdir()
        for path in write_job(folder, members=(first, first + 1)):
            trace = json.loads(path.read_text())
            path.write_text(json.dumps({**trace, "deviceProperties": [{"id": 0}, {"id": 1}]}))
            paths.append(path)
    trace = read_trace(paths)
    assert trace.clock_error_s == WALL_CLOCK_ERROR_S
    assert any("no file names its host; each has 2 devices" in warning for warning in trace.warnings)
