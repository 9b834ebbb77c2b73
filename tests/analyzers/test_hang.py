"""Who waits for whom: the real dumps' faulty ranks, and small hangs made by hand."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.analyzers.hang import diagnose_hang
from ppdiag.analyzers.sources.flight_recorder import FlightRecorder
from ppdiag.hang import Absence, Hang, RootKind

if TYPE_CHECKING:
    from collections.abc import Sequence

DATA = Path(__file__).parents[1] / "data" / "flight_recorder"


def call(name: str, sequence: int, state: str = "scheduled", group: str = "0") -> dict[str, Any]:
    """An entry as version 2.9 has it."""
    message = "send" in name or "recv" in name
    return {
        "record_id": sequence,
        "pg_id": int(group),
        "process_group": (group, f"GROUP_{group}"),
        "collective_seq_id": 0 if message else sequence,
        "p2p_seq_id": sequence if message else 0,
        "profiling_name": name,
        "time_created_ns": 1,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "state": state,
        "retired": False,
        "is_p2p": message,
    }


def dump(
    entries: list[dict[str, Any]], ranks: list[int], *, last: dict[str, tuple[int, int]] | None = None
) -> dict[str, Any]:
    """A dump of a job with one group ``0``; ``last``: numbers called and finished by group."""
    status = {
        group: {"last_enqueued_collective": called, "last_completed_collective": finished}
        for group, (called, finished) in (last or {}).items()
    }
    config = {"0": {"name": "0", "desc": "GROUP_0", "ranks": str(ranks)}}
    return {"version": "2.9", "pg_config": config, "pg_status": status, "entries": entries}


def write(folder: Path, dumps: Sequence[dict[str, Any] | None]) -> None:
    """One file a rank; None for a rank without a dump."""
    for rank, value in enumerate(dumps):
        if value is not None:
            (folder / f"dump_{rank}").write_bytes(pickle.dumps(value, 2))


def hang_of(folder: Path, dumps: Sequence[dict[str, Any] | None]) -> Hang:
    write(folder, dumps)
    return diagnose_hang(FlightRecorder().read([folder], None))


@pytest.mark.parametrize(
    ("job", "group", "size", "missing", "faulty"),
    [
        # reference.txt, and "Fault ranks" of fault_injection.log
        ("gpu_error_1st", "74", "4027x5120 BFloat16", (12,), (12, 14)),
        ("lock_gil_1st", "72", "2048x5120 BFloat16", (9, 14), (9, 14)),
    ],
)
def test_the_missing_and_the_faulty_ranks_of_real_hangs_are_found(job, group, size, missing, faulty):
    found = diagnose_hang(FlightRecorder().read([DATA / job], None))
    row = next(row for row in found.stuck if row.operation.group == group)
    assert (row.operation.name, row.operation.sizes, row.missing) == ("all_to_all", size, missing)
    assert sorted(rank for root in found.roots for rank in root.ranks) == list(faulty)
    assert found.roots[0].held_up == 14
    assert found.mismatches == ()


def test_a_gpu_that_does_not_finish_what_others_finished_is_told_from_a_host_that_does_not_come():
    kinds = [
        diagnose_hang(FlightRecorder().read([DATA / job], None)).roots[0].kind
        for job in ("gpu_error_1st", "lock_gil_1st")
    ]
    assert kinds == [RootKind.DEVICE, RootKind.HOST]


def test_what_a_rank_finished_last_is_known_from_the_counts_of_its_dump():
    ranks = diagnose_hang(FlightRecorder().read([DATA / "lock_gil_1st"], None)).ranks
    assert ranks[9].last_finished == "number 45264 of group 72 EXPERT_MODEL_PARALLEL_GROUP"
    assert ranks[8].last_finished == "number 45264 of group 72 EXPERT_MODEL_PARALLEL_GROUP"


def test_an_empty_dump_beside_full_ones_is_evidence(tmp_path):
    ranks = [0, 1]
    found = hang_of(tmp_path, [dump([call("nccl:all_reduce", 7)], ranks), dump([], ranks)])
    assert (found.roots[0].kind, found.roots[0].ranks) == (RootKind.HOST, (1,))
    assert any("no entries beside full ones" in warning for warning in found.warnings)


def test_a_rank_without_a_dump_is_where_the_waiting_begins(tmp_path):
    ranks = [0, 1, 2]
    found = hang_of(
        tmp_path, [dump([call("nccl:all_reduce", 7)], ranks), None, dump([call("nccl:all_reduce", 7)], ranks)]
    )
    assert (found.roots[0].kind, found.roots[0].ranks, found.roots[0].held_up) == (RootKind.NO_DUMP, (1,), 2)
    assert found.stuck[0].missing == (1,)


def test_waits_are_followed_through_other_ranks(tmp_path):
    """0 waits for 1's receive, 1 for 2's, 2 has nothing pending."""
    ranks = [0, 1, 2]
    dumps = [dump([call("nccl:send 0->1", 5)], ranks), dump([call("nccl:send 1->2", 5)], ranks), dump([], ranks)]
    found = hang_of(tmp_path, dumps)
    assert (found.roots[0].ranks, found.roots[0].held_up) == ((2,), 2)
    assert [row.waits_for for row in found.ranks] == [(1,), (2,), ()]


def test_two_ranks_that_both_send_first_are_a_cycle(tmp_path):
    ranks = [0, 1]
    found = hang_of(tmp_path, [dump([call("nccl:send 0->1", 5)], ranks), dump([call("nccl:send 1->0", 5)], ranks)])
    assert (found.roots[0].kind, found.roots[0].ranks) == (RootKind.CYCLE, (0, 1))
    assert found.text == "ranks 0, 1 wait for each other"


def test_ranks_that_wait_for_a_cycle_are_held_up_by_it(tmp_path):
    ranks = [0, 1, 2]
    dumps = [
        dump([call("nccl:send 0->1", 5)], ranks),
        dump([call("nccl:send 1->2", 5)], ranks),
        dump([call("nccl:send 2->1", 6)], ranks),
    ]
    root = hang_of(tmp_path, dumps).roots[0]
    assert (root.kind, root.ranks, root.held_up) == (RootKind.CYCLE, (1, 2), 1)


def test_an_op_that_all_have_called_is_the_transports(tmp_path):
    ranks = [0, 1, 2]
    found = hang_of(tmp_path, [dump([call("nccl:all_reduce", 7)], ranks)] * 3)
    assert (found.roots[0].kind, found.roots[0].ranks) == (RootKind.TRANSPORT, (0, 1, 2))
    assert "all_reduce 7" in found.text
    assert found.stuck[0].absent == ()


def test_a_message_with_both_ends_called_is_the_transports(tmp_path):
    ranks = [0, 1]
    found = hang_of(tmp_path, [dump([call("nccl:send 0->1", 5)], ranks), dump([call("nccl:recv 1<-0", 9)], ranks)])
    assert (found.roots[0].kind, found.roots[0].ranks) == (RootKind.TRANSPORT, (0, 1))


def test_a_rank_that_has_called_it_behind_another_op_is_said_to_have_that_to_finish_first(tmp_path):
    ranks = [0, 1, 2]
    dumps = [
        dump([call("nccl:all_reduce", 7)], ranks),
        dump([{**call("nccl:recv 1<-2", 4)}, call("nccl:all_reduce", 7)], ranks),
        dump([], ranks),
    ]
    found = hang_of(tmp_path, dumps)
    row = next(row for row in found.stuck if row.operation.name == "all_reduce")
    assert [(one.rank, one.why) for one in row.absent] == [(1, Absence.BEHIND), (2, Absence.MISSING)]
    assert found.roots[0].ranks == (2,)


def test_different_calls_at_one_place_are_said(tmp_path):
    ranks = [0, 1]
    found = hang_of(tmp_path, [dump([call("nccl:all_reduce", 7)], ranks), dump([call("nccl:broadcast", 7)], ranks)])
    assert found.mismatches == (
        "call 7 of group 0 GROUP_0 differs: rank 0: all_reduce 4x2 Float; rank 1: broadcast 4x2 Float",
    )


def test_finished_calls_hold_nobody_up(tmp_path):
    ranks = [0, 1]
    found = hang_of(tmp_path, [dump([call("nccl:all_reduce", 7, "completed")], ranks)] * 2)
    assert found.roots == ()
    assert found.text.startswith("no rank waits")
    assert found.ranks[0].last_finished == "all_reduce 7 (group 0 GROUP_0)"


def test_members_that_no_dump_lists_are_those_that_used_the_group(tmp_path):
    dumps = [dump([call("nccl:all_reduce", 7)], []), dump([call("nccl:all_reduce", 6, "completed")], [])]
    found = hang_of(tmp_path, dumps)
    assert found.stuck[0].missing == (1,)


def test_all_ranks_are_members_of_the_default_group(tmp_path):
    entry = {**call("gloo:all_reduce", 7), "process_group": ("0", "default_pg")}
    dumps = [{**dump(entries, []), "pg_config": {}} for entries in ([entry], [entry], [])]
    assert hang_of(tmp_path, dumps).stuck[0].missing == (2,)


def test_numbers_of_the_status_count_where_entries_have_gone(tmp_path):
    ranks = [0, 1]
    dumps = [dump([call("nccl:all_reduce", 7)], ranks), dump([], ranks, last={"0": (7, 7)})]
    assert hang_of(tmp_path, dumps).roots[0].kind is RootKind.DEVICE


def test_it_becomes_a_dict_of_plain_data(tmp_path):
    ranks = [0, 1]
    found = hang_of(tmp_path, [dump([call("nccl:all_reduce", 7)], ranks), dump([], ranks)]).to_dict()
    assert found["schema"] == "ppdiag.hang/1"
    assert found["roots"][0]["kind"] == "host"
    assert found["stuck"][0]["missing"] == [1]
    assert found["ranks"][0]["first_pending"]["name"] == "all_reduce"
