"""Reads a rank's state slot: whether it still runs, and which op it was inside of when it was last seen."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ppdiag.model import Kind, RankStatus
from ppdiag.rundir import (
    STATE,
    STATE_MAGIC,
    STATE_OFFSET,
    STATE_SIZE,
    STATE_TAG,
    STATE_TAG_OFFSET,
    clock_identity,
    read_run_file,
)
from ppdiag.trace import Waiting

SILENT_S = 5.0
"""Ranks write a heartbeat ten times a second: one that has been silent for this long does not run any more."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What the slot says. Times are on the rank's own clock."""

    status: str
    inside: str
    inside_s: float
    heartbeat_ns: int
    waiting: Waiting | None = None


UNKNOWN = RankState("unknown", "", 0.0, 0)


def read(path: Path) -> RankState:
    """The state of a rank; ``UNKNOWN`` where the slot is missing or damaged."""
    try:
        with path.open("rb") as stream:
            data = stream.read(STATE_SIZE)
    except OSError:
        return UNKNOWN
    if not data.startswith(STATE_MAGIC) or len(data) < STATE_OFFSET + STATE.size:
        return UNKNOWN
    tag = STATE_TAG.unpack_from(data, STATE_TAG_OFFSET) if len(data) >= STATE_TAG_OFFSET + STATE_TAG.size else (0,)
    slot = _Slot(*STATE.unpack_from(data, STATE_OFFSET), *tag)
    inside = _describe(slot)
    inside_s = max(0, slot.heartbeat_ns - slot.start_ns) / 1e9 if inside else 0.0
    return RankState(_STATUS.get(slot.status, "unknown"), inside, inside_s, slot.heartbeat_ns, _waiting(slot))


class _Slot(NamedTuple):
    """The fields of ``model.STATE_STRUCT``, and the tag behind them."""

    heartbeat_ns: int
    start_ns: int
    post_ns: int
    size_bytes: int
    step: int
    seq: int
    peer: int
    microbatch: int
    stage: int
    group: int
    flags: int
    kind: int
    status: int
    tag: int


def ended_host(directory: Path) -> str | None:
    """The host whose launcher wrote down the end of the job; None where none did.

    Several machines may share a directory: the end of one launcher says nothing of the ranks of the others.
    """
    facts = read_run_file(directory)
    return str(facts.get("host", "")) if "ended_unix_ns" in facts else None


def settle(state: RankState, *, raised: str, ended: bool, clock: str, pid: int) -> str:
    """What became of a rank. One whose launcher has ended may run on: on this machine its process tells.

    Args:
        state: its slot.
        raised: the exception that it ended with, in words; empty where it ended with none.
        ended: its host's launcher has seen the end of the job.
        clock: name of the clock that its heartbeat was read from.
        pid: its process id.
    """
    if state.status == "raised" and raised.startswith("KeyboardInterrupt"):
        return "interrupted"
    if state.status != "running":
        return state.status
    if clock != clock_identity():
        return "killed" if ended else "running"
    silent_s = (time.perf_counter_ns() - state.heartbeat_ns) / 1e9
    alive = Path(f"/proc/{pid}").exists() and silent_s <= SILENT_S
    return "killed" if not alive and (ended or silent_s > SILENT_S) else "running"


_STATUS = {
    RankStatus.RUNNING.value: "running",
    RankStatus.FINISHED.value: "finished",
    RankStatus.RAISED.value: "raised",
}
_WORDS = {
    Kind.FORWARD: "the forward",
    Kind.BACKWARD: "the backward",
    Kind.WEIGHT: "the weight gradient",
    Kind.SEND: "the wait for a send",
    Kind.RECV: "the wait for a receive",
    Kind.COLLECTIVE: "a collective",
    Kind.OPTIMIZER: "the optimizer step",
    Kind.INIT: "the pipeline's initialisation",
    Kind.HOST: "host work",
}


def _waiting(slot: _Slot) -> Waiting | None:
    if slot.peer < 0 or slot.kind not in (Kind.SEND, Kind.RECV):
        return None
    return Waiting(slot.kind == Kind.SEND, slot.peer, slot.seq, slot.tag, slot.size_bytes, slot.step)


def _describe(slot: _Slot) -> str:
    words = _WORDS.get(Kind(slot.kind)) if slot.kind in Kind._value2member_map_ else None
    if words is None:
        return ""
    if (wait := _waiting(slot)) is not None:
        tag = f", tag {wait.tag}" if wait.tag else ""
        way = "to" if wait.is_send else "from"
        words += f" {way} rank {wait.peer} (message {wait.seq}{tag}, {wait.size_bytes} bytes)"
    if slot.microbatch >= 0:
        words += f" of microbatch {slot.microbatch}"
    if slot.stage >= 0:
        words += f" of stage {slot.stage}"
    return f"{words} in step {slot.step}"
