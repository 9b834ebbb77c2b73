"""Bad recordings of every source end in an answer or in one line; `make fuzz` tries a million of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppdiag.analyzers.sources import SOURCES, read_recording
from ppdiag.errors import PpdiagError
from tests.fuzz.check import Watch, trouble
from tests.fuzz.mutate import bad_recording
from tests.fuzz.seeds import seeds_of

SAMPLE = 60
TEXT = ("kineto", "megascan", "ndtimeline", "exported", "nccl_inspector")
"""Sources that read JSON."""
KEYS = st.sampled_from(
    ("traceEvents", "ph", "ts", "dur", "name", "cat", "pid", "tid", "args", "rank", "step", "iteration", "microbatch")
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(("X", "kernel", "PP:1F0")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=8), inner, max_size=6),
    max_leaves=30,
)


@pytest.fixture(scope="module")
def watch():
    return Watch()


@pytest.mark.parametrize("source", SOURCES.names())
def test_every_source_has_good_recordings_to_begin_with(source):
    assert seeds_of(source)


@pytest.mark.parametrize("source", SOURCES.names())
def test_bad_recordings_end_in_an_answer_or_one_line(source, tmp_path, watch):
    for n in range(SAMPLE):
        assert not trouble(source, n, tmp_path / "recording", watch), f"{source} {n}"


def test_the_same_number_makes_the_same_recording():
    assert bad_recording("kineto", 7) == bad_recording("kineto", 7)


@pytest.mark.parametrize("source", TEXT)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(value=VALUES, place=st.integers(0, 2**16))
def test_any_value_in_any_place_of_a_recording(source, value, place, tmp_path):
    """Each top-level event (or line) may be anything."""
    for name, data in seeds_of(source)[0].items():
        (tmp_path / name).write_bytes(_with(data, value, place))
    said = ""
    try:
        read_recording([tmp_path])
    except PpdiagError as error:
        said = str(error)
    assert "\n" not in said


def _with(data: bytes, value: object, place: int) -> bytes:
    try:
        root = json.loads(data)
    except ValueError:  # a JSON object a line
        lines = data.splitlines()
        lines[place % len(lines)] = json.dumps(value).encode()
        return b"\n".join(lines)
    rows = root if isinstance(root, list) else next((v for v in root.values() if isinstance(v, list) and v), None)
    if rows:
        rows[place % len(rows)] = value
    return json.dumps(root).encode()
