"""What ``ppdiag export`` writes, and that ``ppdiag analyze`` reads it back as the run itself."""

from __future__ import annotations

import gzip
import json

import pytest
from click.testing import CliRunner

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.sources import read_trace
from ppdiag.cli import main
from tests.analyzers.factory import MS, Pipeline
from tests.analyzers.runs import write_run


@pytest.fixture
def run(tmp_path):
    orders = schedules.order("1F1B", ranks=2, chunks=1, microbatches=4)
    folder = tmp_path / "run"
    folder.mkdir()
    write_run(folder, Pipeline(orders, [0, 1], steps=5, tail=0, transfer=lambda *_: 2 * MS).trace())
    return folder


def _export(*arguments):
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


def _found(path):
    found = diagnose(read_trace([path])).to_dict()
    return {name: value for name, value in found.items() if name != "source"}


@pytest.mark.parametrize(
    ("option", "name"), [("--perfetto", "t.pftrace"), ("--chrome", "t.json"), ("--chrome", "t.json.gz")]
)
def test_an_export_is_read_back_as_the_run_itself(run, tmp_path, option, name):
    done = _export(run, option, tmp_path / name)
    assert (done.exit_code, done.output) == (0, "")
    assert _found(tmp_path / name) == _found(run)
    assert {entry.name for entry in tmp_path.iterdir()} == {"run", name}


def test_all_forms_can_be_had_at_once(run, tmp_path):
    pytest.importorskip("pyarrow")
    names = {"--perfetto": "a", "--chrome": "b", "--csv": "c", "--parquet": "d"}
    done = _export(run, *(word for option, name in names.items() for word in (option, tmp_path / name)))
    assert done.exit_code == 0
    assert {entry.name for entry in tmp_path.iterdir()} == {"run", "a", "b", "c", "d"}
    assert json.loads((tmp_path / "b").read_text())["traceEvents"]


def test_a_name_in_gz_is_packed(run, tmp_path):
    _export(run, "--csv", tmp_path / "t.csv.gz")
    assert gzip.decompress((tmp_path / "t.csv.gz").read_bytes()).startswith(b"rank,kind,")


def test_nothing_to_write_is_a_usage_error(run):
    assert _export(run).exit_code == 2


@pytest.mark.parametrize("option", ["--perfetto", "--chrome", "--csv", "--parquet"])
def test_a_file_that_cannot_be_written_is_one_line(run, tmp_path, option):
    done = _export(run, option, tmp_path / "none" / "file")
    assert (done.exit_code, done.stderr.count("\n")) == (6, 1)
    assert {entry.name for entry in tmp_path.iterdir()} == {"run"}


def test_a_full_disk_is_one_line(run):
    done = _export(run, "--chrome", "/dev/full")
    assert (done.exit_code, done.stderr.count("\n")) == (6, 1)
    assert "No space left" in done.stderr


@pytest.mark.parametrize("option", ["--chrome", "--csv", "--perfetto"])
def test_a_dash_is_standard_output(run, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = _export(run, option, "-")
    assert done.exit_code == 0
    assert len(done.stdout_bytes) > 1000
    assert {entry.name for entry in tmp_path.iterdir()} == {"run"}


def test_parquet_needs_a_file(run):
    assert _export(run, "--parquet", "-").exit_code == 2


def test_a_file_that_breaks_off_is_removed(run, tmp_path, monkeypatch):
    def fail(_, stream):
        stream.write("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ppdiag.reports.chrome.write", fail)
    assert _export(run, "--chrome", tmp_path / "t.json").exit_code == 6
    assert not (tmp_path / "t.json").exists()


def test_a_record_without_a_pipeline_is_exported_and_said(run, tmp_path):
    (run / "rank00001-0.spans").unlink()
    done = _export(run, "--chrome", tmp_path / "t.json")
    assert done.exit_code == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_what_is_no_run_is_one_line(tmp_path):
    done = _export(tmp_path / "gone", "--csv", tmp_path / "t.csv")
    assert (done.exit_code, done.stderr.count("\n")) == (4, 1)
    assert not (tmp_path / "t.csv").exists()
