"""Exports read back: what is damaged, hostile or of another version is one line, and takes bounded memory."""

from __future__ import annotations

import base64
import gzip
import io
import json
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.sources.exported import Exported as Source
from ppdiag.errors import BadRecord, PpdiagError
from ppdiag.reports import chrome, perfetto
from ppdiag.trace import SPAN_DTYPE
from tests.reports.exports import HOST, make_export


def as_chrome() -> bytes:
    stream = io.StringIO()
    chrome.write(make_export(), stream)
    return stream.getvalue().encode()


def as_perfetto() -> bytes:
    stream = io.BytesIO()
    perfetto.write(make_export(), stream)
    return stream.getvalue()


FORMS = {"chrome": as_chrome(), "perfetto": as_perfetto(), "packed": gzip.compress(as_chrome())}


@pytest.mark.parametrize("form", FORMS)
def test_what_was_written_comes_back(tmp_path, form):
    path = tmp_path / "trace"
    path.write_bytes(FORMS[form])
    found, trace = read_trace([path]), make_export().trace
    assert (found.spans == trace.spans).all()
    assert found.groups == trace.groups
    assert (found.warnings, found.clock_error_s) == (("a warning",), 0.5)
    assert (found.job.source, found.job.pp) == (str(path), 2)
    assert found.ranks[1].host == HOST
    assert found.ranks[1].facts == {"argv": ["a"], "n": 3}


@pytest.mark.parametrize("form", ["chrome", "perfetto"])
def test_a_file_without_its_end_is_read_as_far_as_it_goes(tmp_path, form):
    path = tmp_path / "trace"
    path.write_bytes(FORMS[form][: len(FORMS[form]) // 2 + 600])
    assert Source().recognises(path)
    assert len(read_trace([path])) == 5


def test_the_cut_of_a_packed_file_is_one_line(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(FORMS["packed"][:300])
    with pytest.raises(PpdiagError):
        read_trace([path])


def test_a_damaged_block_is_left_out_and_said(tmp_path):
    path = tmp_path / "trace.json"
    data = json.loads(FORMS["chrome"].splitlines()[0].rstrip(b",") + b"}")["ppdiag"]
    packed = base64.b64decode(data["blocks"][0])
    spoilt = packed[:20] + bytes([packed[20] ^ 255]) + packed[21:]
    path.write_bytes(FORMS["chrome"].replace(base64.b64encode(packed), base64.b64encode(spoilt)))
    found = read_trace([path])
    assert len(found) == 0
    assert "5 spans are missing, damaged or impossible" in found.warnings[-1]


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (b"ppdiag.trace/1", b"ppdiag.trace/9"),
        (b'["rank","<i4"]', b'["rank","<f4"]'),
        (b'"groups":', b'"grapes":'),
        (b'"clock_error_s":0.5', b'"clock_error_s":NaN'),
        (b'"host":"', b'"host":1,"x":"'),
    ],
)
def test_another_version_or_a_spoilt_header_is_one_line(tmp_path, was, becomes):
    path = tmp_path / "trace.json"
    path.write_bytes(FORMS["chrome"].replace(was, becomes))
    with pytest.raises(BadRecord, match="not an export that this ppdiag reads"):
        read_trace([path])


def test_a_few_bytes_that_promise_gigabytes_get_none(tmp_path):
    bomb = zlib.compress(bytes(SPAN_DTYPE.itemsize << 16), 9)
    header, rest = FORMS["chrome"].split(b',"blocks":[', 1)
    header = header.replace(b'"spans":5', b'"spans":1000000000')
    blocks = b",".join([b'"' + base64.b64encode(bomb) + b'"'] * 300)
    path = tmp_path / "trace.json"
    path.write_bytes(header + b',"blocks":[' + blocks + b"]},\n" + rest)
    tracemalloc.start()
    read_trace([path])
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 300 * (SPAN_DTYPE.itemsize << 16) > 1.5e9
    assert peak_bytes < 1 << 30


def test_two_exports_are_not_read_as_one(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(FORMS["chrome"])
    with pytest.raises(PpdiagError):
        read_trace([tmp_path / "a", tmp_path / "b"])


def test_impossible_spans_are_left_out(tmp_path):
    exported = make_export()
    exported.trace.spans["end_ns"][0] = -5
    stream = io.BytesIO()
    perfetto.write(exported, stream)
    path = tmp_path / "trace"
    path.write_bytes(stream.getvalue())
    assert len(read_trace([path])) == 4


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_mutation_brings_the_reader_down(tmp_path, form, data):
    content = bytearray(FORMS[form])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path = tmp_path / "trace"
    path.write_bytes(bytes(content))
    if Source().recognises(path):
        try:
            found = Source().read([path], None)
        except PpdiagError:
            return
        assert found.spans.dtype == SPAN_DTYPE
        assert (np.diff(found.spans["rank"]) >= 0).all()
