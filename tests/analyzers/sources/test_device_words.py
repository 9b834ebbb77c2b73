"""What the record says of a device: its times on the host's clock, memory, NVML."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.sources.device_words import DeviceWords, move_posts
from ppdiag.hooks.recorder import Recorder
from ppdiag.hooks.writer import Writer
from ppdiag.model import COMPUTE_KINDS, DEVICE_SPAN_STRUCT, WAIT_KINDS, Flag, Kind, RankStatus
from ppdiag.rundir import BLOCK_HEADER
from tests.analyzers.factory import MS, Pipeline, spans_of

if TYPE_CHECKING:
    from pathlib import Path

    from ppdiag.diagnosis import Diagnosis
    from ppdiag.trace import Trace

DEVICE = int(Flag.DEVICE)


def pipeline(**changes: Any) -> Pipeline:
    orders = schedules.order("1F1B", ranks=3, chunks=1, microbatches=6)
    return replace(Pipeline(orders, [0, 1, 2], steps=5, transfer=lambda src, dst: MS, rendezvous=True), **changes)  # noqa: ARG005


def on_device(trace: Trace, *, ahead_ns: int) -> Trace:
    """The same ops timed on devices, each launched so long before it began."""
    spans = trace.spans.copy()
    timed = np.isin(spans["kind"], (*COMPUTE_KINDS, *WAIT_KINDS))
    spans["flags"][timed] |= DEVICE
    spans["launch_ns"] = spans["start_ns"] - ahead_ns
    return replace(trace, spans=spans)


def why(diagnosis: Diagnosis) -> tuple[float, ...]:
    found = diagnosis.why
    return found.bubble, found.imbalance, found.communication, found.host, found.unexplained


def test_ops_launched_as_they_begin_are_explained_as_on_the_host() -> None:
    trace = pipeline(host_gap=2 * MS).trace()
    here, there = diagnose(trace), diagnose(on_device(trace, ahead_ns=0))
    assert why(there) == pytest.approx(why(here), abs=1e-9)
    assert there.where == here.where


def test_a_gap_after_a_launch_in_time_is_unexplained_and_no_host_time() -> None:
    trace = pipeline(between=lambda rank, step: 0, before_optimizer=lambda rank, step: 20 * MS).trace()  # noqa: ARG005
    late, early = diagnose(on_device(trace, ahead_ns=0)), diagnose(on_device(trace, ahead_ns=1_000 * MS))
    assert late.why.host > 0.05
    assert late.why.unexplained < 0.01
    assert early.why.host < 0.01
    assert early.why.unexplained == pytest.approx(late.why.host, abs=0.02)
    assert late.where.host > 0.05
    assert early.where.host < 0.01
    assert early.where.unexplained == pytest.approx(late.where.host, abs=0.01)


def test_of_a_gap_the_part_before_the_launch_is_host_time() -> None:
    trace = pipeline(before_optimizer=lambda rank, step: 20 * MS).trace()  # noqa: ARG005
    late, half = diagnose(on_device(trace, ahead_ns=0)), diagnose(on_device(trace, ahead_ns=10 * MS))
    assert half.where.host == pytest.approx(late.where.host / 2, abs=0.01)
    assert half.where.unexplained == pytest.approx(late.where.host / 2, abs=0.01)


def span(
    kind: Kind, start: int, end: int, *, launch: int, post: int | None = None, flags: int = DEVICE
) -> dict[str, int]:
    row = {"kind": kind, "start_ns": start, "end_ns": end, "launch_ns": launch, "flags": flags}
    return row if post is None else {**row, "post_ns": post}


def test_a_message_begins_when_the_stream_has_done_what_was_launched_before_it() -> None:
    spans = spans_of(
        [
            span(Kind.FORWARD, 1_000, 5_000, launch=10),
            span(Kind.SEND, 5_000, 5_100, launch=30, post=20),
            span(Kind.FORWARD, 5_100, 9_000, launch=40),
            span(Kind.RECV, 9_000, 9_500, launch=60, post=15),  # posted before the send, after the first forward
        ]
    )
    move_posts(spans)
    posts = dict(zip(spans["kind"].tolist(), spans["post_ns"].tolist(), strict=True))
    assert (posts[Kind.SEND], posts[Kind.RECV]) == (5_000, 5_000)


def test_a_post_that_the_host_made_late_stays_where_it_is() -> None:
    spans = spans_of([span(Kind.FORWARD, 0, 500, launch=0), span(Kind.SEND, 8_000, 8_100, launch=7_500, post=7_000)])
    move_posts(spans)
    assert spans["post_ns"][spans["kind"] == Kind.SEND] == [7_000]


def test_a_message_never_waited_for_ends_where_its_post_is() -> None:
    never = span(Kind.SEND, 20, 20, launch=20, post=20, flags=int(Flag.NEVER_WAITED))
    waited = span(Kind.RECV, 6_000, 6_100, launch=50, post=40)
    spans = spans_of([span(Kind.FORWARD, 1_000, 5_000, launch=10), never, waited])
    move_posts(spans)
    moved = spans[spans["kind"] == Kind.SEND][0]
    assert (moved["post_ns"], moved["start_ns"], moved["end_ns"]) == (5_000, 5_000, 5_000)


def test_a_post_inside_an_op_lies_before_its_own_wait() -> None:
    spans = spans_of([span(Kind.FORWARD, 1_000, 9_000, launch=10), span(Kind.RECV, 4_000, 5_000, launch=30, post=20)])
    move_posts(spans)
    assert spans["post_ns"][spans["kind"] == Kind.RECV] == [4_000]


def test_a_wait_on_another_stream_is_where_the_work_is_then_and_one_that_blocked_the_host_stays() -> None:
    aside = span(Kind.COLLECTIVE, 30, 40, launch=30, post=20, flags=0)
    blocked = span(Kind.RECV, 50, 2_000_000, launch=50, post=45, flags=0)
    waited = span(Kind.SEND, 6_000_000, 6_000_100, launch=90, post=80)
    spans = spans_of([span(Kind.FORWARD, 1_000, 5_000_000, launch=10), aside, blocked, waited])
    move_posts(spans)
    rows = {int(row["kind"]): (row["post_ns"], row["start_ns"], row["end_ns"]) for row in spans}
    assert rows[Kind.COLLECTIVE] == (5_000_000, 5_000_000, 5_000_010)
    assert rows[Kind.RECV] == (45, 50, 2_000_000)
    assert rows[Kind.SEND] == (5_000_000, 6_000_000, 6_000_100)


def test_host_timed_spans_are_left_alone() -> None:
    spans = spans_of(
        [span(Kind.FORWARD, 0, 500, launch=0, flags=0), span(Kind.SEND, 700, 800, launch=0, post=100, flags=0)]
    )
    before = spans.copy()
    move_posts(spans)
    assert (spans == before).all()


def test_in_blocks_of_a_dozen_a_device_span_takes_64_bytes_and_it_comes_back_with_its_launch(tmp_path: Path) -> None:
    assert struct.calcsize(DEVICE_SPAN_STRUCT) + BLOCK_HEADER.size / 12 <= 64
    recorder = Recorder()
    header = {"rank": 0, "world_size": 1, "cuda": "13.0", "clock": "one"}
    writer = Writer(recorder, folder=str(tmp_path), header=header, max_bytes=1 << 30, stop=print)
    tail = (50_000, 0, 0, -1, -1, 0, 3, 2, 0, -1, 0, DEVICE, int(Kind.FORWARD), 0)
    recorder.append((50_000, 90_000, *tail, 0.015625))  # type: ignore[arg-type]  # the launch is no integer
    recorder.append((95_000, 96_000, 95_000, *tail[1:11], 0, *tail[12:]))  # of the host: one value less
    recorder.lines += [
        {"type": "fact", "name": "device_clock_error_ns", "value": 40_000},
        {"type": "fact", "name": "untimed_on_device", "value": 2},
        {"type": "memory", "stage": 2, "current_bytes": 10, "peak_bytes": 30},
        {"type": "memory", "stage": 2, "current_bytes": 20, "peak_bytes": 25},
        {"type": "sample", "local_ns": 1, "gpu_percent": 90, "throttle_reasons": 0x40},
        {"type": "sample", "local_ns": 2, "gpu_percent": 100, "throttle_reasons": 0x01},
        {"type": "sample", "local_ns": 3, "gpu_percent": "hostile"},
    ]
    writer.close(RankStatus.FINISHED)
    trace = read_trace([tmp_path])
    assert trace.spans["launch_ns"].tolist() == [50_000 - 15_625, 95_000]
    assert (trace.spans["flags"] & DEVICE).tolist() == [DEVICE, 0]
    assert trace.clock_error_s == pytest.approx(40e-6)
    facts = trace.ranks[0].facts
    assert facts["peak_memory_bytes"] == 30
    assert facts["nvml"] == {"gpu_percent": 95.0}
    assert any("hardware thermal slowdown 50%" in warning for warning in trace.warnings), trace.warnings
    assert any("2 moments could not be timed on its device" in warning for warning in trace.warnings)


def test_a_file_of_a_cpu_build_has_no_field_more(tmp_path: Path) -> None:
    writer = Writer(Recorder(), folder=str(tmp_path), header={"rank": 0, "cuda": ""}, max_bytes=1 << 30, stop=print)
    writer.close(RankStatus.FINISHED)
    header = json.loads((tmp_path / "rank00000-0.spans").read_bytes().split(b"\n")[1])
    assert "launch_lead_ms" not in dict(header["fields"])


@pytest.mark.parametrize("bits", [0x00, 0x01, 0x02, 0x10, 0x100])
def test_idle_clocks_and_those_that_somebody_set_are_no_slowdown(bits: int) -> None:
    words = DeviceWords()
    words.take_sample({"type": "sample", "local_ns": 1, "throttle_reasons": bits})
    assert words.warnings(0) == []


def test_what_the_forwards_of_the_stages_add_is_the_activations_of_a_microbatch() -> None:
    words = DeviceWords()
    F, B = int(Kind.FORWARD), int(Kind.BACKWARD)
    readings = [(0, F, 0, 150), (0, F, 0, 190), (0, F, 2, 220), (0, F, 0, 260), (0, B, 2, 230), (1, F, 0, 900)]
    for step, kind, stage, current in readings:
        words.take_memory({"step": step, "kind": kind, "stage": stage, "current_bytes": current, "peak_bytes": 1000})
    # stage 0 adds 40 and 40, stage 2 adds 30; the first reading of a step has none before it
    assert words.facts() == {"peak_memory_bytes": 1000, "activation_bytes": 70}
