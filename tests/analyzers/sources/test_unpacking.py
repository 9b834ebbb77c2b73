"""Packed recordings are read as what is in them; archives cannot fill the disk, lead out of their place, or crash."""

from __future__ import annotations

import gzip
import io
import shutil
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdiag.analyzers import schedules
from ppdiag.analyzers.sources import read_recording, read_trace, unpacking
from ppdiag.analyzers.sources.flight_recorder import Dumps
from ppdiag.analyzers.sources.sorting import sort_out
from ppdiag.errors import NoPipelineFound, NotARun, PpdiagError
from tests.analyzers.factory import Pipeline
from tests.analyzers.runs import write_run
from tests.analyzers.sources.kineto_factory import write_job

DATA = Path(__file__).parents[2] / "data"
MEGASCAN = DATA / "megatronapp" / "interleaved_p4_v4_iter10.json"
DUMPS = sorted((DATA / "flight_recorder" / "lock_gil_1st").glob("_dump_*"))


@pytest.fixture(autouse=True)
def own_place(tmp_path_factory, monkeypatch):
    """A place for what is unpacked, in which nothing may remain."""
    place = tmp_path_factory.mktemp("place")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield
    assert not list(place.iterdir())


def zipped(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_a_file_packed_with_gzip_is_read_as_it_was(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(MEGASCAN.read_bytes()))
    found, expected = read_trace([path]), read_trace([MEGASCAN])
    assert np.array_equal(found.spans, expected.spans)
    assert found.job.source == str(path)
    assert found.warnings == expected.warnings


def test_packed_dumps_of_a_directory_are_read_together(tmp_path):
    for dump in DUMPS:
        (tmp_path / f"{dump.name}.gz").write_bytes(gzip.compress(dump.read_bytes()))
    found = read_recording([tmp_path])
    assert isinstance(found, Dumps)
    assert len(found.by_rank) == len(DUMPS)


def test_an_archive_is_read_as_its_files_packed_or_not(tmp_path):
    (tmp_path / "job").mkdir()
    first, second = write_job(tmp_path / "job")
    path = zipped(
        tmp_path / "job.zip",
        {"traces/rank0.json": first.read_bytes(), "traces/rank1.json.gz": gzip.compress(second.read_bytes())},
    )
    assert np.array_equal(read_trace([path]).spans, read_trace([tmp_path / "job"]).spans)


def test_an_archive_of_a_run_is_read_as_the_run(tmp_path):
    trace = Pipeline(schedules.order("GPipe", ranks=2, chunks=1, microbatches=2), [0, 1], steps=3).trace()
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", trace)
    shutil.make_archive(str(tmp_path / "job"), "zip", tmp_path, "run")
    assert np.array_equal(read_trace([tmp_path / "job.zip"]).spans, read_trace([tmp_path / "run"]).spans)


def test_messages_name_the_files_of_the_user(tmp_path):
    path = zipped(tmp_path / "a.zip", {"in/it.json": b'{"schemaVersion": 1, "traceEvents": []}'})
    with pytest.raises(NoPipelineFound, match=rf"^{path}/in/it\.json: no pipeline"):
        read_trace([path])
    text = tmp_path / "text.gz"
    text.write_bytes(gzip.compress(b"bought milk"))
    with pytest.raises(NotARun, match=rf"^{text}: not a recording"):
        read_trace([text])


def test_no_member_leads_out_of_its_place(tmp_path):
    names = ("../../out.json", "/tmp/ppdiag-out.json", "..\\..\\out.json", "a/../../../out.json")
    path = zipped(tmp_path / "a.zip", dict.fromkeys(names, b'[{"ph": "X", "cat": "", "ts": 0}]'))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PpdiagError):
        read_trace([path])
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/tmp/ppdiag-out.json").exists()


@pytest.mark.parametrize("form", ["zip", "gz"])
def test_a_bomb_takes_no_more_than_its_share_of_the_disk(tmp_path, monkeypatch, form):
    monkeypatch.setattr(unpacking, "LEAST_INFLATED_BYTES", 1 << 20)
    monkeypatch.setattr("ppdiag.analyzers.sources.kineto.blocks.LEAST_INFLATED_BYTES", 1 << 20)
    bomb = b"[" + bytes(64 << 20)
    path = tmp_path / f"bomb.json.{form}"
    if form == "zip":
        zipped(path, {"bomb.json": bomb, "more.json": bomb})
    else:
        path.write_bytes(gzip.compress(bomb))
    sizes: list[int] = []

    def watched(paths, sources):
        sizes.append(sum(file.stat().st_size for file in paths))
        return sort_out(paths, sources)

    monkeypatch.setattr("ppdiag.analyzers.sources.sort_out", watched)
    with pytest.raises(NotARun):
        read_trace([path])
    assert 0 < sizes[0] <= 100 * path.stat().st_size + (2 << 20)


def test_what_is_cut_off_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "trace.json.gz"
    packed = gzip.compress(MEGASCAN.read_bytes())
    path.write_bytes(packed[: len(packed) * 3 // 4])
    found = read_trace([path])
    assert any("compressed data end early" in warning for warning in found.warnings)
    assert 0 < len(found) < len(read_trace([MEGASCAN]))


def _archive():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_dump_0", DUMPS[0].read_bytes())
        archive.writestr("folder/_dump_1", DUMPS[1].read_bytes())
    return stream.getvalue()


ARCHIVE = _archive()


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, len(ARCHIVE) - 1), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_archive_gives_a_recording_or_one_line(tmp_path_factory, at, byte, cut):
    path = tmp_path_factory.mktemp("archive") / "a.zip"
    path.write_bytes(ARCHIVE[:at] if cut else ARCHIVE[:at] + bytes([byte]) + ARCHIVE[at + 1 :])
    said = ""
    try:
        read_recording([path])
    except PpdiagError as error:
        said = str(error)
    assert "\n" not in said
