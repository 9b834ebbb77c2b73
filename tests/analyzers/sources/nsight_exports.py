"""Writes exports as Nsight Systems does, from a simulated trace: kernels, launches, NVTX ranges and NCCL's payloads."""

from __future__ import annotations

import sqlite3
import struct
from typing import TYPE_CHECKING

from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import numpy as np

    from ppdiag.trace import Trace

US = 1_000
SCHEMAS = {Kind.SEND: 16777226, Kind.RECV: 16777225, Kind.COLLECTIVE: 16777220}
ENTRIES = [
    (1, 16777226, 0, 18, "NCCL communicator ID", None),
    (1, 16777226, 1, 22, "Message size [bytes]", 8),
    (1, 16777226, 2, 5, "Peer rank", 16),
    (1, 16777225, 0, 18, "NCCL communicator ID", None),
    (1, 16777225, 1, 22, "Message size [bytes]", 8),
    (1, 16777225, 2, 5, "Peer rank", 16),
    (1, 16777220, 0, 18, "NCCL communicator ID", None),
    (1, 16777220, 1, 22, "Message size [bytes]", 8),
]
"""As the real export h100_2gpu_1s has them."""
LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.WEIGHT: "W"}


def global_pid(rank: int) -> int:
    return (0x1000000 + 100 + rank) << 24


def create(path: Path) -> sqlite3.Connection:
    """The tables that the reader knows, in the columns of schema 3.25 that it reads."""
    database = sqlite3.connect(path)
    database.executescript(
        """
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL,
            deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
            demangledName INTEGER NOT NULL,
            shortName INTEGER NOT NULL);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER,
            correlationId INTEGER, nameId INTEGER NOT NULL);
        CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT,
            globalTid INTEGER, textId INTEGER, domainId INTEGER, jsonText TEXT, binaryData TEXT);
        CREATE TABLE NVTX_PAYLOAD_SCHEMA_ENTRIES (domainId INTEGER, schemaId INTEGER, idx INTEGER, type INTEGER,
            name TEXT, offset INTEGER);
        CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
        """
    )
    names = [
        (1, "gemm"),
        (2, "ncclDevKernel_SendRecv"),
        (3, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        (4, "cudaLaunch"),
    ]
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
    database.executemany("INSERT INTO NVTX_PAYLOAD_SCHEMA_ENTRIES VALUES (?, ?, ?, ?, ?, ?)", ENTRIES)
    return database


def torch_name(span: np.void) -> str:
    """As torch's pipelining runtime names an op."""
    return f"PP:{span['stage']}{LETTERS[Kind(span['kind'])]}{span['microbatch']}"


def write(
    path: Path,
    trace: Trace,
    ranks: Iterable[int],
    *,
    name: Callable[[np.void], str] = torch_name,
    payloads: bool = True,
    as_text_ids: bool = False,
    autograd: bool = False,
) -> None:
    """One export of these ranks. The host launches each kernel just before it begins.

    ``autograd``: another thread launches the kernels of backwards.
    """
    database = create(path)
    for rank in ranks:
        spans = trace.spans[trace.spans["rank"] == rank]
        writer = _Writer(database, rank, as_text_ids=as_text_ids)
        for span in sorted(spans, key=lambda span: int(span["post_ns"])):
            if span["kind"] in LETTERS or span["kind"] == Kind.OPTIMIZER:
                text = "Optimizer.step#Adam.step" if span["kind"] == Kind.OPTIMIZER else name(span)
                away = bool(autograd and span["kind"] == Kind.BACKWARD)
                writer.op(text, int(span["start_ns"]), int(span["end_ns"]), thread=writer.thread + away)
            else:
                writer.message(span, trace.groups[span["group"]].ranks, payloads=payloads)
    database.commit()
    database.close()


class _Writer:
    def __init__(self, database: sqlite3.Connection, rank: int, *, as_text_ids: bool) -> None:
        self.database = database
        self.rank = rank
        self.thread = global_pid(rank) + 7
        self.correlation = 0
        self.as_text_ids = as_text_ids

    def kernel(self, name: int, start: int, end: int, launch: int, thread: int | None = None) -> None:
        self.correlation += 1
        row = (start, end, self.rank, 7 + (name > 1), self.correlation, global_pid(self.rank), name, name)
        self.database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        call = (launch, launch + US, thread or self.thread, self.correlation, 4)
        self.database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", call)

    def range(self, text: str, start: int, end: int | None, payload: bytes | None = None) -> None:
        text_id = None
        if self.as_text_ids:
            text_id = 1000 + hash(text) % 10**9
            self.database.execute("INSERT OR IGNORE INTO StringIds VALUES (?, ?)", (text_id, text))
        row = (start, end, 59, None if self.as_text_ids else text, self.thread, text_id, 0, None, payload)
        self.database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def op(self, text: str, start: int, end: int, *, thread: int) -> None:
        """An op of two kernels."""
        half = (start + end) // 2
        self.range(text, start - 5 * US, start - US)
        self.kernel(1, start, half, start - 4 * US, thread)
        self.kernel(1, half, end, start - 3 * US, thread)

    def message(self, span: np.void, members: Sequence[int], *, payloads: bool) -> None:
        kind, post, end = Kind(span["kind"]), int(span["post_ns"]), int(span["end_ns"])
        call = {Kind.SEND: "ncclSend", Kind.RECV: "ncclRecv", Kind.COLLECTIVE: "ncclAllReduce"}[kind]
        data = struct.pack("<QQ", 1000 + int(span["group"]), int(span["size_bytes"]))
        if kind is not Kind.COLLECTIVE:
            data += struct.pack("<ii", members.index(int(span["peer"])), 0)
        header = struct.pack("<QQQQ", 1, SCHEMAS[kind], len(data), 32)
        launch = post - (20 if kind is Kind.SEND else 10) * US
        if payloads:
            self.range(call, launch - 2 * US, launch + US, header + data)
        self.kernel(3 if kind is Kind.COLLECTIVE else 2, post, max(end, post + US), launch)
