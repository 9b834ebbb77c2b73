"""Synchronising calls in exports of Nsight Systems: those of a real one, and those written into a made one."""

from __future__ import annotations

import gzip
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.sources.nsight_database import Database
from ppdiag.analyzers.sources.nsight_host import synchronising_calls
from ppdiag.model import HostCause, Kind
from tests.analyzers.factory import MS
from tests.analyzers.sources.nsight_exports import global_pid, write
from tests.analyzers.test_hand_calculations import pipeline

DATA = Path(__file__).parents[2] / "data" / "nsys"


def real(folder):
    """The real export, unpacked where the repository keeps it packed."""
    (path,) = DATA.glob("h100_2gpu_1s.sqlite*")
    if path.suffix != ".gz":
        return path
    with gzip.open(path) as packed, (folder / "real.sqlite").open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    return folder / "real.sqlite"


def test_the_long_calls_of_a_real_export_are_those_that_sql_finds(tmp_path):
    path = real(tmp_path)
    plain = sqlite3.connect(path)
    query = (
        "SELECT COUNT(*), SUM(r.end - r.start) FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId "
        "WHERE s.value LIKE '%Synchronize%' AND r.end - r.start >= 100000"
    )
    ((count, total),) = plain.execute(query)
    plain.close()
    database = Database(path)
    calls = np.concatenate(list(synchronising_calls(database).values()))
    database.close()
    assert count > 0
    assert (len(calls), int((calls[:, 1] - calls[:, 0]).sum())) == (count, total)


def exported(folder, *, took):
    """A pipeline of two ranks whose rank 1 makes two calls that take so many ns, and one of another name."""
    trace = pipeline("1F1B", microbatches=4).trace()
    path = folder / "job.sqlite"
    write(path, trace, [0, 1])
    database = sqlite3.connect(path)
    names = [(5, "cudaStreamSynchronize_v3020"), (6, "cudaMemcpyAsync_v3020")]
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
    first = int(trace.spans["start_ns"].min())
    for number, name in ((1, 5), (2, 5), (3, 6)):
        row = (first + number * 20 * MS, first + number * 20 * MS + took, global_pid(1) + 7, 10**6 + number, name)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", row)
    database.commit()
    database.close()
    return path


@pytest.mark.parametrize(("took", "count"), [(2 * MS, 2), (MS // 20, 0)])
def test_long_calls_are_host_time_of_their_rank(tmp_path, took, count):
    trace = read_trace([exported(tmp_path, took=took)])
    found = trace.spans[trace.spans["kind"] == Kind.HOST]
    assert len(found) == count
    assert set(found["op"].tolist()) <= {HostCause.SYNCHRONISING}
    assert set(found["rank"].tolist()) <= {1}
    assert set((found["end_ns"] - found["start_ns"]).tolist()) <= {took}
    assert diagnose(trace).job.microbatches == 4
