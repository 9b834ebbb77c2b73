"""Perfetto's protobuf, decoded by a few lines of its own; field numbers are those of the public ``.proto`` files."""

from __future__ import annotations

import io
from collections import defaultdict

import pytest

from ppdiag.reports.perfetto import _varint, write
from tests.reports.exports import MS, make_export

# protos/perfetto/trace/trace_packet.proto, track_event/track_event.proto, track_event/track_descriptor.proto
TIMESTAMP, SEQUENCE, EVENT, INTERNED, FLAGS, DESCRIPTOR = 8, 10, 11, 12, 13, 60
UUID, NAME, PARENT, CHILD_ORDERING, RANK = 1, 2, 5, 11, 12
TYPE, NAME_IID, TRACK, CATEGORY, ANNOTATION, FLOW, LAST_FLOW = 9, 10, 11, 22, 4, 47, 48


def fields(data: bytes) -> dict[int, list]:
    """The fields of a message: numbers and bytes, by field number."""
    found, at = defaultdict(list), 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            found[key >> 3].append(varint())
        elif key & 7 == 1:
            found[key >> 3].append(int.from_bytes(data[at : at + 8], "little"))
            at += 8
        else:
            assert key & 7 == 2
            length = varint()
            assert at + length <= len(data)
            found[key >> 3].append(data[at : at + length])
            at += length
    return dict(found)


@pytest.fixture(scope="module")
def packets():
    stream = io.BytesIO()
    write(make_export(), stream)
    whole = fields(stream.getvalue())
    assert set(whole) == {1}
    return [fields(packet) for packet in whole[1]]


@pytest.fixture(scope="module")
def slices(packets):
    """(track, name, category, begin, end, arrow out, arrow in, notes) of each slice."""
    names: dict[tuple[int, int], str] = {}
    notes: dict[tuple[int, int], str] = {}
    begun, found = {}, []
    for packet in packets:
        sequence = packet.get(SEQUENCE, [0])[0]
        for entry in packet.get(INTERNED, []):
            for kind, table in ((2, names), (3, notes)):
                for row in fields(entry).get(kind, []):
                    table[sequence, fields(row)[1][0]] = fields(row)[2][0].decode()
        for data in packet.get(EVENT, []):
            event = fields(data)
            track, time = event[TRACK][0], packet[TIMESTAMP][0]
            if event[TYPE] == [1]:
                assert track not in begun, "two slices at once on a track"
                begun[track] = (event, time, sequence)
            else:
                first, begin, _ = begun.pop(track)
                shown = {
                    notes[sequence, fields(note)[1][0]]: (fields(note).get(4) or fields(note)[6])[0]
                    for note in first.get(ANNOTATION, [])
                }
                category = first.get(CATEGORY, [b""])[0].decode()
                name = names[sequence, first[NAME_IID][0]]
                found.append((name, category, begin, time, first.get(FLOW), event.get(LAST_FLOW), shown))
    assert not begun
    return found


def test_each_slice_has_its_time_on_the_clock_of_the_record(slices):
    assert {(name, category, begin / MS, end / MS) for name, category, begin, end, *_ in slices} == {
        ("forward 0", "compute", 0, 10),
        ("send to rank 1", "sends", 10, 12),
        ("all_reduce", "collectives", 12, 30),
        ("wait for rank 0", "receives", 1, 10),
        ("receive from rank 0", "receives", 10, 13),
        ("bubble", "idle", 1, 10),
        ("communication", "idle", 10, 13),
        ("forward 0", "compute", 13, 23),
        ("step 7", "", 0, 30),
    }


def test_an_arrow_leads_from_the_send_to_the_receive(slices):
    out = {name: flow for name, _, _, _, flow, _, _ in slices if flow}
    into = {name: flow for name, _, _, _, _, flow, _ in slices if flow}
    assert list(out) == ["send to rank 1"]
    assert list(into) == ["receive from rank 0"]
    assert out["send to rank 1"] == into["receive from rank 0"]


def test_notes_are_numbers_and_words(slices):
    by_name = {name: shown for name, _, _, _, _, _, shown in slices}
    assert by_name["send to rank 1"]["size_bytes"] == 64
    assert by_name["communication"] == {"stood in": b"transfer"}


def test_tracks_are_in_order_ranks_below_steps(packets):
    described = [fields(packet[DESCRIPTOR][0]) for packet in packets if DESCRIPTOR in packet]
    assert all(row[CHILD_ORDERING] == [3] for row in described)  # explicit
    names = {row[UUID][0]: row[NAME][0].decode()[:14] for row in described}
    assert len(names) == len(described)
    placed = [(names.get(row.get(PARENT, [0])[0]), row[RANK][0], names[row[UUID][0]]) for row in described]
    first, second = "rank 0 stage 0", "rank 1 stage 1"
    assert sorted(placed, key=str) == sorted(
        [
            (None, 0, "pipeline"),
            ("pipeline", 0, "steps"),
            ("pipeline", 1, first),
            ("pipeline", 2, second),
            (first, 0, "compute"),
            (first, 1, "sends"),
            (first, 2, "collectives"),
            (second, 0, "compute"),
            (second, 1, "idle"),
            (second, 2, "receives"),
        ],
        key=str,
    )


def test_names_are_told_anew_where_a_sequence_begins(packets):
    seen = set()
    for packet in packets:
        if EVENT in packet:
            sequence = packet[SEQUENCE][0]
            assert packet[FLAGS] == [3 if sequence not in seen else 2]  # 1: what was told before is void; 2: needs it
            seen.add(sequence)


@pytest.mark.parametrize(
    ("value", "data"), [(0, b"\0"), (127, b"\x7f"), (300, b"\xac\x02"), (-1, b"\xff" * 9 + b"\x01")]
)
def test_numbers_are_those_of_the_encoding_guide(value, data):
    assert _varint(value) == data  # protobuf.dev/programming-guides/encoding
