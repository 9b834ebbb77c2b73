"""The watchdog of ProcessGroupNCCL: one report for a rank and op, however often and in whichever form it was printed.

The lines are those of public threads, as torch 1.13 to 2.9 print them.
"""

from __future__ import annotations

import pytest

from tests.analyzers.nccl.formats import read

CAUGHT = (
    "[rank1]:[E1003 18:37:01.832146912 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=6463, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800017 "
    "milliseconds before timing out.\n"
)
DETECTED = (
    "[rank1]:[E1003 18:37:01.833575187 ProcessGroupNCCL.cpp:1664] [PG 0 (default_pg) Rank 1] Exception (either an "
    "error or timeout) detected by watchdog at work: 6463, last enqueued NCCL work: 6463, last completed NCCL "
    "work: 6462.\n"
)
TIMEOUT_AT = (
    "[rank1]:[E1003 18:37:01.833621509 ProcessGroupNCCL.cpp:1709] [PG 0 (default_pg) Rank 1] Timeout at NCCL work: "
    "6463, last enqueued NCCL work: 6463, last completed NCCL work: 6462.\n"
)
TOLD = (
    "[rank4]:[E703 19:54:01.074837389 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank 4] Received a "
    "dump signal due to a collective timeout from  rank 7 and we will try our best to dump the debug info. Last "
    "enqueued NCCL work: 56116, last completed NCCL work: 56116.This is most likely caused by incorrect usages "
    "of collectives\n"
)


def _facts(report):
    return (report.op, report.seq, report.timeout_ms, report.ran_ms, report.last_enqueued, report.last_completed)


def test_all_lines_about_one_op_make_one_report():
    (found,) = read(CAUGHT + DETECTED + TIMEOUT_AT).watchdog
    assert (found.rank, found.group) == (1, "default_pg")
    assert _facts(found) == ("ALLREDUCE", 6463, 1800000, 1800017, 6463, 6462)


def test_its_three_repeats_count_and_add_no_report():
    (found,) = read(CAUGHT * 3).watchdog
    assert found.times_printed == 3


def test_a_rank_that_was_only_told_of_the_timeout_says_by_whom():
    (found,) = read(TOLD).watchdog
    assert (found.rank, found.told_by, found.op, found.last_enqueued, found.last_completed) == (4, 7, "", 56116, 56116)


def test_ranks_that_stop_at_different_numbers_stay_apart():
    other = CAUGHT.replace("rank1", "rank0").replace("Rank 1", "Rank 0").replace("6463", "6460")
    assert [(each.rank, each.seq) for each in read(CAUGHT + other).watchdog] == [(0, 6460), (1, 6463)]


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        (
            (
                "[E ProcessGroupNCCL.cpp:475] [Rank 1] Watchdog caught collective operation timeout: "
                "WorkNCCL(SeqNum=11, "
                "OpType=BROADCAST, TensorShape=[1, 2], Timeout(ms)=600000) ran for 600081 milliseconds before "
                "timing out."
            ),
            ("BROADCAST", 11, 600000, 600081, None, None),
        ),
        (
            (
                "[E ProcessGroupNCCL.cpp:566] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL("
                "OpType=ALLGATHER, Timeout(ms)=1800000) ran for 1808499 milliseconds before timing out."
            ),
            ("ALLGATHER", None, 1800000, 1808499, None, None),
        ),
        (
            (
                "[rank1]:[E1218 20:27:21.484903450 ProcessGroupNCCL.cpp:2168] [PG ID 1 PG GUID 1 Rank 1]  "
                "failure detected "
                "by watchdog at work sequence id: 1 PG status: last enqueued work: 547, last completed work: -1"
            ),
            ("", 1, None, None, 547, -1),
        ),
        (
            (
                "[rank1]: torch.distributed.DistBackendError: [Rank 1] Watchdog caught collective operation timeout: "
                "WorkNCCL(SeqNum=3, OpType=RECV, NumelIn=8, NumelOut=8, Timeout(ms)=9) ran for 10 milliseconds"
            ),
            ("RECV", 3, 9, 10, None, None),
        ),
    ],
)
def test_the_forms_of_other_releases_are_read(line, facts):
    (found,) = read(line + "\n").watchdog
    assert found.rank == 1
    assert _facts(found) == facts


@pytest.mark.parametrize("completed", ["3904955349522264369", "-3904955349522264369", "6464", "99999999999999999999"])
def test_a_counter_that_is_garbage_is_left_out(completed):
    (found,) = read(DETECTED.replace("work: 6462", f"work: {completed}")).watchdog
    assert (found.last_enqueued, found.last_completed) == (6463, None)


def test_the_rank_before_the_line_is_the_rank_of_the_job_and_the_one_in_it_that_of_the_group():
    (found,) = read(CAUGHT.replace("[rank1]", "[rank5]")).watchdog
    assert found.rank == 5


def test_a_log_without_any_timeout_has_no_report():
    assert read("[rank0]: all good, last enqueued work: 5, last completed work: 5\n").watchdog == ()
