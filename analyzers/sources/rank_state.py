"""Reads a rank's state slot: whether it still runs, and which op it was inside of when it was last seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppdiag.model import Kind, RankStatus
from ppdiag.rundir import STATE, STATE_MAGIC, STATE_OFFSET, STATE_SIZE

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class RankState:
    """What the slot says. Times are on the rank's own clock."""

    status: str
    inside: str
    heartbeat_ns: int


UNKNOWN = RankState("unknown", "", 0)


def read(path: Path) -> RankState:
    """The state of a rank; ``UNKNOWN`` where the slot is missing or damaged."""
    try:
        with path.open("rb") as stream:
            data = stream.read(STATE_SIZE)
    except OSError:
        return UNKNOWN
    if not data.startswith(STATE_MAGIC) or len(data) < STATE_OFFSET + STATE.size:
        return UNKNOWN
    heartbeat_ns, _, _, size, step, seq, peer, microbatch, stage, _, _, kind, status = STATE.unpack_from(
        data, STATE_OFFSET
    )
    inside = _describe(kind, step=step, stage=stage, microbatch=microbatch, peer=peer, seq=seq, size=size)
    return RankState(_STATUS.get(status, "unknown"), inside, heartbeat_ns)


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


def _describe(kind: int, *, step: int, stage: int, microbatch: int, peer: int, seq: int, size: int) -> str:
    words = _WORDS.get(Kind(kind)) if kind in Kind._value2member_map_ else None
    if words is None:
        return ""
    if peer >= 0 and kind in (Kind.SEND, Kind.RECV):
        words += f" {'to' if kind == Kind.SEND else 'from'} rank {peer} (message {seq}, {size} bytes)"
    if microbatch >= 0:
        words += f" of microbatch {microbatch}"
    if stage >= 0:
        words += f" of stage {stage}"
    return f"{words} in step {step}"
