"""Reads MegaScan's traces of Megatron (MegatronApp): Chrome's array form merged over ranks, or one raw file a rank.

Both hold the begin and end of every forward and backward, with microbatch, chunk and place in the pipeline on the end
alone, and the bounds of every iteration. Messages are not in them: the gap before an op is taken as the wait for them.

Merged: ``ts`` in us, ``pid`` the rank, instants ``iteration begin``, ``reduce`` and ``iteration end``. Raw: ``rel_ts``
in ns from the begin of the iteration, ``pad_before`` the ns since the end of the iteration before.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from ppdiag.analyzers.clock import message_bounds
from ppdiag.analyzers.messages import MISSING, match
from ppdiag.errors import BadRecord
from ppdiag.model import NONE, Collective, Flag, Kind, Payload
from ppdiag.trace import JobFacts, ProcessGroup, RankFacts, Trace, make_spans

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ppdiag.analyzers.sources import Progress

HEAD_BYTES = 4096
MARKS = (b'"iteration begin"', b'"pad_before"')
"""Of the first event of a merged file, and of a raw one."""
MOST_BYTES = 2 << 30
MOST_REPAIRS = 16
"""Places tried, from the end, at which a file that is cut off may have had its last whole event."""
MOST_LABEL = 2**15 - 1
MOST_NS = 10**18
KINDS = {"forward": Kind.FORWARD, "backward": Kind.BACKWARD}
_RANK_IN_NAME = re.compile(r"rank[^0-9]?(\d{1,6})")


class MegaScan:
    """The merged file of one job, or its raw files, or a directory of these."""

    description = "MegaScan traces of Megatron (.json)"

    def recognises(self, path: Path) -> bool:
        """Whether the path is a file (or a directory with one first) that begins as MegaScan writes it."""
        files = _files([path])
        if not files or not files[0].is_file():
            return False
        with files[0].open("rb") as stream:
            head = stream.read(HEAD_BYTES)
        return head.lstrip()[:1] == b"[" and any(mark in head for mark in MARKS)

    def read(self, paths: Sequence[Path], progress: Progress | None) -> Trace:
        """The trace of one job.

        Raises:
            BadRecord: a file is no MegaScan trace, or holds no whole op.
        """
        files = _files(paths)
        found = _Found()
        for done, path in enumerate(files):
            if progress is not None:
                progress("reading files", done, len(files))
            events = _load(path, found)
            raw = any("pad_before" in event for event in events[:1])
            (_take_raw if raw else _take_merged)(events, path, found)
        return _trace(found, source=", ".join(map(str, paths)))


def _files(paths: Sequence[Path]) -> list[Path]:
    found = []
    for path in paths:
        found += sorted(path.glob("*.json")) if path.is_dir() else [path] if path.suffix == ".json" else []
    return found


class _Op(NamedTuple):
    """One forward or backward. Times in ns."""

    rank: int
    iteration: int
    kind: Kind
    position: int
    chunk: int
    microbatch: int
    start: int
    end: int


@dataclass(slots=True)
class _Iteration:
    """The bounds of an iteration on a rank, in ns; None where the record has none."""

    begin: int
    reduce: int | None = None
    end: int | None = None


@dataclass(slots=True)
class _Found:
    """What the files of a job say."""

    ops: list[_Op] = field(default_factory=list)
    iterations: dict[tuple[int, int], _Iteration] = field(default_factory=dict)
    """By (rank, iteration)."""
    open_ops: Counter[str] = field(default_factory=Counter)
    bad_events: int = 0
    own_clocks: bool = False
    """Each rank's times begin at 0."""
    warnings: list[str] = field(default_factory=list)


def _load(path: Path, found: _Found) -> list[dict[str, Any]]:
    """The events of a file, as far as it goes."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise BadRecord(f"{path}: {size} bytes are more than a MegaScan trace has (at most {MOST_BYTES})")
    data = path.read_bytes()
    try:
        events = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        events = _load_cut_off(data)
        if events is None:
            raise BadRecord(f"{path}: expected a list of events in JSON, and it cannot be read as such") from None
        found.warnings.append(f"{path.name}: the file is cut off or damaged; read as far as its last whole event")
    if not isinstance(events, list):
        raise BadRecord(f"{path}: expected a list of events in JSON, found another value")
    kept = [event for event in events if isinstance(event, dict)]
    found.bad_events += len(events) - len(kept)
    return kept


def _load_cut_off(data: bytes) -> object:
    """The events before the cut; None where there are none."""
    end = len(data)
    for _ in range(MOST_REPAIRS):
        end = data.rfind(b"}", 0, end)
        if end < 0:
            return None
        try:
            return msgspec.json.decode(data[: end + 1] + b"]")
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            continue
    return None


def _whole(value: object, most: int = MOST_LABEL) -> int:
    """A number as a small whole number.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise ValueError
    return int(value)


def _ns(value: object, unit: int) -> int:
    """A time in a unit of so many ns; negative ones are times too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) * unit <= MOST_NS:
        raise ValueError
    return round(value * unit)


def _take_merged(events: Sequence[dict[str, Any]], path: Path, found: _Found) -> None:
    """Events of all ranks, in order of time."""
    begun: dict[tuple[int, str], list[int]] = defaultdict(list)
    for event in events:
        try:
            rank, now, args = _whole(event["pid"]), _ns(event["ts"], 1000), event["args"]
            iteration = _whole(args["iteration"], 2**31 - 1)
            if event["name"] in KINDS and event["ph"] == "B":
                begun[rank, event["name"]].append(now)
            elif event["name"] in KINDS:
                times = (begun[rank, event["name"]].pop(), now)
                found.ops.append(_op(event["name"], args, (rank, iteration), times))
            else:
                _take_bound(event["name"], (rank, iteration), now, found)
        except (ValueError, IndexError, KeyError, TypeError):
            found.bad_events += 1
    found.open_ops.update({name: len(starts) for (_, name), starts in begun.items() if starts})
    if not found.ops:
        raise BadRecord(f"{path}: expected forwards and backwards with their microbatch, and found none that is whole")


def _take_bound(name: str, key: tuple[int, int], now: int, found: _Found) -> None:
    bounds = found.iterations.setdefault(key, _Iteration(now))
    if name == "reduce":
        bounds.reduce = now
    elif name == "iteration end":
        bounds.end = now


def _op(name: str, labels: dict[str, Any], key: tuple[int, int], times: tuple[int, int]) -> _Op:
    """An op of (rank, iteration), from its begin to its end."""
    position, chunk, microbatch = (_whole(labels[label]) for label in ("pp_rank", "model_chunk", "microbatch"))
    return _Op(*key, KINDS[name], position, chunk, microbatch, times[0], max(times))


def _take_raw(events: Sequence[dict[str, Any]], path: Path, found: _Found) -> None:
    """Events of one rank: times count from the begin of each iteration."""
    found.own_clocks = True
    rank = _rank_of(events, path)
    if any(op.rank == rank for op in found.ops):
        raise BadRecord(f"{path}: rank {rank} is in an earlier file too; name the files of one job, one a rank")
    begun: dict[str, list[int]] = defaultdict(list)
    iteration, zero, last = -1, 0, 0
    for event in events:
        name, phase = event.get("name"), event.get("ph")
        try:
            if name == "iteration" and phase == "B":
                iteration, zero = iteration + 1, last + _ns(event["pad_before"], 1)
                found.iterations[rank, iteration] = _Iteration(zero)
                begun.clear()
                continue
            last = max(last, zero + _ns(event["rel_ts"], 1))
            if name == "iteration":
                found.iterations[rank, iteration].end = last
            elif name in KINDS and phase == "B":
                begun[name].append(last)
            elif name in KINDS:
                found.ops.append(_op(name, event, (rank, iteration), (begun[name].pop(), last)))
        except (ValueError, IndexError, KeyError, TypeError):
            found.bad_events += 1
    found.open_ops.update({name: len(starts) for name, starts in begun.items() if starts})
    if not any(op.rank == rank for op in found.ops):
        raise BadRecord(f"{path}: expected forwards and backwards with their microbatch, and found none that is whole")


def _rank_of(events: Sequence[dict[str, Any]], path: Path) -> int:
    """The rank of a raw file: from its name, else the place in the pipeline that its ops name."""
    named = _RANK_IN_NAME.search(path.stem)
    if named and int(named[1]) <= MOST_LABEL:
        return int(named[1])
    for event in events:
        position = event.get("pp_rank")
        if isinstance(position, int) and 0 <= position <= MOST_LABEL:
            return position
    return 0


class _Layout:
    """Which rank holds which stage: stages go round the ranks of a pipeline, chunk by chunk."""

    def __init__(self, ops: Sequence[_Op]) -> None:
        self.position = {op.rank: op.position for op in ops}
        at: dict[int, list[int]] = defaultdict(list)
        for rank in sorted(self.position):
            at[self.position[rank]].append(rank)
        self.ranks_along = max(at) + 1
        self.chunks = max(op.chunk for op in ops) + 1
        self.missing = [position for position in range(self.ranks_along) if position not in at]
        self.replica = {rank: ranks.index(rank) for ranks in at.values() for rank in ranks}
        self._at = at
        self.alone = len(self.position) == 1

    def stage(self, op: _Op) -> int:
        return op.chunk * self.ranks_along + op.position

    def source(self, op: _Op) -> int | None:
        """The rank that an op's input comes from; ``NONE`` unknown; None where it comes from no other."""
        return self._neighbour(op, -1 if op.kind is Kind.FORWARD else 1)

    def target(self, op: _Op) -> int | None:
        """The rank that an op's output goes to, likewise."""
        return self._neighbour(op, 1 if op.kind is Kind.FORWARD else -1)

    def _neighbour(self, op: _Op, direction: int) -> int | None:
        """The rank that holds the stage before (-1) or after (+1) the op's; of a rank alone the others are unknown."""
        if self.alone:
            is_end = op.position == 0 and op.chunk == 0 and direction < 0
            return None if is_end else NONE
        other = self.stage(op) + direction
        if not 0 <= other < self.chunks * self.ranks_along:
            return None
        holders = self._at.get(other % self.ranks_along, [])
        replica = self.replica[op.rank]
        rank = holders[replica] if replica < len(holders) else NONE
        return None if rank == op.rank else rank


def _trace(found: _Found, source: str) -> Trace:
    layout = _Layout(found.ops)
    ranks = sorted(layout.position)
    rows = [*_op_rows(found, layout), *_iteration_rows(found, ranks)]
    spans = make_spans(rows)
    partner = match(Trace(spans)).partner
    received = np.flatnonzero((spans["kind"] == Kind.RECV) & (partner != MISSING))
    error_s = message_bounds(spans["post_ns"][partner[received]], spans["end_ns"][received])
    return Trace(
        spans=spans,
        job=JobFacts(
            source=source,
            world_size=len(ranks),
            framework="megatron",
            pp=layout.ranks_along,
            vpp=layout.chunks,
        ),
        ranks={rank: RankFacts(rank, clock=f"rank {rank}" if found.own_clocks else "merged") for rank in ranks},
        groups=(ProcessGroup("pipeline", tuple(ranks)), ProcessGroup("gradients and optimizer", tuple(ranks))),
        clock_error_s=error_s,
        warnings=tuple(_warnings(found, layout)),
    )


def _warnings(found: _Found, layout: _Layout) -> Iterator[str]:
    yield from found.warnings
    yield (
        "messages are not in this recording: the gap before an op counts as its wait for them, so that transfers, "
        "launches and host time cannot be told apart there"
    )
    yield (
        "what lies between the last backward and the iteration's end (reduction of gradients, optimizer) is not in "
        "this recording: it counts as one collective of all ranks"
    )
    if found.own_clocks and len(layout.position) > 1:
        yield "each rank has a clock of its own: aligned by the begin of the first iteration"
    if layout.alone:
        yield (
            "only one rank is in this recording: what it waited for, and the stages of the others, are unknown; "
            "name the files of all ranks"
        )
    if layout.missing:
        yield f"no record of places {', '.join(map(str, layout.missing[:8]))} in the pipeline"
    if found.bad_events:
        yield f"{found.bad_events} events were left out: not as expected"
    for name, count in sorted(found.open_ops.items()):
        yield f"{count} {name} begun, and never ended, were left out"


def _op_rows(found: _Found, layout: _Layout) -> Iterator[dict[str, int]]:
    """Each op, and in the gap before it the waits that Megatron makes there.

    Megatron sends an op's output and posts the receive of the next op of its direction in one batch when the op ends,
    and waits for both before that next op: for a send too, which ends when the peer has posted its receive.
    """
    reached = {key: bounds.begin for key, bounds in found.iterations.items()}
    batches: dict[tuple[int, int, Kind], tuple[int, _Op]] = {}
    for op in sorted(found.ops, key=lambda op: (op.rank, op.start, op.end)):
        key = (op.rank, op.iteration)
        yield {**_labels(op, layout), "kind": op.kind, "start_ns": op.start, "end_ns": op.end}
        begin = min(reached.get(key, op.start), op.start)
        posted, before = batches.get((*key, op.kind), (begin, None))
        if before is not None and layout.target(before) is not None:
            yield _message(before, layout, Kind.SEND, (posted, begin, op.start))
        if layout.source(op) is not None:
            yield _message(op, layout, Kind.RECV, (posted, begin, op.start))
        batches[op.rank, op.iteration, op.kind] = (op.end, op)
        reached[key] = max(reached.get(key, op.end), op.end)
    for posted, op in batches.values():
        if layout.target(op) is not None:
            yield _message(op, layout, Kind.SEND, (posted, posted, posted))


def _labels(op: _Op, layout: _Layout) -> dict[str, int]:
    return {
        "rank": op.rank,
        "step": op.iteration,
        "stage": layout.stage(op),
        "chunk": op.chunk,
        "microbatch": op.microbatch,
    }


def _message(op: _Op, layout: _Layout, kind: Kind, times: tuple[int, int, int]) -> dict[str, int]:
    """A message to or from an op; ``times`` are its post, and begin and end of the wait (all equal: never waited for).

    Its tag is the stage that it comes from and its direction, its number the microbatch's.
    """
    forward = op.kind is Kind.FORWARD
    sent = kind is Kind.SEND
    sender = layout.stage(op) + (0 if sent else -1 if forward else 1)
    posted, start, end = times
    flags = Flag.INFERRED | (Flag.NEVER_WAITED if posted == end else Flag(0))
    peer = layout.target(op) if sent else layout.source(op)
    return {
        **_labels(op, layout),
        "kind": kind,
        "op": Payload.ACTIVATION if forward else Payload.GRADIENT,
        "flags": flags,
        "peer": NONE if peer is None else peer,
        "tag": 2 * sender + int(not forward),
        "seq": op.iteration * (MOST_LABEL + 1) + op.microbatch,
        "post_ns": posted,
        "start_ns": start,
        "end_ns": end,
    }


def _iteration_rows(found: _Found, ranks: Sequence[int]) -> Iterator[dict[str, int]]:
    """Each iteration as one call of the schedule, and what follows its last op as a collective of all ranks."""
    last: dict[tuple[int, int], int] = {}
    for op in found.ops:
        last[op.rank, op.iteration] = max(last.get((op.rank, op.iteration), op.end), op.end)
    ended = Counter(iteration for (_, iteration), bounds in found.iterations.items() if bounds.end is not None)
    for (rank, iteration), bounds in found.iterations.items():
        if (rank, iteration) not in last:
            continue
        done = last[rank, iteration]
        end = max(done, bounds.end or done)
        common = {"rank": rank, "step": iteration}
        yield {**common, "kind": Kind.SCHEDULE, "start_ns": min(bounds.begin, done), "end_ns": end}
        if ended[iteration] == len(ranks):
            start = max(done, bounds.reduce or done)
            row = {**common, "kind": Kind.COLLECTIVE, "op": Collective.OTHER, "group": 1, "seq": iteration}
            yield {**row, "flags": Flag.INFERRED, "start_ns": min(start, end), "end_ns": end}
