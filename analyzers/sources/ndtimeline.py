"""Reads the trace files of veScale's ndtimeline: Chrome's array form, the ranks of one machine a file.

Every op and message is a complete event on the device's time, moved onto a clock that ndtimeline keeps common to all
ranks, with rank, step, and places in the tensor-parallel group and the pipeline. Which microbatch an op belongs to is
not in it (they are counted in order), nor which chunk: jobs with several stages a rank cannot be told apart.

Source: vescale/ndtimeline/handlers/local_timeline_handler.py and predefined.py.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from ppdiag.analyzers.clock import message_bounds
from ppdiag.analyzers.messages import MISSING, match
from ppdiag.analyzers.sources.device_ops import Kernels, Message, Op, RankOps, spans_of
from ppdiag.errors import BadRecord
from ppdiag.model import NONE, Collective, Kind
from ppdiag.trace import JobFacts, ProcessGroup, RankFacts, Trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from ppdiag.analyzers.sources import Progress

HEAD_BYTES = 4096
BETWEEN = b"}, {"
"""Between two events, as ``json.dump`` writes them."""
MARKS = (b'"cat"', b'"args": {"rank": ', b'"step": ', b'"tp": ', b'"pp": ')
MOST_BYTES = 256 << 20
"""A step of a rank takes some tens of KiB; in memory events take ten times their file."""
MOST_LABEL = 2**15 - 1
MOST_RANK = 1 << 20
MOST_STEP = 2**31 - 1
MOST_NS = 1 << 61
OPS = {
    "forward-compute": Kind.FORWARD,
    "backward-compute": Kind.BACKWARD,
    "optimizer": Kind.OPTIMIZER,
}
_SEND_FORWARD, _SEND_BACKWARD = (Kind.SEND, 1), (Kind.SEND, -1)
_RECV_FORWARD, _RECV_BACKWARD = (Kind.RECV, -1), (Kind.RECV, 1)
MESSAGES: dict[str, tuple[tuple[Kind, int], ...]] = {
    "forward-send": (_SEND_FORWARD,),
    "backward-send": (_SEND_BACKWARD,),
    "forward-recv": (_RECV_FORWARD,),
    "backward-recv": (_RECV_BACKWARD,),
    "forward-send-backward-recv": (_SEND_FORWARD, _RECV_BACKWARD),
    "backward-send-forward-recv": (_SEND_BACKWARD, _RECV_FORWARD),
    "forward-send-forward-recv": (_SEND_FORWARD, _RECV_FORWARD),
    "backward-send-backward-recv": (_SEND_BACKWARD, _RECV_BACKWARD),
    "forward-backward-send-forward-backward-recv": (_SEND_FORWARD, _SEND_BACKWARD, _RECV_FORWARD, _RECV_BACKWARD),
}
"""Each as its parts, with the way to the other end along the pipeline."""
COLLECTIVES = {
    "grads-reduce-scatter": Collective.REDUCE_SCATTER,
    "grads-reduce-scatter-nonoverlapping": Collective.REDUCE_SCATTER,
    "grad-reduce-scatter": Collective.REDUCE_SCATTER,
    "params-all-gather": Collective.ALL_GATHER,
    "params-all-gather-nonoverlapping": Collective.ALL_GATHER,
    "unshard-all-gather": Collective.ALL_GATHER,
    "separate-grads-all-reduce": Collective.ALL_REDUCE,
    "grad-all-reduce": Collective.ALL_REDUCE,
}
"""Of the replicas of a stage."""


class _Event(NamedTuple):
    """Times in ns."""

    name: str
    step: int
    start: int
    end: int


class _Place(NamedTuple):
    """Where a rank stands."""

    replica: int
    tensor: int
    position: int


@dataclass(slots=True)
class _Found:
    events: dict[int, list[_Event]] = field(default_factory=lambda: defaultdict(list))
    places: dict[int, _Place] = field(default_factory=dict)
    bad: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    damaged: list[str] = field(default_factory=list)


class NdTimeline:
    """The trace files of one job, one a machine, or their directory."""

    description = "traces of veScale's ndtimeline (trace_step…)"

    def recognises(self, path: Path) -> bool:
        """Whether the path is such a file, or a directory with one in it."""
        return any(True for _ in _files([path]))

    def read(self, paths: Sequence[Path], progress: Progress | None) -> Trace:
        """The trace of one job.

        Raises:
            BadRecord: a file is no list of events, none of them is an op, or ranks hold several stages.
        """
        files = list(_files(paths))
        found = _Found()
        for done, path in enumerate(files):
            if progress is not None:
                progress("reading files", done, len(files))
            for event in _load(path, found):
                _take(event, found)
        source = ", ".join(map(str, paths))
        if not any(event.name in OPS for events in found.events.values() for event in events):
            raise BadRecord(f"{source}: expected forwards and backwards of ndtimeline, and found none that is whole")
        if _several_stages(found):
            raise BadRecord(
                f"{source}: expected one stage a rank, found messages from the last rank of the pipeline to the first; "
                "ndtimeline does not record which chunk an op is of"
            )
        return _trace(found, source)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file() and _looks_like_one(file):
                yield file


def _looks_like_one(path: Path) -> bool:
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    return head.lstrip()[:1] == b"[" and all(mark in head for mark in MARKS)


def _load(path: Path, found: _Found) -> list[Any]:
    """The events of a file, as far as it goes."""
    if path.stat().st_size > MOST_BYTES:
        raise BadRecord(f"{path}: more than {MOST_BYTES} bytes; name the files of fewer steps")
    data = path.read_bytes()
    events = _decode(data)
    if events is None:
        end = data.rfind(BETWEEN)  # of a file that is cut off
        events = _decode(data[: end + 1] + b"]") if end > 0 else None
        if events is None:
            raise BadRecord(f"{path}: expected a list of events in JSON, but it is cut off or damaged")
        found.damaged.append(path.name)
    if not isinstance(events, list):
        raise BadRecord(f"{path}: expected a list of events in JSON, found another value")
    return events


def _decode(data: bytes) -> Any:  # noqa: ANN401  (whatever a file holds)
    """JSON, else JSON as Python writes it (with NaN in it); None where it is neither."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _take(event: Any, found: _Found) -> None:  # noqa: ANN401  (whatever a file holds)
    """Keeps an event that is complete and as expected."""
    try:
        if event["ph"] != "X":
            return
        args, name = event["args"], str(event["name"])
        rank, step = _whole(args["rank"], MOST_RANK), _whole(args["step"], MOST_STEP)
        place = _Place(_whole(event["pid"], MOST_RANK), _whole(args["tp"], MOST_RANK), _whole(args["pp"], MOST_LABEL))
        start, duration = _ns(event["ts"]), _ns(event["dur"])
    except (KeyError, TypeError, ValueError):
        found.bad += 1
        return
    found.places[rank] = place
    found.events[rank].append(_Event(name, step, start, start + duration))
    if name not in OPS and name not in MESSAGES and name not in COLLECTIVES:
        found.unknown[name] += 1


def _whole(value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError
    return value


def _ns(value: object) -> int:
    """Microseconds as ns."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value * 1000 < MOST_NS:
        raise ValueError
    return round(value * 1000)


def _trace(found: _Found, source: str) -> Trace:
    at = {place: rank for rank, place in found.places.items()}
    groups = _groups(found)
    parts = [_rank(rank, found, at, groups) for rank in sorted(found.events)]
    spans = spans_of(parts)
    trace = Trace(
        spans=spans,
        job=JobFacts(
            source=source,
            world_size=len(found.places),
            framework="vescale",
            pp=len({place.position for place in found.places.values()}),
            vpp=1,
            tp=len({place.tensor for place in found.places.values()}),
            dp=len({place.replica for place in found.places.values()}),
        ),
        ranks={rank: RankFacts(rank, clock="aligned by the recorder") for rank in found.places},
        groups=groups,
        warnings=tuple(_warnings(found)),
    )
    partner = match(trace).partner
    received = np.flatnonzero((spans["kind"] == Kind.RECV) & (partner != MISSING))
    error_s = message_bounds(spans["post_ns"][partner[received]], spans["end_ns"][received])
    return Trace(spans, trace.job, trace.ranks, groups, error_s, trace.warnings)


def _several_stages(found: _Found) -> bool:
    """Whether forwards are received where the pipeline begins: interleaved stages go round its ranks."""
    first = min(place.position for place in found.places.values())
    beginning = [
        event for rank, place in found.places.items() if place.position == first for event in found.events[rank]
    ]
    alone = len({place.position for place in found.places.values()}) == 1
    return not alone and any(_RECV_FORWARD in MESSAGES.get(event.name, ()) for event in beginning)


def _groups(found: _Found) -> tuple[ProcessGroup, ...]:
    """The pipeline's group of all ranks first, then the replicas of each stage."""
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, place in sorted(found.places.items()):
        members[place.tensor, place.position].append(rank)
    replicas = tuple(ProcessGroup(f"replicas of stage {key[1]}", tuple(ranks)) for key, ranks in members.items())
    return (ProcessGroup("pipeline", tuple(sorted(found.places))), *replicas)


def _rank(rank: int, found: _Found, at: dict[_Place, int], groups: Sequence[ProcessGroup]) -> RankOps:
    place = found.places[rank]
    events = sorted(found.events[rank], key=lambda event: (event.start, event.end))
    counted: Counter[tuple[int, Kind]] = Counter()
    ops = []
    for event in events:
        if event.name in OPS:
            kind = OPS[event.name]
            microbatch = NONE if kind is Kind.OPTIMIZER else counted[event.step, kind]
            counted[event.step, kind] += 1
            stage = NONE if kind is Kind.OPTIMIZER else place.position
            ops.append(Op(kind, stage, microbatch, event.start, event.end, event.start, event.step))
    messages = list(_messages(events, place, at))
    own_group = next(i for i, group in enumerate(groups) if i and rank in group.ranks)
    messages += _collectives(events, own_group)
    carried = np.array([event.name not in OPS for event in events], bool)
    start, end = (np.array([getattr(event, name) for event in events], np.int64) for name in ("start", "end"))
    return RankOps(rank, Kernels(start, end, start, carried), ops, messages)


def _messages(events: Sequence[_Event], place: _Place, at: dict[_Place, int]) -> Iterator[Message]:
    """The parts of each batch, numbered within their step: the first of a job are not recorded.

    Those of a rank that left no trace have no peer: what was waited for in them is unknown.
    """
    seq: Counter[tuple[int, ...]] = Counter()
    for event in events:
        for kind, way in MESSAGES.get(event.name, ()):
            peer = at.get(place._replace(position=place.position + way), NONE)
            key = (event.step, kind, peer)
            number = (event.step << 20) + seq[key]
            seq[key] += 1
            yield Message(kind, 0, 0, peer, number, 0, event.start, event.end, event.start)


def _collectives(events: Sequence[_Event], group: int) -> Iterator[Message]:
    seq: Counter[int] = Counter()
    for event in events:
        if event.name in COLLECTIVES:
            number = (event.step << 20) + seq[event.step]
            seq[event.step] += 1
            op = int(COLLECTIVES[event.name])
            yield Message(Kind.COLLECTIVE, op, group, NONE, number, 0, event.start, event.end, event.start)


def _missing(found: _Found) -> list[str]:
    """The places to which messages go, and of which there is no rank."""
    there = set(found.places.values())
    needed = {
        place._replace(position=place.position + way)
        for rank, place in found.places.items()
        for name in {event.name for event in found.events[rank]}
        for _, way in MESSAGES.get(name, ())
    }
    return [f"pp {place.position} of replica {place.replica}, tp {place.tensor}" for place in sorted(needed - there)]


def _warnings(found: _Found) -> Iterator[str]:
    yield "when the host launched an op is not in this recording: time before an op whose input was there is the host's"
    if missing := _missing(found):
        yield (
            f"messages come from or go to ranks that left no trace here ({', '.join(missing[:4])}"
            f"{', …' * (len(missing) > 4)}): what was waited for in them is unknown; name the files of all machines"
        )
    for name in found.damaged:
        yield f"{name}: cut off or damaged; read as far as its last whole event"
    if found.bad:
        yield f"{found.bad} events were left out: not as expected"
    if found.unknown:
        names = ", ".join(f"{name} ({count})" for name, count in found.unknown.most_common(4))
        yield f"events that say nothing of the pipeline's order were left out: {names}"
