"""Lanes, names and arrows of an export."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.model import HostCause, Kind
from ppdiag.reports import tracks as tracks_module
from ppdiag.reports.tracks import _lane_of, ranks_of
from tests.reports.exports import MS, make_export


def drawn(exported):
    """(rank, track, name, start ms, end ms) of every slice."""
    return {
        (rank, track.name, name, start / MS, end / MS)
        for rank, _, tracks in ranks_of(exported)
        for track in tracks
        for name, start, end, _, _ in track.slices()
    }


def test_each_span_and_each_idle_time_is_on_its_track():
    assert drawn(make_export()) == {
        (0, "compute", "forward 0", 0, 10),
        (0, "sends", "send to rank 1", 10, 12),
        (0, "collectives", "all_reduce", 12, 30),
        (1, "receives", "wait for rank 0", 1, 10),
        (1, "receives", "receive from rank 0", 10, 13),
        (1, "idle", "bubble", 1, 10),
        (1, "idle", "communication", 10, 13),
        (1, "compute", "forward 0", 13, 23),
    }


def test_a_send_that_is_waited_for_late_is_drawn_until_it_has_arrived():
    exported = make_export()
    exported.spans["end_ns"][exported.spans["kind"] == Kind.SEND] = 90 * MS
    assert (0, "sends", "send to rank 1", 10, 13) in drawn(exported)


def test_a_transfer_that_took_no_time_has_a_slice_for_the_arrow_to_end_at():
    exported = make_export()
    exported.spans["end_ns"][exported.spans["kind"] == Kind.RECV] = 10 * MS
    found = drawn(exported)
    assert (1, "receives", "wait for rank 0", 1, 10) in found
    assert (1, "receives", "receive from rank 0", 10, 10 + 1 / MS) in found


def test_a_process_is_called_by_rank_stage_and_host_and_nothing_in_it_can_steer_a_terminal():
    names = [name for _, name, _ in ranks_of(make_export())]
    assert names == [f"rank {rank} stage {rank} on node \\x1b[31m</script>é" for rank in (0, 1)]


def test_an_arrow_leads_from_the_send_to_the_transfer_and_not_to_the_wait():
    ends = [
        (track.name, name, arrow)
        for _, _, tracks in ranks_of(make_export())
        for track in tracks
        for name, _, _, _, arrow in track.slices()
        if arrow
    ]
    (first, _, a), (second, name, b) = ends
    assert (first, second, name, a == b) == ("sends", "receives", "receive from rank 0", True)


def test_what_a_slice_says_when_it_is_clicked():
    tracks = {track.name: track for _, _, tracks in ranks_of(make_export()) for track in tracks}
    notes = {name: [found.notes for found in track.slices()] for name, track in tracks.items()}
    assert notes["sends"] == [{"step": 0, "peer": 1, "tag": 0, "seq": 0, "size_bytes": 64}]
    assert notes["compute"] == [{"step": 0, "stage": 1, "microbatch": 0}]
    assert notes["idle"] == [{"stood in": "late sender"}, {"stood in": "transfer"}]


def test_a_rank_with_several_stages_names_the_stage_of_each_op():
    rows = [
        {
            "rank": 0,
            "kind": Kind.BACKWARD,
            "stage": stage,
            "microbatch": 2,
            "start_ns": 9 * stage,
            "end_ns": 9 * stage + 5,
        }
        for stage in (0, 3)
    ]
    assert {name for _, _, name, _, _ in drawn(make_export(rows)) if name.startswith("backward")} == {
        "backward 2 s0",
        "backward 2 s3",
    }


def test_kinds_and_ops_that_are_unknown_have_a_name_all_the_same():
    rows = [
        {"rank": 0, "kind": Kind.COLLECTIVE, "op": 200, "start_ns": 0, "end_ns": 1},
        {"rank": 0, "kind": Kind.HOST, "op": 200, "start_ns": 0, "end_ns": 1},
        {"rank": 0, "kind": Kind.HOST, "op": HostCause.GC, "start_ns": 2, "end_ns": 3},
    ]
    names = {name for rank, _, name, _, _ in drawn(make_export(rows)) if rank == 0}
    assert names == {"collective", "host", "garbage collection"}


def test_parts_are_joined_without_a_seam(monkeypatch):
    whole = drawn(make_export())
    monkeypatch.setattr(tracks_module, "AT_ONCE", 1)
    assert drawn(make_export()) == whole


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=40))
def test_slices_of_a_lane_never_overlap_and_there_are_no_more_lanes_than_needed(slices):
    slices.sort()
    start, length = np.array(slices).T
    end = start + length
    lane = _lane_of(start, end)
    for number in range(int(lane.max()) + 1):
        own = lane == number
        assert (start[own][1:] >= end[own][:-1]).all()
    most_at_once = max(int(((start <= moment) & (end > moment)).sum()) for moment in start)
    assert lane.max() + 1 == most_at_once
