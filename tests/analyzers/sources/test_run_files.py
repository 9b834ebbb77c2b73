"""Which files of a directory are one job, and what is said of damaged ones."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from ppdiag.analyzers import schedules
from ppdiag.analyzers.sources import read_trace
from ppdiag.analyzers.sources.run_files import FileBytes, read_lines
from ppdiag.errors import NotARun
from ppdiag.model import RankStatus
from ppdiag.rundir import STATE, STATE_MAGIC, STATE_OFFSET, STATE_SIZE, encode_block
from ppdiag.trace import SPAN_DTYPE
from tests.analyzers.factory import Pipeline
from tests.analyzers.runs import SPAN, header_bytes, write_run

if TYPE_CHECKING:
    from pathlib import Path

    from ppdiag.trace import Trace

SECOND = 1_000_000_000


def small(steps: int = 4) -> Trace:
    orders = schedules.order("1F1B", ranks=2, chunks=1, microbatches=2)
    return Pipeline(orders, [0, 1], steps=steps, tail=0).trace()


def write_job(
    folder: Path,
    steps: int,
    *,
    start: int,
    begun_s: int,
    alive_s: int,
    launcher: int | None = None,
    host: str = "node",
) -> None:
    """A job that begins at a second and sends its last heartbeat ``alive_s`` later."""
    trace = small(steps)
    for rank in (0, 1):
        pid = 1000 * (start + 1) + rank
        times = {"started_unix_ns": begun_s * SECOND, "started_local_ns": begun_s * SECOND}
        own = trace.where(trace.spans["rank"] == rank)
        write_run(folder, own, start=start, header={"pid": pid, "host": host, "world_size": 2, **times})
        set_state(folder / f"rank{rank:05d}-{start}.state", begun_s + alive_s, RankStatus.FINISHED)
        if launcher is not None:
            with (folder / "processes.jsonl").open("a") as stream:
                armed = {"pid": pid, "ppid": launcher, "event": "armed", "unix_ns": begun_s * SECOND}
                stream.write(json.dumps(armed) + "\n")


def test_a_restart_is_no_second_job(tmp_path: Path) -> None:
    write_job(tmp_path, 3, start=0, begun_s=100, alive_s=10)
    write_job(tmp_path, 5, start=1, begun_s=120, alive_s=10)
    found = read_trace([tmp_path])
    assert int(found.spans["step"].max()) == 4
    assert any("started up to 2 times" in warning for warning in found.warnings)


def set_state(path: Path, heartbeat_s: int, status: RankStatus) -> None:
    slot = STATE.pack(heartbeat_s * SECOND, 0, 0, 0, 0, 0, -1, -1, -1, 0, 0, 0, status)
    path.write_bytes((STATE_MAGIC.ljust(STATE_OFFSET, b"\0") + slot).ljust(STATE_SIZE, b"\0"))


def test_what_ended_the_start_before_is_what_the_first_rank_to_end_raised(tmp_path: Path) -> None:
    write_job(tmp_path, 3, start=0, begun_s=100, alive_s=10)
    for rank, heartbeat_s, raised in ((0, 111, "RuntimeError: closed by peer"), (1, 110, "ValueError: mine\nand more")):
        set_state(tmp_path / f"rank{rank:05d}-0.state", heartbeat_s, RankStatus.RAISED)
        with (tmp_path / f"rank{rank:05d}-0.jsonl").open("a") as words:
            words.write(json.dumps({"type": "fact", "name": "raised", "value": raised}) + "\n")
    write_job(tmp_path, 5, start=1, begun_s=120, alive_s=10)
    warnings = read_trace([tmp_path]).warnings
    assert "the start before the last ended when rank 1 raised ValueError: mine" in warnings


def test_a_rank_that_recorded_nothing_in_the_last_start_is_not_taken_from_an_earlier_one(tmp_path: Path) -> None:
    write_job(tmp_path, 3, start=0, begun_s=100, alive_s=10, launcher=7)
    write_job(tmp_path, 5, start=1, begun_s=120, alive_s=10, launcher=7)
    for suffix in ("spans", "jsonl", "state"):
        (tmp_path / f"rank00001-1.{suffix}").unlink()
    found = read_trace([tmp_path])
    assert list(found.ranks) == [0]
    assert int(found.spans["step"].max()) == 4
    assert any("rank 1 ended before it had recorded anything" in warning for warning in found.warnings)


def test_a_restart_on_a_host_whose_clock_is_behind_is_no_second_job(tmp_path: Path) -> None:
    write_job(tmp_path, 3, start=0, begun_s=100, alive_s=60)
    write_job(tmp_path, 5, start=1, begun_s=150, alive_s=60, host="other")
    assert int(read_trace([tmp_path]).spans["step"].max()) == 4


def test_of_two_jobs_at_once_the_one_begun_last_is_read_by_its_launcher(tmp_path: Path) -> None:
    write_job(tmp_path, 3, start=0, begun_s=100, alive_s=60, launcher=7)
    write_job(tmp_path, 5, start=1, begun_s=110, alive_s=60, launcher=8)
    # The second job's rank 0 was first to make its file: start numbers alone would mix the two.
    for suffix in ("spans", "jsonl", "state"):
        first, second = (tmp_path / f"rank00000-{start}.{suffix}" for start in (0, 1))
        first.rename(tmp_path / "kept")
        second.rename(first)
        (tmp_path / "kept").rename(second)
    found = read_trace([tmp_path])
    assert [int(spans["step"].max()) for spans in found.by_rank().values()] == [4, 4]
    assert any("2 jobs wrote into this directory at the same time" in warning for warning in found.warnings)


def test_two_jobs_at_once_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    write_job(tmp_path, 3, start=0, begun_s=100, alive_s=60)
    write_job(tmp_path, 5, start=1, begun_s=110, alive_s=60)
    with pytest.raises(NotARun, match=r"rank 0 ran 2 times at once.*directory of its own with -o"):
        read_trace([tmp_path])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rank00000-0.jsonl", b'{"type": "fact", "name": "pp", "value": 2}\n\xff\xfe{\n', "1 damaged lines"),
        ("rank00000-0.jsonl", b'{"type": "group", "id": -5, "name": "x", "ranks": []}\n', "1 lines with missing"),
        ("rank00000-0.state", b"garbage", "unknown how rank 0 ended"),
        ("run.json", b"{", "run.json: damaged"),
        ("processes.jsonl", b"nonsense\n", "processes.jsonl: 1 damaged lines"),
    ],
)
def test_a_damaged_side_file_is_said(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    write_run(tmp_path, small())
    (tmp_path / name).write_bytes(content)
    assert any(name in warning and words in warning for warning in read_trace([tmp_path]).warnings)


def test_the_state_of_a_rank_that_has_just_begun_is_no_damage(tmp_path: Path) -> None:
    write_run(tmp_path, small())
    (tmp_path / "rank00000-0.state").write_bytes(STATE_MAGIC.ljust(STATE_SIZE, b"\0"))
    assert not any("rank00000-0.state" in warning for warning in read_trace([tmp_path]).warnings)


def test_the_torn_last_line_of_a_killed_rank_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n{"b"')
    assert read_lines(path) == ([{"a": 1}], [])


def test_a_file_is_found_in_as_bytes_are(tmp_path: Path) -> None:
    path = tmp_path / "data"
    content = bytes(3 << 20) + b"BLK1" + bytes(10)
    path.write_bytes(content)
    with path.open("rb") as stream:
        data = FileBytes(stream)
        assert len(data) == len(content)
        assert [data.find(b"BLK1", at) for at in (0, 3 << 20, (3 << 20) + 1)] == [3 << 20, 3 << 20, -1]
        assert data[3 << 20 : (3 << 20) + 4] == b"BLK1"


def test_reading_holds_the_spans_and_not_the_file_beside_them(tmp_path: Path) -> None:
    write_run(tmp_path, small())
    read_trace([tmp_path])  # imports count too
    # 200,000 spans that no recorder writes (kind 0): 12 MB, of which nothing is kept.
    block = encode_block(SPAN.pack(*([0] * 16)) * 1000, 1000)
    (tmp_path / "rank00000-0.spans").write_bytes(header_bytes(world_size=2, clock="one") + block * 200)
    tracemalloc.start()
    read_trace([tmp_path])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1.35 * 200_000 * SPAN_DTYPE.itemsize
