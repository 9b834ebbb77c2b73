"""Pickles of plain data read as pickle itself reads them; nothing else in a pickle is done."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdiag.analyzers.sources.plain_pickle import NotPlain, loads

SCALARS = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(
    SCALARS | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
        | st.sets(st.integers())
        | st.frozensets(st.text())
    ),
    max_leaves=20,
)


@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_data_come_back(value, protocol):
    """Protocols before 4 have no sets without looking up a class of Python's."""
    try:
        assert loads(pickle.dumps(value, protocol)) == value
    except NotPlain as error:
        if protocol > 3 or "opcode b'c'" not in str(error):
            raise


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_is_read(protocol):
    shared = [1, -5, 2**70, 1.5, None, True, False, "é\nx", (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]
    value = {"a": shared, "again": shared, 3: {"text": "x" * 70_000}}
    read = loads(pickle.dumps(value, protocol))
    assert read == value
    assert read["a"] is read["again"]


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_calls_something_is_refused_and_does_nothing(tmp_path, protocol):
    mark = tmp_path / "mark"
    with pytest.raises(NotPlain, match="nothing of it was run"):
        loads(pickle.dumps([1, Hostile(mark)], protocol))
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02",
        b".",
        b"(((((((((",
        b"))" + b"\x86" * 10 + b".",
        b"\x8e" + b"\xff" * 8 + b".",
        b"\x8a\xff" + b"1" * 255 + b".",
        b"I" + b"9" * 5000 + b"\n.",
        b"Ix\n.",
        b"}]K\x01s.",
        b"h\x07.",
        b"Nj\xff\xff\xff\xff.",
        b"K\x01a.",
        b"X\x02\x00\x00\x00\xff\xff.",
    ],
)
def test_damaged_data_are_refused(data):
    with pytest.raises(NotPlain):
        loads(data)


def test_five_bytes_reserve_no_gigabytes():
    """Python's own unpickler makes room for the memo up to this index."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert loads(b"\x80\x02Nr\xff\xff\xff\xff.") is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000  # KiB


def test_deep_nesting_ends_nothing():
    deep = loads(b"]" * 500_000 + b"a" * 499_999 + b".")
    assert isinstance(deep, list)
    with pytest.raises(NotPlain, match="as key"):
        loads(b"}" + b")" + b"\x85" * 500_000 + b"Ns.")


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    with contextlib.suppress(NotPlain):
        loads(b"\x80\x02" + data)
