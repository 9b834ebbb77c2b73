"""Chrome's JSON, by its published rules: slices are X, arrows s and f, names are metadata."""

from __future__ import annotations

import io
import json

from ppdiag.reports.chrome import write
from tests.reports.exports import make_export


def written(exported=None):
    stream = io.StringIO()
    write(exported or make_export(), stream)
    return stream.getvalue()


def test_the_file_is_json_whose_first_line_holds_the_record():
    text = written()
    data = json.loads(text)
    assert text.startswith('{"ppdiag":{"header":{"schema":"ppdiag.trace/1"')
    assert '"traceEvents"' not in text.splitlines()[0]
    assert set(data) == {"ppdiag", "displayTimeUnit", "traceEvents"}


def test_times_are_microseconds_and_keep_their_nanoseconds():
    exported = make_export()
    exported.spans["end_ns"][0] += 1
    slices = [e for e in json.loads(written(exported))["traceEvents"] if e["ph"] == "X" and e["cat"] == "compute"]
    assert (slices[0]["ts"], slices[0]["dur"]) == (0, 10000.001)


def test_an_arrow_begins_in_the_send_and_ends_in_the_receive():
    events = json.loads(written())["traceEvents"]
    begin, end = (next(e for e in events if e["ph"] == ph) for ph in "sf")
    assert begin["id"] == end["id"]
    assert (begin["pid"], begin["ts"], end["pid"], end["ts"], end["bp"]) == (0, 10000, 1, 13000, "e")
    tids = {e["args"]["name"]: (e["pid"], e["tid"]) for e in events if e.get("name") == "thread_name"}
    assert (begin["pid"], begin["tid"]) == tids["sends"]
    assert (end["pid"], end["tid"]) == tids["receives"]


def test_no_two_processes_share_the_number_of_a_thread():
    events = json.loads(written())["traceEvents"]
    tracks = [e["tid"] for e in events if e["name"] == "thread_name"] + [
        e["tid"] for e in events if e.get("cat") == "step"
    ]
    assert len(set(tracks)) == len(tracks) == 7
    assert 0 not in tracks


def test_idle_time_has_a_colour_by_its_cause():
    idle = {e["name"]: e["cname"] for e in json.loads(written())["traceEvents"] if e.get("cat") == "idle"}
    assert idle == {"bubble": "grey", "communication": "terrible"}


def test_steps_are_a_process_of_their_own():
    steps = [e for e in json.loads(written())["traceEvents"] if e.get("cat") == "step"]
    assert [(e["name"], e["pid"], e["dur"]) for e in steps] == [("step 7", 2, 30000)]


def test_a_record_without_spans_is_a_file_all_the_same():
    assert json.loads(written(make_export([])))["ppdiag"]["blocks"] == []
