"""What is read back from a run directory is what was written, or nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ppdiag.launch import note_end, prepare_run_directory
from ppdiag.rundir import RUN_FILE, encode_header, read_header, read_run_file

if TYPE_CHECKING:
    from pathlib import Path

NOT_UTF8 = os.fsdecode(b"--name=\xff\xfe")


def test_an_argument_that_is_no_utf_8_neither_hides_the_command_nor_the_end_of_the_job(tmp_path: Path) -> None:
    path = prepare_run_directory(tmp_path / "run", ["train", NOT_UTF8])
    assert "ended_unix_ns" not in read_run_file(path)
    note_end(path, 3)
    facts = read_run_file(path)
    assert facts["argv"] == ["train", NOT_UTF8]
    assert facts["exit_code"] == 3
    assert facts["ended_unix_ns"] >= facts["started_unix_ns"]


@pytest.mark.parametrize("content", [b"", b"[1]", b'"ended_unix_ns"', b"{", b"[" * 100_000, b"\xff"])
def test_a_damaged_run_file_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / RUN_FILE).write_bytes(content)
    assert read_run_file(tmp_path) == {}
    note_end(tmp_path, 0)
    assert (tmp_path / RUN_FILE).read_bytes() == content


def test_no_run_file_says_nothing(tmp_path: Path) -> None:
    assert read_run_file(tmp_path) == {}


def test_the_header_of_a_span_file_is_read_without_its_spans(tmp_path: Path) -> None:
    file = tmp_path / "rank00000-0.spans"
    file.write_bytes(encode_header({"rank": 0, "world_size": 4}) + b"\xff" * 1000)
    assert read_header(file)["world_size"] == 4


@pytest.mark.parametrize("content", [b"", b"PPDIAG-SPANS\n", b"PPDIAG-SPANS\n[1]\n", b"PPDIAG-SPANS\n{", b"x" * 100])
def test_a_damaged_header_says_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "rank00000-0.spans"
    file.write_bytes(content)
    assert read_header(file) == {}
