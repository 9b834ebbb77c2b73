"""Where idle time began, slow ranks and causes of host time, as the reports show them."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from ppdiag.diagnosis import HostSplit, Why
from ppdiag.origins import CriticalPath, CriticalSpan, Origin, RootCause, Workers
from ppdiag.reports import html, terminal
from ppdiag.reports import json as json_report
from ppdiag.reports.words import origin_name
from tests.reports.factory import HOSTILE, make_diagnosis


def origin(what, fraction=0.1, **place):
    nowhere = {"stage": None, "op": None, "rank": None, "link": None, "group": None}
    return Origin(what=what, fraction=fraction, own_fraction=0.0, **{**nowhere, **place})


PATH = CriticalPath(
    step=12,
    length_s=0.030,
    spans=(
        CriticalSpan(0, "forward", 0, 0, None, 0.0, 0.020),
        CriticalSpan(0, "message", None, None, (0, 1), 0.020, 0.030),
    ),
    by_what_s={"forward": 0.020, "message": 0.010},
    by_rank_s={0: 0.030},
    by_stage_s={0: 0.020},
)
WORKERS = Workers(
    ranks=((0, 1), (2, 3)),
    replica_slowdown=(1.0, 1.4),
    position_slowdown=(1.0, 1.5),
    slowdown=((1.0, 1.0), (1.0, 1.4)),
)


def diagnosis(*origins, **others):
    return replace(make_diagnosis(), root_cause=RootCause(origins, 4, PATH), **others)


def in_terminal(found, width=80):
    stream = io.StringIO()
    terminal.render(found, Console(file=stream, width=width, force_terminal=False))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (origin("schedule"), "the schedule itself"),
        (origin("work", op="backward", stage=2, rank=6), "backward of stage 2, rank 6"),
        (origin("work", op="forward", stage=2), "forward of stage 2"),
        (origin("work", op="optimizer", rank=1), "optimizer, rank 1"),
        (origin("host", rank=3), "host of rank 3"),
        (origin("message", link=(1, 2)), "messages from stage 1 to stage 2"),
        (origin("message", link=(1, 2), rank=5), "messages from stage 1 to stage 2 (rank 5)"),
        (origin("collective", group="dp"), "collectives of dp"),
        (origin("step before"), "a step before"),
        (origin("unexplained"), "unexplained"),
    ],
)
def test_an_origin_is_named_by_what_and_where(place, name):
    assert origin_name(place) == name


def test_the_terminal_shows_the_three_largest_origins_as_shares_of_idle():
    places = [origin("host", 0.04, rank=rank) for rank in range(4)]
    found = diagnosis(*places)
    text = in_terminal(found)
    share = f"{100 * 0.04 / found.idle_fraction:.1f} %"
    assert [line.split("  host")[0].strip() for line in text.splitlines() if "host of rank" in line] == [share] * 3


def test_a_job_that_hardly_idles_is_told_no_origins():
    still = replace(
        diagnosis(origin("host", rank=0)), where=type(make_diagnosis().where)(host=0.01), why=Why(host=0.01)
    )
    assert "Where idle time began" not in in_terminal(still)


def test_slow_ranks_are_shown_where_there_are_replicas_and_one_is_slow():
    assert "1.40" in in_terminal(diagnosis(workers=WORKERS))
    assert "Slow ranks" not in in_terminal(diagnosis(workers=replace(WORKERS, slowdown=((1.0, 1.0), (1.0, 1.04)))))
    assert "Slow ranks" not in in_terminal(diagnosis(workers=replace(WORKERS, ranks=((0, 1),), slowdown=((1.0, 1.4),))))


@pytest.mark.parametrize("width", [40, 80])
def test_a_thousand_ranks_fit(width):
    many = Workers(
        ranks=tuple(tuple(range(16 * d, 16 * d + 16)) for d in range(64)),
        replica_slowdown=(1.0,) * 64,
        position_slowdown=(1.0,) * 16,
        slowdown=((1.0,) * 16,) * 63 + ((1.0,) * 13 + (2.0,) + (1.0,) * 2,),
    )
    text = in_terminal(diagnosis(workers=many), width)
    assert "2.00" in text
    assert max(len(line) for line in text.splitlines()) <= width
    assert "56 replicas and" in " ".join(text.split())


def test_host_time_is_split_where_its_causes_are_known():
    found = diagnosis(why=Why(host=0.3), host=HostSplit(python=0.2, gc=0.06, synchronising=0.04))
    assert "host: Python 20.0 %, garbage collection 6.0 %, synchronising calls 4.0 %" in " ".join(
        in_terminal(found).split()
    )


def test_the_page_shows_origins_path_and_slow_ranks():
    page = html.page(diagnosis(origin("work", 0.12, op="backward", stage=2, rank=6), workers=WORKERS))
    assert "backward of stage 2, rank 6" in page
    assert "12.0 %" in page
    assert "forward 66.7 %, message 33.3 %" in page
    assert "rank 3: replica 1, position 1, 1.40" in page


def test_hostile_names_of_groups_are_text():
    found = diagnosis(origin("collective", group=HOSTILE))
    page = html.page(found)
    assert "<img src=x" not in page
    assert "\x1b" not in in_terminal(found)
    stream = io.StringIO()
    json_report.write(found, stream)
    assert json.loads(stream.getvalue())["root_cause"]["origins"][0]["group"] == HOSTILE


def test_the_json_has_ranks_as_keys_that_are_text():
    stream = io.StringIO()
    json_report.write(diagnosis(origin("schedule"), workers=WORKERS), stream)
    data = json.loads(stream.getvalue())
    assert data["root_cause"]["critical_path"]["by_rank_s"] == {"0": 0.030}
    assert data["root_cause"]["critical_path"]["spans"][1]["link"] == [0, 1]
    assert data["workers"]["slowdown"] == [[1.0, 1.0], [1.0, 1.4]]
