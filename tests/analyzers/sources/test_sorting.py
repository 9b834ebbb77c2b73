"""Files, directories, patterns and mixtures: what is read, and what is said of the rest."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.sources import read_recording, read_trace
from ppdiag.analyzers.sources.flight_recorder import Dumps
from ppdiag.analyzers.sources.sorting import sort_out
from ppdiag.errors import CannotRead, NoPipelineFound, NotARun, PathNotFound
from tests.analyzers.factory import Pipeline
from tests.analyzers.runs import write_run
from tests.analyzers.sources.nsight_exports import write

DATA = Path(__file__).parents[2] / "data"


def small():
    return Pipeline(schedules.order("GPipe", ranks=2, chunks=1, microbatches=2), [0, 1], steps=3).trace()


@pytest.fixture
def mixed(tmp_path):
    """Two exports of Nsight Systems, three dumps of Flight Recorder, a text."""
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.sqlite", small(), [rank])
    for rank in range(3):
        shutil.copy(DATA / "flight_recorder" / "lock_gil_1st" / f"_dump_{rank}", tmp_path)
    (tmp_path / "notes.txt").write_text("bought milk")
    return tmp_path


def test_a_mixed_directory_is_sorted_out_and_listed(mixed):
    """Times come before dumps, though there are more dumps."""
    found = read_trace([mixed])
    assert sorted(found.ranks) == [0, 1]
    assert found.job.source == str(mixed)
    (said,) = [warning for warning in found.warnings if "left out" in warning]
    assert said == (
        "read as exports of Nsight Systems (.sqlite): 2 files (rank0.sqlite, rank1.sqlite); left out: 3 files "
        "(_dump_0, _dump_1, _dump_2) of dumps of PyTorch's Flight Recorder (pickle or JSON, one a rank); 1 file "
        "(notes.txt) of no kind that is known"
    )


def test_what_was_left_out_is_said_where_the_rest_is_no_pipeline_too(tmp_path):
    kineto = DATA / "kineto" / "hta_critical_path_cuda_event_sync_event_sync_trace.json.gz"
    shutil.copy(kineto, tmp_path)
    (tmp_path / "notes.txt").write_text("bought milk")
    with pytest.raises(NoPipelineFound, match=r"no pipeline in this .*left out: 1 file \(notes\.txt\) of no kind"):
        read_trace([tmp_path])


def test_a_file_that_breaks_off_with_an_error_of_the_system_is_named(tmp_path, monkeypatch):
    """As on a disk that fails: such an error has no name of a file."""
    path = tmp_path / "rank0.json"
    path.write_text("{}")

    def fails(*_args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("ppdiag.analyzers.sources.sort_out", fails)
    with pytest.raises(CannotRead, match=rf"^{path}: Input/output error$"):
        read_trace([path])


def test_a_directory_of_one_kind_is_read_without_a_word(tmp_path):
    write(tmp_path / "rank0.sqlite", small(), [0])
    write(tmp_path / "rank1.sqlite", small(), [1])
    assert not any("left out" in warning for warning in read_trace([tmp_path]).warnings)


def test_a_pattern_that_the_shell_did_not_expand_is_expanded(mixed):
    assert isinstance(read_recording([mixed / "_dump_*"]), Dumps)
    with pytest.raises(PathNotFound, match="no file matches"):
        read_recording([mixed / "*.nothing"])


def test_a_missing_path_is_said(tmp_path):
    with pytest.raises(PathNotFound, match="no such file or directory"):
        read_recording([tmp_path / "missing"])


def test_files_of_one_job_may_be_named_one_by_one(mixed):
    found = read_trace([mixed / "rank1.sqlite", mixed / "rank0.sqlite"])
    assert sorted(found.ranks) == [0, 1]
    assert not any("left out" in warning for warning in found.warnings)


def test_a_run_directory_is_not_taken_apart(tmp_path):
    write_run(tmp_path, small())
    (tmp_path / "notes.txt").write_text("bought milk")
    found = read_trace([tmp_path])
    assert sorted(found.ranks) == [0, 1]
    assert not any("left out" in warning for warning in found.warnings)


def test_nothing_known_is_one_short_line_that_says_where_the_formats_are_listed(tmp_path):
    (tmp_path / "notes.txt").write_text("bought milk")
    with pytest.raises(NotARun) as error:
        read_recording([tmp_path])
    expected = "not a recording that ppdiag can read; ppdiag analyze --help lists the formats"
    assert str(error.value) == f"{tmp_path}: {expected}"


def test_a_log_of_nccl_is_sent_to_its_command():
    with pytest.raises(NotARun, match="NCCL's logs are read by ppdiag nccl"):
        read_recording([DATA / "nccl" / "single_node_roce_unused.log"])


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotARun, match="neither a file nor a directory"):
        read_recording([tmp_path / "pipe"])


def test_a_part_of_a_run_names_the_run(tmp_path):
    write_run(tmp_path, small())
    with pytest.raises(NotARun, match=rf"it is a part of a run; name {tmp_path}$"):
        read_recording([tmp_path / "rank00000-0.spans"])


def test_an_answer_of_ours_is_known_to_be_one(tmp_path):
    (tmp_path / "found.json").write_text('{\n  "schema": "ppdiag.diagnosis/1",\n  "source": "run"\n}\n')
    with pytest.raises(NotARun, match="it is an answer of ppdiag; name the recording that it is of"):
        read_recording([tmp_path / "found.json"])


def test_an_empty_directory_is_said_to_be_empty(tmp_path):
    with pytest.raises(NotARun, match="the directory is empty"):
        read_recording([tmp_path])


def test_files_that_may_not_be_read_are_left_out_or_said(mixed, monkeypatch):
    """Rights do not hold root back: the answer of the system is made up."""
    secret = mixed / "rank1.sqlite"
    monkeypatch.setattr("os.access", lambda path, mode: path != secret)  # noqa: ARG005
    found = read_trace([mixed])
    assert sorted(found.ranks) == [0]
    assert any("rank1.sqlite" in warning and "left out" in warning for warning in found.warnings)
    with pytest.raises(NotARun, match="permission denied"):
        read_recording([secret])


def test_a_source_that_takes_files_only_is_given_those_of_a_directory(tmp_path):
    pytest.importorskip("pyarrow")
    shutil.copy(DATA / "straggler_analysis" / "trace-ST.parquet", tmp_path)
    assert len(read_trace([tmp_path]).ranks) == 8


def test_a_source_of_others_may_read_directories(tmp_path):
    class Boxes:
        description = "boxes"

        def recognises(self, path):
            return path.is_dir()

        def read(self, paths, progress):
            raise NotImplementedError

    (tmp_path / "notes.txt").write_text("bought milk")
    assert sort_out([tmp_path], {"boxes": Boxes()}).paths == (tmp_path,)


def test_runs_in_a_directory_are_not_taken_for_one_job(tmp_path):
    for name in ("run-1", "run-2"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, small())
    with pytest.raises(NotARun, match=r"it holds 2 runs: name one of .*run-1, .*run-2"):
        read_recording([tmp_path])
    assert sorted(read_trace([tmp_path / "run-2"]).ranks) == [0, 1]


def test_directories_further_down_have_to_be_named(tmp_path):
    (tmp_path / "inner").mkdir()
    with pytest.raises(NotARun, match="directories in it are not searched"):
        read_recording([tmp_path])
