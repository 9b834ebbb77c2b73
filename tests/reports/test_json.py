from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np

from ppdiag.diagnosis import Overhead
from ppdiag.reports.json import write
from tests.reports.factory import HOSTILE, make_diagnosis, make_slow_link

WHY = {"bubble", "imbalance", "communication", "host", "unexplained"}
WHERE = {"late_sender", "transfer", "send_wait", "collective", "host", "unexplained"}
STAGE = {
    "forward_s",
    "backward_s",
    "weight_s",
    "busy_fraction",
    "idle_fraction",
    "where",
    "why",
    "peak_memory_bytes",
}


def written(diagnosis: Any) -> Any:
    stream = io.StringIO()
    write(diagnosis, stream)
    return json.loads(stream.getvalue(), parse_constant=lambda name: f"not JSON: {name}")


def test_keys_are_those_of_the_public_contract() -> None:
    data = written(make_diagnosis())
    assert list(data) == [
        "schema",
        "source",
        "job",
        "steps",
        "phases",
        "idle",
        "imbalance",
        "stages",
        "links",
        "ranks",
        "replay",
        "clock",
        "overhead",
        "verdict",
        "symptoms",
        "transports",
        "warnings",
        "root_cause",
        "workers",
        "host",
        "spread",
        "step_results",
    ]
    assert data["schema"] == "ppdiag.diagnosis/1"
    assert set(data["job"]) == {"world_size", "pp", "vpp", "tp", "dp", "microbatches", "framework", "schedule"}
    assert set(data["job"]["schedule"]) == {"name", "match"}
    assert set(data["steps"]) == {"count", "dropped", "median_s", "p10_s", "p90_s"}
    assert set(data["phases"]) == {"pipeline_s", "tail_s", "between_s"}
    assert set(data["idle"]) == {"fraction", "where", "why"}
    assert set(data["imbalance"]) == {"stage", "microbatch", "rank"}
    assert set(data["replay"]) == {"error_fraction"}
    assert set(data["clock"]) == {"error_s"}
    assert set(data["overhead"]) == {"fraction", "low", "high"}
    assert set(data["verdict"]) == {"cause", "stage", "link", "rank", "share", "confidence", "text"}


def test_keys_of_the_rows_are_those_of_the_public_contract() -> None:
    data = written(make_diagnosis())
    assert set(data["stages"][0]) == {"stage", "ranks"} | STAGE
    assert set(data["ranks"][0]) == {"rank", "host", "stage"} | STAGE
    assert set(data["links"][0]) == {
        "src_stage",
        "dst_stage",
        "direction",
        "bytes",
        "transfer_s",
        "bandwidth_bytes_per_s",
        "transport",
        "by_clocks_s",
    }
    for part in (data["idle"], data["stages"][0], data["ranks"][0]):
        assert set(part["where"]) == WHERE
        assert set(part["why"]) == WHY
    # title, severity and measure_after are for people: reports have them, the contract does not.
    assert set(data["symptoms"][0]) == {"id", "evidence", "advice"}
    assert set(data["symptoms"][0]["advice"][0]) == {"action", "how", "gain_fraction", "gain_range", "source"}


def test_what_does_not_apply_is_null() -> None:
    verdict = written(make_diagnosis())["verdict"]
    assert (verdict["stage"], verdict["link"], verdict["rank"]) == (2, None, None)
    assert written(make_slow_link())["verdict"]["link"] == [1, 2]
    assert written(replace(make_diagnosis(), overhead=None))["overhead"] is None


def test_numbers_that_json_cannot_hold_become_null() -> None:
    data = written(replace(make_diagnosis(), clock_error_s=float("inf"), overhead=Overhead(float("nan"), 0.0, 1.0)))
    assert data["clock"]["error_s"] is None
    assert data["overhead"] == {"fraction": None, "low": 0.0, "high": 1.0}


def test_numpy_numbers_become_numbers() -> None:
    float_like: Any = np.float32(0.5)
    data = written(replace(make_diagnosis(), clock_error_s=float_like, transports=(np.int64(3), np.float64("nan"))))
    assert data["clock"]["error_s"] == 0.5
    assert data["transports"] == [3, None]


def test_text_comes_back_as_it_was() -> None:
    assert written(make_diagnosis(text=HOSTILE))["ranks"][0]["host"] == f"{HOSTILE}-0"


def test_names_are_readable_in_a_utf8_stream() -> None:
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding="utf-8")
    write(make_diagnosis(text="节点"), file)
    file.flush()
    assert "节点-0".encode() in buffer.getvalue()


def test_any_stream_takes_any_name() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write(make_diagnosis(text="节点\udcff"), file)
    file.flush()
    file.buffer.seek(0)
    assert json.load(file.buffer)["ranks"][0]["host"] == "节点?-0"
