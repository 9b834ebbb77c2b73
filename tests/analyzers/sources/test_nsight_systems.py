"""Exports of Nsight Systems: kernels as plain SQL counts them, and a pipeline that is explained as its own trace is."""

from __future__ import annotations

import contextlib
import gzip
import shutil
import sqlite3
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.sources.nsight_database import Database
from ppdiag.analyzers.sources.nsight_nccl import Payload, layouts, payload_of
from ppdiag.analyzers.sources.nsight_systems import NsightSystems
from ppdiag.errors import BadRecord, NoPipelineFound
from ppdiag.model import Kind
from tests.analyzers.factory import MS, Compute, Pipeline, Stall, simulate
from tests.analyzers.sources import nsight_exports
from tests.analyzers.sources.nsight_exports import US, create, global_pid, write

DATA = Path(__file__).parents[2] / "data" / "nsys"
NAMES = ("h100_2gpu_1s", "mock")


@pytest.fixture
def real(tmp_path):
    """The real exports, unpacked."""
    for name in NAMES:
        with gzip.open(DATA / f"{name}.sqlite.gz") as packed, (tmp_path / f"{name}.sqlite").open("wb") as target:
            shutil.copyfileobj(packed, target)
    return {name: tmp_path / f"{name}.sqlite" for name in NAMES}


def pipeline(name="1F1B", ranks=4, chunks=1, microbatches=8, **settings):
    orders = schedules.order(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    return Pipeline(orders, schedules.stage_ranks(name, ranks, chunks), steps=5, **settings).trace()


def slow_third(op, rank, step):  # noqa: ARG001
    return (30 if op.stage == 2 else 10) * MS


def late_second(op, rank, step):  # noqa: ARG001
    return 5 * MS * (rank == 1)


def slow_link(src, dst):
    return 8 * MS if {src, dst} == {1, 2} else MS


def exported(folder, trace, **options):
    path = folder / "job.sqlite"
    write(path, trace, sorted(trace.ranks), **options)
    return path


def close(found, expected, part, within):
    for f in fields(getattr(expected, part)):
        assert getattr(getattr(found, part), f.name) == pytest.approx(
            getattr(getattr(expected, part), f.name), abs=within
        ), f.name


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_those_that_sql_counts(real, name):
    with contextlib.closing(Database(real[name])) as database:
        found = database.numbers("CUPTI_ACTIVITY_KIND_KERNEL", ["start", "end", "deviceId"])
    plain = sqlite3.connect(real[name])
    query = "SELECT deviceId, COUNT(*), SUM(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL GROUP BY deviceId"
    for device, count, total in plain.execute(query):
        own = found[found["deviceId"] == device]
        assert (len(own), int((own["end"] - own["start"]).sum())) == (count, total)
    plain.close()


def test_a_recording_that_is_no_pipeline_says_so_and_what_it_holds(real):
    # SELECT COUNT(*) ... GROUP BY deviceId gives 1721 twice
    with pytest.raises(
        NoPipelineFound, match=r"no NVTX range names .* rank 0: 1721 kernels in .* rank 1: 1721 kernels"
    ):
        read_trace([real["h100_2gpu_1s"]])
    with pytest.raises(NoPipelineFound, match="rank 0: 2 kernels"):
        read_trace([real["mock"]])


@pytest.mark.parametrize(
    "settings",
    [
        {"rendezvous": True},
        {"rendezvous": True, "duration": slow_third},
        {"rendezvous": True, "transfer": slow_link},
        {"name": "GPipe"},
        {"name": "Interleaved1F1B", "chunks": 2},
        {"rendezvous": True, "replicas": 2, "tail": 5 * MS},
    ],
    ids=["even", "slow-stage", "slow-link", "gpipe", "interleaved", "replicas"],
)
@pytest.mark.parametrize("payloads", [True, False])
def test_a_pipeline_is_explained_as_its_own_trace_is(tmp_path, settings, payloads):
    trace = pipeline(**settings)
    found, expected = diagnose(read_trace([exported(tmp_path, trace, payloads=payloads)])), diagnose(trace)
    assert (found.job.pp, found.job.vpp, found.job.microbatches) == (
        expected.job.pp,
        expected.job.vpp,
        expected.job.microbatches,
    )
    assert (found.job.schedule_name, found.job.schedule_match) == (expected.job.schedule_name, 1.0)
    assert found.steps.median_s == pytest.approx(expected.steps.median_s, rel=1e-3)
    assert (found.verdict.cause, found.verdict.stage) == (expected.verdict.cause, expected.verdict.stage)
    close(found, expected, "where", 0.02)
    close(found, expected, "why", 0.05)
    assert found.verdict.confidence == ("measured" if payloads else "inferred")


@pytest.mark.parametrize(
    "name",
    [
        nsight_exports.torch_name,
        lambda span: f"{nsight_exports.torch_name(span)}, op_id = 314290",
        lambda span: f"{'F' if span['kind'] == Kind.FORWARD else 'B'} stage {span['stage']} mb {span['microbatch']}",
        lambda span: f"megatron.core.schedules.{'forward' if span['kind'] == Kind.FORWARD else 'backward'}_step",
    ],
    ids=["torch", "emit_nvtx", "ppdiag", "megatron"],
)
@pytest.mark.parametrize("as_text_ids", [False, True])
def test_the_names_of_each_framework_are_understood(tmp_path, name, as_text_ids):
    trace = pipeline(rendezvous=True, duration=slow_third)
    found = diagnose(read_trace([exported(tmp_path, trace, name=name, as_text_ids=as_text_ids)]))
    assert (found.job.pp, found.job.microbatches, found.job.schedule_name) == (4, 8, "1F1B")
    assert (found.verdict.cause, found.verdict.stage) == ("imbalance", 2)


def test_ranks_of_separate_files_are_named_by_the_files(tmp_path):
    trace = pipeline(rendezvous=True, duration=slow_third)
    for rank in range(4):
        write(tmp_path / f"job.rank{rank}.sqlite", trace, [rank])
    found = read_trace([tmp_path])
    assert sorted(found.ranks) == [0, 1, 2, 3]
    assert not any("numbered by" in warning for warning in found.warnings)
    assert diagnose(found).verdict.stage == 2


def test_a_range_that_never_ended_lasts_to_the_end(tmp_path):
    path = exported(tmp_path, pipeline(rendezvous=True))
    with sqlite3.connect(path) as database:
        database.execute("UPDATE NVTX_EVENTS SET end = NULL WHERE start = (SELECT MAX(start) FROM NVTX_EVENTS)")
    database.close()
    assert diagnose(read_trace([path])).job.pp == 4


def test_a_backward_takes_the_kernels_of_the_engines_threads(tmp_path):
    path = exported(tmp_path, pipeline(rendezvous=True))
    with sqlite3.connect(path) as database:
        database.execute(
            "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = globalTid + 1 WHERE correlationId IN "
            "(SELECT correlationId FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE shortName = 1)"
        )
    database.close()
    assert len(read_trace([path]).of_kind(Kind.BACKWARD).spans) == 4 * 8 * 5


def test_time_in_which_the_host_had_launched_nothing_is_the_hosts(tmp_path):
    """Two ranks; the second launches each op 5 ms after the one before has ended, although its input is there."""
    trace = pipeline("GPipe", ranks=2, microbatches=4, host_gap=late_second)
    found = diagnose(read_trace([exported(tmp_path, trace)]))
    assert found.why.host > 0.05
    close(found, diagnose(trace), "why", 0.05)


def test_without_names_the_ops_are_what_lies_between_messages(tmp_path):
    trace = pipeline(rendezvous=True, duration=slow_third)
    path = exported(tmp_path, trace, name=lambda span: "aten::linear", autograd=True)  # noqa: ARG005
    read = read_trace([path])
    assert any("no NVTX range names an op" in warning for warning in read.warnings)
    found, expected = diagnose(read), diagnose(trace)
    assert (found.job.pp, found.job.microbatches, found.job.schedule_name) == (4, 8, "1F1B")
    assert (found.verdict.cause, found.verdict.stage) == ("imbalance", 2)
    assert found.verdict.confidence == "inferred"
    close(found, expected, "why", 0.05)


def test_an_overlapping_forward_and_backward_are_told_apart_by_their_threads(tmp_path):
    path = tmp_path / "one.sqlite"
    database = create(path)
    thread = global_pid(0) + 7
    database.execute(
        "INSERT INTO NVTX_EVENTS VALUES (0, 100, 59, 'PP:(4F4;3B0)OVERLAP_F_B', ?, NULL, 0, NULL, NULL)", (thread,)
    )
    for number, away in enumerate((0, 0, 1, 1, 0)):  # forward, backward, and a last kernel of the forward
        times = (1000 + number * 10, 1008 + number * 10)
        row = (*times, 0, 7, number, global_pid(0), 1, 1)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        launch = (10 + number, 11 + number, thread + away, number, 4)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", launch)
    database.commit()
    database.close()
    ops = read_trace([path]).of_kind(Kind.FORWARD, Kind.BACKWARD).spans
    found = [(Kind(op["kind"]), int(op["stage"]), int(op["start_ns"]), int(op["end_ns"])) for op in ops]
    assert found == [(Kind.FORWARD, 4, 1000, 1048), (Kind.BACKWARD, 3, 1020, 1038)]


def test_without_names_and_peers_there_is_no_pipeline(tmp_path):
    path = exported(tmp_path, pipeline(rendezvous=True), name=lambda span: "aten::linear", payloads=False)  # noqa: ARG005
    with pytest.raises(NoPipelineFound, match="include-blobs"):
        read_trace([path])


def test_older_exports_without_some_columns_are_read(tmp_path):
    path = exported(tmp_path, pipeline("GPipe", ranks=2), payloads=False)
    with sqlite3.connect(path) as database:
        for table, column in (("CUPTI_ACTIVITY_KIND_KERNEL", "shortName"), ("NVTX_EVENTS", "textId")):
            database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        for column in ("jsonText", "binaryData", "domainId"):
            database.execute(f"ALTER TABLE NVTX_EVENTS DROP COLUMN {column}")
        database.execute("DROP TABLE NVTX_PAYLOAD_SCHEMA_ENTRIES")
    database.close()
    assert diagnose(read_trace([path])).job.pp == 2


def test_two_machines_are_aligned_by_the_begin_of_their_recordings(tmp_path):
    trace = pipeline(rendezvous=True)
    for number, ranks in enumerate([(0, 1), (2, 3)]):
        path = tmp_path / f"node{number}.sqlite"
        write(path, trace, ranks)
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER)")
            database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?)", (10**18 - number * 7 * MS,))
            for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"):
                database.execute(f"UPDATE {table} SET start = start + ?, end = end + ?", [number * 7 * MS] * 2)
        database.close()
    found = read_trace([tmp_path])
    assert found.clock_error_s == pytest.approx(0, abs=20e-6)
    assert any("the 2 hosts" in warning and "have clocks of their own" in warning for warning in found.warnings)
    close(diagnose(found), diagnose(trace), "why", 0.02)


def test_messages_of_ranks_that_left_no_file_are_said_to_have_no_other_end(tmp_path):
    write(tmp_path / "rank1.sqlite", pipeline(rendezvous=True), [1])
    found = read_trace([tmp_path])
    # rank 1 receives and sends 8 activations and 8 gradients in each of 5 steps
    assert any("160 of 160 sends and receives have their other end on ranks" in said for said in found.warnings)
    assert diagnose(found).verdict.confidence == "undecided"


def test_a_report_that_is_not_exported_names_the_command(tmp_path):
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"\0" * 100)
    with pytest.raises(BadRecord, match=r"nsys export --type sqlite --include-blobs=true .*run\.nsys-rep"):
        read_trace([report])


def test_another_database_is_refused_in_one_line(tmp_path):
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE songs (name TEXT)")
    database.close()
    with pytest.raises(BadRecord, match="expected an export of Nsight Systems"):
        read_trace([path])


def test_a_cut_off_file_is_refused_or_read_as_far_as_it_goes(tmp_path):
    whole = exported(tmp_path, pipeline("GPipe", ranks=2)).read_bytes()
    for length in (100, 4096, 9000, len(whole) // 2, len(whole) - 4096):
        path = tmp_path / "cut.sqlite"
        path.write_bytes(whole[:length])
        with contextlib.suppress(BadRecord, NoPipelineFound):
            assert any("only the first rows" in warning for warning in read_trace([path]).warnings)


def test_a_file_that_is_no_database_is_given_back(tmp_path):
    path = tmp_path / "torn.sqlite"
    path.write_bytes(exported(tmp_path, pipeline("GPipe", ranks=2)).read_bytes()[:100])
    with pytest.raises(BadRecord) as refused:
        Database(path)
    opened = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert path not in opened, refused.value


@pytest.mark.parametrize(
    "schema",
    [
        (
            "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE r(start) AS "
            "(SELECT 1 UNION SELECT start+1 FROM r) SELECT start, start AS end, 1 AS globalPid FROM r"
        ),
        "CREATE VIRTUAL TABLE CUPTI_ACTIVITY_KIND_KERNEL USING fts5(start)",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (end INTEGER, start INTEGER AS (length(hex(zeroblob(400000000)))))",
    ],
    ids=["view", "virtual", "computed"],
)
def test_a_schema_that_computes_is_not_run(tmp_path, schema):
    path = tmp_path / "hostile.sqlite"
    with sqlite3.connect(path) as database:
        database.execute(schema)
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER)")
    database.close()
    with pytest.raises((BadRecord, NoPipelineFound)):
        read_trace([path])


def test_names_that_are_no_utf_8_are_refused_or_shown(tmp_path):
    path = tmp_path / "odd.sqlite"
    database = create(path)
    database.commit()
    database.close()
    data = path.read_bytes()
    for part in (b"correlationId", b"StringIds", b"CUPTI_ACTIVITY_KIND_RUNTIME"):
        path.write_bytes(data.replace(part, b"\xff" * len(part)))
        with pytest.raises((BadRecord, NoPipelineFound)):
            read_trace([path])


def test_numbers_of_other_types_are_numbers_or_missing(tmp_path):
    path = tmp_path / "odd.sqlite"
    database = create(path)
    for value in (None, "many", b"\xff" * 9, 1e300, -(2**63), 2**63 - 1):
        row = (value or 0, value or 0, 0, 7, value, value, 1, 1)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, ?, ?, 0, ?, ?)", (value or 0, *[value] * 6)[:7])
    database.commit()
    database.close()
    with pytest.raises(NoPipelineFound):
        read_trace([path])


def test_the_file_is_not_written_to(tmp_path):
    path = exported(tmp_path, pipeline("GPipe", ranks=2))
    before = path.read_bytes()
    read_trace([path])
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_payload_is_unpacked_by_the_layout_that_the_export_describes(real):
    with contextlib.closing(Database(real["h100_2gpu_1s"])) as database:
        layout = layouts(database)
    blob = (1).to_bytes(8, "little") + (16777226).to_bytes(8, "little") + (24).to_bytes(8, "little")
    blob += (32).to_bytes(8, "little") + (77).to_bytes(8, "little") + (4096).to_bytes(8, "little")
    blob += (3).to_bytes(4, "little") + bytes(4)
    assert payload_of(blob, None, layout) == Payload(communicator=77, size_bytes=4096, peer=3)
    assert payload_of(blob[:40], None, layout) == Payload(communicator=77)
    assert payload_of(None, '{"Peer rank": 1, "Message size [bytes]": 8}', layout) == Payload(size_bytes=8, peer=1)
    assert payload_of(None, "[" * 100000, layout) == Payload()


def test_a_message_posted_early_is_waited_for_by_no_time(tmp_path):
    """The only gap before the second forward is the host's: its message was there."""
    path = tmp_path / "one.sqlite"
    write(
        path,
        simulate({0: [Compute(Kind.FORWARD, 10 * MS, 0, 0), Stall(5 * MS), Compute(Kind.BACKWARD, MS, 0, 0)]}),
        [0],
    )
    forwards = read_trace([path]).of_kind(Kind.FORWARD, Kind.BACKWARD).spans
    assert (forwards["end_ns"] - forwards["start_ns"]).tolist() == [10 * MS, MS]
    assert np.all(forwards["launch_ns"] == forwards["start_ns"] - 4 * US)


def test_ranks_are_told_apart_by_process():
    assert global_pid(1) >> 24 == (global_pid(0) >> 24) + 1
    assert NsightSystems.description.startswith("exports of Nsight Systems")
