"""The three files of a rank, and the thread that writes them: the training thread only appends to a list.

Layout of the files: ``ppdiag.rundir``.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import threading
import time
from itertools import starmap
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppdiag.model import DEVICE_SPAN_FIELDS, DEVICE_SPAN_STRUCT, NONE, SPAN_FIELDS, SPAN_STRUCT, RankStatus
from ppdiag.rundir import (
    STATE,
    STATE_MAGIC,
    STATE_OFFSET,
    STATE_SIZE,
    STATE_TAG,
    STATE_TAG_OFFSET,
    encode_block,
    encode_header,
    rank_file_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppdiag.hooks.recorder import Recorder

TICK_S = 0.1
"""Longest time between two flushes, and period of the heartbeat: what a SIGKILL between step ends may cost."""
_STATE_NS = int(1e9 * TICK_S) // 2
"""Flushes at the ends of short steps do not write the state each time; those of the ticks do."""
SLEEPING_TICK_S = 2.0
"""The same while nothing is recorded."""
ANCHOR_PERIOD_NS = 60_000_000_000
BLOCK_RECORDS = 256
"""Records packed in one go; packing holds the GIL (about 0.5 us a record): this bounds a stall of the job to 0.2 ms."""
MAX_STARTS = 10_000

_PACK = struct.Struct(SPAN_STRUCT).pack
_PACK_DEVICE = struct.Struct(DEVICE_SPAN_STRUCT).pack
_LIMITS = {
    "B": (0, 2**8 - 1),
    "b": (-(2**7), 2**7 - 1),
    "H": (0, 2**16 - 1),
    "h": (-(2**15), 2**15 - 1),
    "i": (-(2**31), 2**31 - 1),
}
_BOUNDS = {
    len(fields): tuple(_LIMITS.get(code, (-(2**63), 2**63 - 1)) for _, code, _ in fields)
    for fields in (SPAN_FIELDS, DEVICE_SPAN_FIELDS)
}
"""By the number of a span's values."""


class Writer:
    """Writes what a recorder collects.

    Args:
        recorder: whose ``spans`` and ``lines`` are taken.
        folder: the run directory; made where it is missing.
        header: facts of the rank for the header of the span file; ``rank`` must be among them.
        max_bytes: size of the span file beyond which no more spans are written.
        stop: called with (what, consequence) when writing ends early.

    Raises:
        OSError: the files cannot be made.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        folder: str,
        header: dict[str, Any],
        max_bytes: int,
        stop: Callable[[str, str], None],
    ) -> None:
        self._recorder = recorder
        self._stop = stop
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._bell = threading.Lock()
        """Held by nobody where a flush is due: a bare lock wakes the thread for half the CPU time of an Event."""
        self._bell.acquire()
        self._closed = False
        self._state_ns = 0
        """When the state was last written."""
        self._next_anchor_ns = 0
        self._size_bytes = 0
        self.written = 0
        """Spans in the file."""
        self.status = RankStatus.RUNNING
        self._open(folder, header)
        self._thread = threading.Thread(target=self._run, name="ppdiag-writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Flush soon, on the writer's thread."""
        if self._bell.locked():
            try:  # noqa: SIM105  (on the training thread: contextlib.suppress takes longer than the rest)
                self._bell.release()
            except RuntimeError:  # another thread was quicker
                pass

    def close(self, status: RankStatus) -> None:
        """Write all that is left and set the rank's last status (on the calling thread, at exit)."""
        self.status = status
        self.flush()
        self._closed = True
        self.wake()

    def flush(self, *, state_after_ns: int = 0) -> None:
        """Write what has been collected so far. Never raises: a failed write ends the recording.

        Args:
            state_after_ns: leave the state as it is where it was written within this time.
        """
        with self._lock:
            if self._closed:
                return
            self._recorder.flushed_ns = now_ns = perf_counter_ns()
            try:
                self._recorder.before_flush()
                self._write_spans()
                self._write_lines(now_ns)
                if now_ns - self._state_ns >= state_after_ns:
                    self._state_ns = now_ns
                    self._write_state()
            except Exception as error:
                self._closed = True
                self._stop(f"cannot write the record: {error}", "recording stops, the job goes on")

    def forked(self) -> None:
        """In a forked child: never touch the parent's files."""
        self._closed = True

    def _open(self, folder: str, header: dict[str, Any]) -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._spans_fd, start = _open_next(folder, header["rank"])
        self._lines_fd = _replace(os.path.join(folder, rank_file_name(header["rank"], start, "jsonl")), os.O_APPEND)
        self._state = _map_state(os.path.join(folder, rank_file_name(header["rank"], start, "state")))
        # What is known so early is how torch was built, not whether the job will use a device.
        self._pack, fields = (_pack_device, DEVICE_SPAN_FIELDS) if header.get("cuda") else (_pack, SPAN_FIELDS)
        data = encode_header({**header, "start": start}, fields)
        self._write_all(self._spans_fd, data)
        self._size_bytes = len(data)

    def _run(self) -> None:
        while not self._closed:
            self._bell.acquire(timeout=TICK_S if self._recorder.active else SLEEPING_TICK_S)
            try:
                self.flush(state_after_ns=_STATE_NS)
            except Exception as error:
                self._closed = True
                self._stop(f"the writer failed: {error}", "recording stops, the job goes on")

    def _write_spans(self) -> None:
        count = BLOCK_RECORDS
        while count == BLOCK_RECORDS and (batch := self._recorder.take(BLOCK_RECORDS)):
            count = len(batch)
            block = encode_block(self._pack(batch), count)
            if self._size_bytes + len(block) > self._max_bytes:
                self._max_bytes, limit = 0, self._max_bytes
                if limit:  # the first time
                    what = f"the record has reached its limit of {limit} bytes"
                    self._stop(what, "no more spans are recorded, the job goes on")
                self._recorder.spans.clear()
                return
            self._write_all(self._spans_fd, block)
            self._size_bytes += len(block)
            self.written += count

    def _write_lines(self, now_ns: int) -> None:
        if now_ns >= self._next_anchor_ns:
            self._next_anchor_ns = now_ns + ANCHOR_PERIOD_NS
            self._recorder.lines.append(anchor())
        lines = self._recorder.lines
        if count := len(lines):
            batch = lines[:count]
            del lines[:count]
            text = "".join(json.dumps(line, separators=(",", ":"), default=str) + "\n" for line in batch)
            self._write_all(self._lines_fd, text.encode("utf-8", "backslashreplace"))

    def _write_state(self) -> None:
        tail = self._recorder.inside
        start_ns = self._recorder.inside_start_ns
        now, tag = perf_counter_ns(), 0
        if tail is None:
            state = (now, 0, 0, 0, self._recorder.step, NONE, NONE, NONE, NONE, NONE, 0, 0, int(self.status))
        else:
            post, size, step, seq, peer, tag, microbatch, stage, _, group, _, flags, kind, _ = clamp((0, 0, *tail))[2:]
            state = (
                now,
                start_ns,
                post,
                size,
                step,
                seq,
                peer,
                microbatch,
                stage,
                group,
                flags,
                kind,
                int(self.status),
            )
        STATE.pack_into(self._state, STATE_OFFSET, *state)
        STATE_TAG.pack_into(self._state, STATE_TAG_OFFSET, tag)

    def _write_all(self, fd: int, data: bytes) -> None:
        written = os.write(fd, data)
        while written < len(data):
            written += os.write(fd, memoryview(data)[written:])


def anchor() -> dict[str, Any]:
    """One reading of the rank's clock and of Unix time, taken as close together as Python allows."""
    before = perf_counter_ns()
    unix_ns = time.time_ns()
    after = perf_counter_ns()
    return {"type": "anchor", "local_ns": (before + after) // 2, "unix_ns": unix_ns}


def clamp(span: tuple[int, ...]) -> tuple[int, ...]:
    """A span whose values fit their fields: one that is out of range becomes ``NONE``, or the limit where unsigned."""
    return tuple(
        value if low <= value <= high else (NONE if low < 0 else high)
        for value, (low, high) in zip(span, _BOUNDS[len(span)], strict=True)
    )


def _pack(spans: list[tuple[int, ...]]) -> bytes:
    try:
        return b"".join(starmap(_PACK, spans))
    except struct.error:
        return b"".join(starmap(_PACK, map(clamp, spans)))


def _pack_device(spans: list[tuple[int, ...]]) -> bytes:
    """As :func:`_pack`, with room for the launch; spans that the host timed have none."""
    full = [span if len(span) == len(DEVICE_SPAN_FIELDS) else (*span, 0) for span in spans]
    try:
        return b"".join(starmap(_PACK_DEVICE, full))
    except struct.error:
        return b"".join(starmap(_PACK_DEVICE, map(clamp, full)))


def _open_next(folder: str, rank: int) -> tuple[int, int]:
    """Make the span file under the next free start number; returns (file descriptor, start number)."""
    for start in range(MAX_STARTS):
        path = os.path.join(folder, rank_file_name(rank, start, "spans"))
        with contextlib.suppress(FileExistsError):
            return _create(path, os.O_APPEND), start
    raise FileExistsError(f"{MAX_STARTS} records of rank {rank} in {folder}")


def _create(path: str, more: int = 0) -> int:
    """Make a file that was not there. ``O_EXCL`` follows no link that somebody else may have laid under its name."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | more, 0o644)


def _replace(path: str, more: int = 0) -> int:
    """The same in the place of whatever lies there: a left-over of a record whose spans are gone, a link, a pipe."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return _create(path, more)


def _map_state(path: str) -> mmap.mmap:
    fd = _replace(path)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, STATE_SIZE)  # a hole in the page would raise SIGBUS when the disk is full
        else:
            os.write(fd, bytes(STATE_SIZE))
        state = mmap.mmap(fd, STATE_SIZE)
    finally:
        os.close(fd)
    state[: len(STATE_MAGIC)] = STATE_MAGIC
    return state
