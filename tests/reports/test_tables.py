"""Spans as CSV and Parquet."""

from __future__ import annotations

import builtins
import io

import pandas as pd
import pytest

from ppdiag.errors import MissingPackage
from ppdiag.reports import tables
from tests.reports.exports import MS, make_export


def test_csv_has_one_line_a_span_and_kinds_by_name():
    stream = io.StringIO()
    tables.write_csv(make_export(), stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 + 5
    assert lines[0].startswith("rank,kind,op,flags,stage,chunk,microbatch,step,")
    assert lines[1] == f"0,FORWARD,0,0,0,-1,0,0,-1,0,0,0,0,0,{10 * MS},0,0,0,-1"
    assert lines[2].startswith("0,SEND,")
    assert lines[2].endswith(",3")  # its receive is the fourth row


def test_parts_are_joined_without_a_seam(monkeypatch):
    whole, parts = io.StringIO(), io.StringIO()
    tables.write_csv(make_export(), whole)
    monkeypatch.setattr(tables, "PART", 2)
    tables.write_csv(make_export(), parts)
    assert parts.getvalue() == whole.getvalue()


def test_parquet_holds_the_same(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(tables, "PART", 2)
    tables.write_parquet(make_export(), tmp_path / "spans.parquet")
    table = pd.read_parquet(tmp_path / "spans.parquet")
    assert table["kind"].tolist() == ["FORWARD", "SEND", "COLLECTIVE", "RECV", "FORWARD"]
    assert table["end_ns"].tolist() == [10 * MS, 12 * MS, 30 * MS, 13 * MS, 23 * MS]


def test_without_pyarrow_the_extra_is_named_and_no_file_is_made(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackage, match=r"ppdiag\[parquet\]"):
        tables.write_parquet(make_export(), tmp_path / "spans.parquet")
    assert list(tmp_path.iterdir()) == []
