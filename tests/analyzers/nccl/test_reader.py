"""Which files are read, and how it is said that there is nothing in them."""

from __future__ import annotations

import pytest

from ppdiag.analyzers.nccl.reader import log_files, read_logs
from ppdiag.errors import BadRecord, NotARun, PathNotFound
from ppdiag.rundir import encode_header
from tests.analyzers.nccl.formats import between

P2P = "gpu1:{pid}:40 [0] NCCL INFO Channel 00/0 : {rank}[0] -> 1[1] via P2P/CUMEM\n"


def test_of_a_run_directory_the_logs_that_nccl_wrote_there_are_read(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"nccl-gpu1-{31 + rank}.log").write_text(P2P.format(pid=31 + rank, rank=rank))
    (tmp_path / "rank00000-0.spans").write_bytes(b"PPDIAG-SPANS\n")
    (tmp_path / "other.log").write_text(P2P.format(pid=1, rank=5))
    assert [path.name for path in log_files(tmp_path)] == ["nccl-gpu1-31.log", "nccl-gpu1-32.log"]
    assert len(read_logs([tmp_path]).connections) == 2


def test_of_another_directory_all_that_may_be_logs_are_read(tmp_path):
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0" / "stdout.log").write_text(P2P.format(pid=31, rank=0))
    (tmp_path / "nccl.gpu1.32").write_text(P2P.format(pid=32, rank=1))
    (tmp_path / "model.safetensors").write_text(P2P.format(pid=33, rank=2))
    report = read_logs([tmp_path])
    assert {each.process.pid for each in report.connections} == {31, 32}
    assert len(report.sources) == 2


def test_several_files_are_one_job(tmp_path):
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    for rank, path in enumerate(paths):
        path.write_text(P2P.format(pid=31 + rank, rank=rank))
    assert len(read_logs(paths).connections) == 2


def test_a_path_that_is_not_there_is_not_found(tmp_path):
    with pytest.raises(PathNotFound, match=r"none\.log"):
        read_logs([tmp_path / "none.log"])


def test_a_file_without_a_line_of_nccl_is_no_log_of_it(tmp_path):
    (tmp_path / "a.log").write_text("step 1 loss 2.3\n")
    with pytest.raises(NotARun, match="NCCL_DEBUG=INFO"):
        read_logs([tmp_path / "a.log"])


def test_a_file_that_cannot_be_read_is_said_so(tmp_path, monkeypatch):
    path = tmp_path / "a.log"
    path.write_text("")

    def refuse(*_args, **_settings):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(BadRecord, match="Permission denied"):
        read_logs([path])


def test_in_a_run_directory_the_record_says_which_ranks_the_processes_are(tmp_path):
    start = "gpu1:{pid}:40 [0] NCCL INFO comm 0xaa rank {rank} nranks 2 cudaDev 0 busId c1 commId 0xabc - Init START\n"
    for rank in (0, 1):  # of the communicator; 6 and 7 of the job
        facts = {"host": "gpu1.cluster.example", "pid": 31 + rank, "rank": 6 + rank, "world_size": 8}
        (tmp_path / f"rank0000{6 + rank}-0.spans").write_bytes(encode_header(facts))
        text = start.format(pid=31 + rank, rank=rank) + P2P.format(pid=31 + rank, rank=rank)
        (tmp_path / f"nccl-gpu1-{31 + rank}.log").write_text(text)
    (tmp_path / "rank00005-0.spans").write_bytes(b"PPDIAG-SPANS\n{torn")
    report = read_logs([tmp_path])
    assert between(report, 6, 7) == "P2P/CUMEM"
    assert between(report, 0, 1) is None
