from __future__ import annotations

import errno
import json
import os
import struct
from typing import TYPE_CHECKING, Any

from ppdiag.hooks.recorder import Recorder, compute_tail, with_flag
from ppdiag.hooks.writer import Writer, clamp
from ppdiag.model import NONE, SPAN_FIELDS, SPAN_STRUCT, Flag, Kind, RankStatus
from ppdiag.rundir import (
    BLOCK_HEADER,
    SPAN_MAGIC,
    STATE,
    STATE_MAGIC,
    STATE_OFFSET,
    STATE_SIZE,
    STATE_TAG,
    STATE_TAG_OFFSET,
    decode_blocks,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

HUGE = 1 << 40
FORWARD = (100, 200, *compute_tail(Kind.FORWARD, 100, (3, 2, 1), 0))


def make_writer(folder: Path, recorder: Recorder, *, max_bytes: int = HUGE, rank: int = 7) -> tuple[Writer, list[str]]:
    said: list[str] = []
    writer = Writer(
        recorder,
        folder=str(folder),
        header={"rank": rank, "host": "here"},
        max_bytes=max_bytes,
        stop=lambda what, consequence: said.append(f"{what}; {consequence}"),
    )
    return writer, said


def read_spans(path: Path) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    data = path.read_bytes()
    assert data.startswith(SPAN_MAGIC)
    end = data.index(b"\n", len(SPAN_MAGIC))
    spans = []
    for payload, lost in decode_blocks(data, end + 1, struct.calcsize(SPAN_STRUCT)):
        assert lost == 0
        spans += list(struct.iter_unpack(SPAN_STRUCT, payload))
    return json.loads(data[len(SPAN_MAGIC) : end]), spans


def test_what_was_recorded_is_read_back_in_order_and_blocks_are_bounded(tmp_path: Path) -> None:
    recorder = Recorder()
    writer, said = make_writer(tmp_path, recorder)
    spans = [(index, index + 1, *FORWARD[2:]) for index in range(1000)]
    for span in spans:
        recorder.append(span)
    writer.flush()
    header, found = read_spans(tmp_path / "rank00007-0.spans")
    assert found == spans
    assert recorder.spans == []
    assert (header["rank"], header["host"], header["start"]) == (7, "here", 0)
    assert header["fields"] == [[name, dtype] for name, _, dtype in SPAN_FIELDS]
    assert said == []


def test_the_file_is_whole_after_every_flush(tmp_path: Path) -> None:
    recorder = Recorder()
    writer, _ = make_writer(tmp_path, recorder)
    for count in range(1, 4):
        recorder.append(FORWARD)
        writer.flush()
        assert len(read_spans(tmp_path / "rank00007-0.spans")[1]) == count


def test_a_restarted_rank_takes_the_next_number_and_leaves_the_first_record(tmp_path: Path) -> None:
    for _ in range(2):
        recorder = Recorder()
        writer, _ = make_writer(tmp_path, recorder)
        recorder.append(FORWARD)
        writer.close(RankStatus.FINISHED)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"rank00007-{start}.{suffix}" for start in (0, 1) for suffix in ("jsonl", "spans", "state")]
    assert len(read_spans(tmp_path / "rank00007-0.spans")[1]) == 1


def test_links_that_others_have_laid_into_the_directory_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("of the user")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("rank00007-0.spans", "rank00007-1.jsonl", "rank00007-1.state"):
        (run / name).symlink_to(precious)
    recorder = Recorder()
    writer, said = make_writer(run, recorder)
    recorder.append(FORWARD)
    writer.close(RankStatus.FINISHED)
    assert precious.read_text() == "of the user"
    assert len(read_spans(run / "rank00007-1.spans")[1]) == 1
    assert (run / "rank00007-1.state").read_bytes().startswith(STATE_MAGIC)
    assert not (run / "rank00007-1.jsonl").is_symlink()
    assert said == []


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:
    for suffix in ("spans", "jsonl", "state"):
        os.mkfifo(tmp_path / f"rank00007-0.{suffix}")
    writer, said = make_writer(tmp_path, Recorder())
    writer.close(RankStatus.FINISHED)
    assert (tmp_path / "rank00007-1.spans").is_file()
    assert said == []


def test_a_run_directory_that_the_rank_makes_is_its_owners_alone(tmp_path: Path) -> None:
    make_writer(tmp_path / "run", Recorder())
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_values_beyond_their_fields_become_unknown_instead_of_ending_the_record(tmp_path: Path) -> None:
    recorder = Recorder()
    writer, said = make_writer(tmp_path, recorder)
    span = (100, 200, *compute_tail(Kind.FORWARD, 100, (40_000, 2, 1), 0))
    recorder.append(span)
    recorder.append(FORWARD)
    writer.flush()
    _, found = read_spans(tmp_path / "rank00007-0.spans")
    microbatch = [name for name, _, _ in SPAN_FIELDS].index("microbatch")
    assert [record[microbatch] for record in found] == [NONE, 3]
    assert clamp(FORWARD) == FORWARD
    assert said == []


def test_at_its_limit_the_record_ends_with_a_whole_block_and_says_so_once(tmp_path: Path) -> None:
    recorder = Recorder()
    record_bytes = struct.calcsize(SPAN_STRUCT)
    writer, said = make_writer(tmp_path, recorder)
    writer._max_bytes = writer._size_bytes + 2 * (BLOCK_HEADER.size + record_bytes)
    for _ in range(4):
        recorder.append(FORWARD)
        writer.flush()
    assert len(read_spans(tmp_path / "rank00007-0.spans")[1]) == 2
    assert recorder.spans == []
    assert len(said) == 1
    assert "limit" in said[0]


def test_a_full_disk_ends_the_recording_and_nothing_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    writer, said = make_writer(tmp_path, recorder)

    def full(_fd: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    recorder.append(FORWARD)
    monkeypatch.setattr(os, "write", full)
    writer.flush()
    writer.flush()
    assert said == ["cannot write the record: [Errno 28] No space left on device; recording stops, the job goes on"]


def test_a_write_that_takes_only_a_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    writer, _ = make_writer(tmp_path, recorder)
    write = os.write
    recorder.append(FORWARD)
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:7]))
    writer.flush()
    monkeypatch.undo()
    assert len(read_spans(tmp_path / "rank00007-0.spans")[1]) == 1


def test_the_state_slot_holds_the_op_the_rank_is_inside_of_and_its_last_status(tmp_path: Path) -> None:
    recorder = Recorder()
    writer, _ = make_writer(tmp_path, recorder)
    recorder.inside_start_ns = 123
    recorder.inside = (100, 4096, 5, 6, 7, 8, 9, 10, 11, 12, 0, int(Flag.INIT), int(Kind.RECV), 1)
    writer.flush()
    data = (tmp_path / "rank00007-0.state").read_bytes()
    heartbeat_ns, *rest = STATE.unpack_from(data, STATE_OFFSET)
    assert STATE_TAG.unpack_from(data, STATE_TAG_OFFSET) == (8,)
    assert data.startswith(STATE_MAGIC)
    assert len(data) == STATE_SIZE
    assert heartbeat_ns > 0
    assert rest == [123, 100, 4096, 5, 6, 7, 9, 10, 12, int(Flag.INIT), int(Kind.RECV), int(RankStatus.RUNNING)]
    recorder.inside = None
    writer.close(RankStatus.RAISED)
    *_, kind, status = STATE.unpack_from((tmp_path / "rank00007-0.state").read_bytes(), STATE_OFFSET)
    assert (kind, status) == (0, int(RankStatus.RAISED))


def test_words_are_json_lines_with_a_clock_anchor_first_of_all(tmp_path: Path) -> None:
    recorder = Recorder()
    writer, _ = make_writer(tmp_path, recorder)
    recorder.lines.append({"type": "fact", "name": "odd", "value": "</script>\n\ud800"})
    writer.flush()
    writer.flush()
    lines = [json.loads(line) for line in (tmp_path / "rank00007-0.jsonl").read_text().splitlines()]
    assert [line["type"] for line in lines] == ["fact", "anchor"]
    assert set(lines[1]) == {"type", "local_ns", "unix_ns"}


def test_a_flag_is_added_to_those_that_a_span_has() -> None:
    tail = compute_tail(Kind.BACKWARD, 1, (0, 0, 0), int(Flag.EVALUATION))
    names = [name for name, _, _ in SPAN_FIELDS][2:]
    assert with_flag(tail, Flag.FAILED)[names.index("flags")] == Flag.EVALUATION | Flag.FAILED
