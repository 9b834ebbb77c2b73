"""An export made by hand: two ranks, one message that is waited for and one that is not, and why they stood idle."""

from __future__ import annotations

import numpy as np

from ppdiag.diagnosis import Cause, Place
from ppdiag.exported import CAUSES, IDLE_SPAN_DTYPE, PLACES, STEP_DTYPE, Exported
from ppdiag.model import Collective, Kind
from ppdiag.trace import JobFacts, ProcessGroup, RankFacts, Trace, make_spans

MS = 1_000_000
HOST = "node \x1b[31m</script>é"

ROWS = [
    # rank 0: F0 from 0 to 10 ms, sends it at 10; an all-reduce at the end
    {"rank": 0, "kind": Kind.FORWARD, "stage": 0, "microbatch": 0, "start_ns": 0, "end_ns": 10 * MS},
    {
        "rank": 0,
        "kind": Kind.SEND,
        "peer": 1,
        "post_ns": 10 * MS,
        "start_ns": 12 * MS,
        "end_ns": 12 * MS,
        "size_bytes": 64,
    },
    {"rank": 0, "kind": Kind.COLLECTIVE, "op": Collective.ALL_REDUCE, "start_ns": 12 * MS, "end_ns": 30 * MS},
    # rank 1: waits for it from 1 to 13 ms, of which 3 ms are the transfer; then F0
    {"rank": 1, "kind": Kind.RECV, "peer": 0, "post_ns": 0, "start_ns": MS, "end_ns": 13 * MS, "size_bytes": 64},
    {"rank": 1, "kind": Kind.FORWARD, "stage": 1, "microbatch": 0, "start_ns": 13 * MS, "end_ns": 23 * MS},
]


def make_export(rows: list[dict[str, int]] | None = None) -> Exported:
    spans = make_spans(ROWS if rows is None else rows)
    ranks = {rank: RankFacts(rank, host=HOST, clock="one", facts={"argv": ["a"], "n": np.int64(3)}) for rank in (0, 1)}
    trace = Trace(spans, JobFacts("run", 2, pp=2), ranks, (ProcessGroup("all", (0, 1)),), 0.5, ("a warning",))
    partner = np.full(len(spans), -1)
    sends, receives = (np.flatnonzero(spans["kind"] == kind) for kind in (Kind.SEND, Kind.RECV))
    if len(sends) and len(receives):
        partner[sends[0]], partner[receives[0]] = receives[0], sends[0]
    idle = np.zeros(2, IDLE_SPAN_DTYPE)
    for row, (place, cause, start, end) in zip(
        idle,
        [
            (Place.LATE_SENDER, Cause.BUBBLE, MS, 10 * MS),
            (Place.TRANSFER, Cause.COMMUNICATION, 10 * MS, 13 * MS),
        ],
        strict=True,
    ):
        row["rank"], row["place"], row["cause"] = 1, PLACES.index(place), CAUSES.index(cause)
        row["start_ns"], row["end_ns"] = start, end
    steps = np.array([(7, 0, 30 * MS)], STEP_DTYPE)
    return Exported(trace, spans, partner, idle, steps)
