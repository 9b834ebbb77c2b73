"""The table of changes: ranked, with its range, its doubt, its memory, and what cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from ppdiag.analyzers.what_if import Change, Prediction
from ppdiag.analyzers.what_if.memory import Held
from ppdiag.analyzers.what_if.survey import Answer, Refused
from ppdiag.reports.what_if import plain, table

GIB = 1 << 30
RUN = SimpleNamespace(
    job=SimpleNamespace(schedule_name="1F1B", pp=2, vpp=1, microbatches=8),
    graph=SimpleNamespace(duration_K=np.array([0.1, 0.1, 0.1])),
    trace=SimpleNamespace(job=SimpleNamespace(source="run")),
)


def predicted(change: Change, *step_ms: float, samples: float = 1.0, error: float = 0.0, gib: int = 0) -> Prediction:
    held = Held((2.0, 1.0), (gib * GIB, gib * GIB) if gib else None)
    return Prediction(change, np.array(step_ms) / 1e3, RUN.graph.duration_K, samples, error, held, held)


def test_a_row_gives_step_change_range_and_activations() -> None:
    # twice the samples in 160 ms: 20 % less for the same; 10th and 90th percentile of 150, 160, 170 are 152 and 168
    answer = Answer((predicted(Change(microbatches=16), 150, 160, 170, samples=2.0),), ())
    assert table(RUN, answer).splitlines()[:4] == [
        "1F1B with P=2, V=1, M=8: 3 steps of 100 ms (median)",
        "",
        "what if            step   change               range  kept",
        "16 microbatches  160 ms  -20.0 %  -24.0 % to -16.0 %     2",
    ]


def test_bytes_have_a_column_where_the_record_tells_them() -> None:
    rows = table(RUN, Answer((predicted(Change(checkpoint=True), 130, 130, 130, gib=12),), ())).splitlines()
    assert rows[2].endswith("memory")
    assert rows[3].endswith("12.0 GiB")


def test_rows_that_replay_the_unchanged_run_badly_are_marked() -> None:
    text = table(RUN, Answer((predicted(Change(schedule="gpipe"), 90, 90, 90, error=0.19),), ()))
    assert "gpipe ?" in text
    assert "19.0 % off" in text


def test_what_cannot_be_is_said_and_shows_no_control_characters() -> None:
    text = table(RUN, Answer((), (Refused(Change(schedule="zb-v"), "no\x1b[31mroom"),)))
    assert "zb-v: no" in text
    assert "\x1b" not in text


def test_the_data_are_those_of_the_table() -> None:
    answer = Answer((predicted(Change(microbatches=16), 150, 160, 170, samples=2.0),), (Refused(Change(), "why"),))
    found = plain(RUN, answer)
    row = found["predictions"][0]
    assert (row["step_s"], round(row["gain_fraction"], 9), row["samples_ratio"]) == (0.16, 0.2, 2.0)
    assert found["refused"] == [{"change": "no change", "reason": "why"}]
    assert found["schema"] == "ppdiag.whatif/1"
