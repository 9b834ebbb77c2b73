"""The summary of a hang: the fault first, at 80 columns, whatever the texts say."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from ppdiag.hang import Absence, Absent, Hang, Operation, RankAtHang, Root, RootKind, Stuck
from ppdiag.reports.hang import render

OPERATION = Operation("72", "EXPERT_MODEL_PARALLEL_GROUP", "all_to_all", 45265, sizes="2048x5120 BFloat16")
MESSAGE = Operation("39", "PIPELINE", "message", 7, 0, 1)


def hang(**changes):
    parts = {
        "source": "dumps",
        "world_size": 3,
        "text": "rank 2 holds the job up: 2 of 3 ranks wait there",
        "roots": (Root(RootKind.HOST, (2,), 2, "rank 2: the host has not come", "its stack"),),
        "stuck": (Stuck(OPERATION, (1,), (Absent(2, Absence.MISSING, "has not called it"),)),),
        "ranks": (
            RankAtHang(0, dump=True, pending=1, first_pending=MESSAGE, last_finished="", waits_for=(1,)),
            RankAtHang(1, dump=True, pending=3, first_pending=OPERATION, last_finished="", waits_for=(2,)),
            RankAtHang(2, dump=False, pending=0, first_pending=None, last_finished=""),
        ),
        "warnings": ("no dump of rank 2",),
    }
    return Hang(**{**parts, **changes})


def printed(found, width=80):
    stream = StringIO()
    render(found, Console(file=stream, width=width, color_system=None))
    return stream.getvalue()


def test_what_holds_the_job_up_comes_first():
    lines = [line.rstrip() for line in printed(hang()).splitlines()]
    assert lines[0] == "rank 2 holds the job up: 2 of 3 ranks wait there"
    assert "  look at  its stack" in lines


def test_each_rank_is_said_as_it_sees_its_op():
    text = printed(hang())
    assert "send 7 to rank 1" in text
    assert "all_to_all 45265" in text
    assert "no dump" in text


def test_lines_keep_to_the_width():
    assert all(len(line) <= 60 for line in printed(hang(), width=60).splitlines())


def test_hostile_text_is_shown_and_does_nothing():
    name = "[red]x[/red]\x1b[31m"
    text = printed(
        hang(stuck=(Stuck(Operation("7", name, name, 1), (1,), (Absent(2, Absence.MISSING, name),)),), text=name)
    )
    assert "[red]x[/red]" in text
    assert "\x1b" not in text


def test_many_ranks_are_cut_and_counted():
    ranks = tuple(RankAtHang(i, dump=True, pending=0, first_pending=None, last_finished="") for i in range(100))
    assert "68 more ranks are left out" in printed(hang(ranks=ranks))
