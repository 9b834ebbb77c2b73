"""Writes run directories from traces, with the shared encoder: what the hooks would have left."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from ppdiag.model import FORMAT_VERSION, SPAN_FIELDS, SPAN_STRUCT, Kind, RankStatus
from ppdiag.rundir import (
    STATE,
    STATE_MAGIC,
    STATE_OFFSET,
    STATE_SIZE,
    STATE_TAG,
    encode_block,
    encode_header,
    rank_file_name,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np

    from ppdiag.trace import Trace

BLOCK = 16
"""Spans a block: several blocks even in a short run."""
SPAN = struct.Struct(SPAN_STRUCT)


def write_run(folder: Path, trace: Trace, *, start: int = 0, header: Mapping[str, Any] | None = None) -> None:
    """One set of files for each rank of the trace."""
    for rank, spans in trace.by_rank().items():
        facts = {"rank": rank, "world_size": len(trace.ranks), "host": f"host{rank}", "pid": 100 + rank, "clock": "one"}
        facts |= header or {}
        write_spans(folder / rank_file_name(rank, start, "spans"), spans, facts)
        words = [
            {"type": "group", "id": index, "name": group.name, "ranks": list(group.ranks)}
            for index, group in enumerate(trace.groups)
        ]
        words.append({"type": "fact", "name": "framework", "value": "torch.distributed.pipelining"})
        write_words(folder / rank_file_name(rank, start, "jsonl"), words)
        write_state(folder / rank_file_name(rank, start, "state"), status=RankStatus.FINISHED)


def write_spans(path: Path, spans: np.ndarray, facts: Mapping[str, Any]) -> None:
    path.write_bytes(encode_header(dict(facts)) + b"".join(blocks(spans)))


def blocks(spans: np.ndarray) -> list[bytes]:
    """The encoded blocks of one rank's spans."""
    names = [name for name, _, _ in SPAN_FIELDS]
    records = [SPAN.pack(*(int(span[name]) for name in names)) for span in spans]
    parts = [records[at : at + BLOCK] for at in range(0, len(records), BLOCK)]
    return [encode_block(b"".join(part), len(part)) for part in parts]


def write_words(path: Path, words: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(word) + "\n" for word in words))


def write_state(
    path: Path, *, status: int = RankStatus.RUNNING, kind: Kind | int = 0, peer: int = -1, microbatch: int = -1, tag=0
) -> None:
    """A state slot; ``kind`` is the op that the rank is inside of."""
    slot = STATE.pack(5_000, 4_000, 4_000, 1024, 7, 3, peer, microbatch, 1, 0, 0, kind, status) + STATE_TAG.pack(tag)
    path.write_bytes((STATE_MAGIC.ljust(STATE_OFFSET, b"\0") + slot).ljust(STATE_SIZE, b"\0"))


def header_bytes(**changes: Any) -> bytes:
    """The beginning of a span file whose header differs from a good one."""
    good = {"version": FORMAT_VERSION, "fields": [[name, dtype] for name, _, dtype in SPAN_FIELDS], "rank": 0}
    return b"PPDIAG-SPANS\n" + json.dumps({**good, **changes}).encode() + b"\n"
