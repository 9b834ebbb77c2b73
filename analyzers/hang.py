"""From dumps of a job that stands still to who waits for whom, and where that begins.

Each rank stands in the first op that it has called and not finished: whatever the later ones wait for, they wait for it
too, since an op can only depend on ops that were called before it. Its op waits for the members that are not in it:
those that have not called it, those that have something else to finish first, and those that nothing is known of. Where
following these waits ends, or goes round in a circle, the job is held up.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from ppdiag.analyzers.sources.flight_recorder import UNKNOWN, Dump, Dumps, Entry, Group
from ppdiag.hang import Absence, Absent, Hang, Operation, RankAtHang, Root, RootKind, Stuck

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LISTED = 8
DEFAULT_GROUP = "default_pg"
"""What torch calls the group of all ranks."""
ONE_SIDED = ("broadcast", "_broadcast", "reduce", "_reduce", "gather", "scatter", "send", "recv")
"""Ops that some members may finish without the others."""
SAME_SIZES = ("all_reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base", "reduce")
"""Ops whose inputs have equal shapes on all members."""


class _Key(NamedTuple):
    """What makes the calls of several ranks one op."""

    group: str
    members: tuple[int, ...]
    sequence: int
    source: int
    destination: int


def diagnose_hang(dumps: Dumps) -> Hang:
    """Explains where a job stood still."""
    return _Finder(dumps).hang()


class _Finder:
    def __init__(self, dumps: Dumps) -> None:
        self.dumps = dumps
        groups = [group for dump in dumps.by_rank.values() for group in dump.groups]
        known = {rank for group in groups for rank in group.ranks}
        self.ranks = sorted(known | set(dumps.by_rank))
        self.pending = {rank: [e for e in dump.entries if not e.finished] for rank, dump in dumps.by_rank.items()}
        self.head = {rank: entries[0] for rank, entries in self.pending.items() if entries}
        self.with_messages = {e.group.name for d in dumps.by_rank.values() for e in d.entries if e.is_message}
        self.reached = {rank: self._numbers(dump) for rank, dump in dumps.by_rank.items()}
        self.used_by = _used_by(dumps)
        self.key: dict[int, _Key] = {rank: self._key(rank, entry) for rank, entry in self.head.items()}
        self.finished_elsewhere = {rank: who for rank in self.head if (who := self._finished_by(rank)) is not None}
        self.stuck = self._stuck()

    def _key(self, rank: int, entry: Entry) -> _Key:
        """The op that an entry is; a message has the number that its receiver's side of the pair gives it."""
        if not entry.is_message:
            return _Key(entry.group.name, self._members(entry.group), entry.sequence, UNKNOWN, UNKNOWN)
        source, destination = (rank, entry.peer) if entry.name == "send" else (entry.peer, rank)
        other = self._other_end(rank, entry)
        sequence = max(entry.sequence, other.sequence if other else UNKNOWN)
        return _Key(entry.group.name, self._members(entry.group), sequence, source, destination)

    def _members(self, group: Group) -> tuple[int, ...]:
        """The members of a group; where no dump lists them, the ranks that have used it."""
        return group.ranks or tuple(self.used_by.get(group.name, ()))

    def _other_end(self, rank: int, entry: Entry) -> Entry | None:
        """The pending call at the other end of a message: of the same number, else in the same place of the queue."""
        there = [e for e in self.pending.get(entry.peer, ()) if _faces(e, entry, rank)]
        exact = next((e for e in there if e.sequence == entry.sequence), None)
        if exact is not None:
            return exact
        queue = [e for e in self.pending[rank] if (e.group, e.name, e.peer) == (entry.group, entry.name, entry.peer)]
        place = queue.index(entry)
        return there[place] if place < len(there) else None

    def _finished_by(self, rank: int) -> int | None:
        """A rank that has finished the op that this one stands in, where that takes all members."""
        entry = self.head[rank]
        if entry.name in ONE_SIDED:
            return None
        return next(
            (m for m in self.key[rank].members if m != rank and self._reached(m, entry)[1] >= entry.sequence), None
        )

    def _reached(self, rank: int, entry: Entry) -> tuple[int, int]:
        """The last collective of the entry's group that a rank has called, and the last that it has finished."""
        return self.reached.get(rank, {}).get(entry.group.name, (UNKNOWN, UNKNOWN))

    def _numbers(self, dump: Dump) -> dict[str, tuple[int, int]]:
        """The last collective that a rank has called, and finished, by group."""
        found: dict[str, tuple[int, int]] = {}
        for entry in dump.entries:
            if not entry.is_message:
                called, finished = found.get(entry.group.name, (UNKNOWN, UNKNOWN))
                finished = max(finished, entry.sequence if entry.finished else UNKNOWN)
                found[entry.group.name] = (max(called, entry.sequence), finished)
        for name in dump.called.keys() - self.with_messages:  # the dump counts messages of the others
            called, finished = found.get(name, (UNKNOWN, UNKNOWN))
            found[name] = (max(called, dump.called[name]), max(finished, dump.finished.get(name, UNKNOWN)))
        return found

    def _stuck(self) -> list[Stuck]:
        waiting: dict[_Key, list[int]] = defaultdict(list)
        for rank, key in self.key.items():
            if rank not in self.finished_elsewhere:
                waiting[key].append(rank)
        rows = [self._stuck_in(key, ranks) for key, ranks in waiting.items()]
        return sorted(rows, key=lambda row: (-len(row.waiting), row.waiting))

    def _stuck_in(self, key: _Key, waiting: list[int]) -> Stuck:
        entry = self.head[waiting[0]]
        ends = (key.source, key.destination) if entry.is_message else key.members
        absent = [self._absent(rank, waiting[0], entry) for rank in sorted(ends) if rank not in waiting]
        return Stuck(_operation(key, entry), tuple(waiting), tuple(one for one in absent if one is not None))

    def _absent(self, rank: int, waiting: int, entry: Entry) -> Absent | None:
        """Why a rank is not in the op that ``waiting`` stands in; None where it is, or has been."""
        dump = self.dumps.by_rank.get(rank)
        if dump is None:
            return Absent(rank, Absence.NO_DUMP, "left no dump")
        if entry.is_message:
            called = self._other_end(waiting, entry) is not None
            detail = "has not called the other end"
        else:
            last, finished = self._reached(rank, entry)
            if finished >= entry.sequence:
                return None
            called = last >= entry.sequence
            detail = f"has not called it (its last in this group is {last})" if last != UNKNOWN else "has not called it"
        if not called:
            return Absent(rank, Absence.MISSING, detail if dump.entries else f"{detail}; nothing is pending on it")
        head = self.head.get(rank)
        if head is None:
            return None
        return Absent(rank, Absence.BEHIND, f"has {_operation(self.key[rank], head).words} to finish first")

    def hang(self) -> Hang:
        waits_for = {
            rank: {one.rank for one in row.absent if one.rank != rank} for row in self.stuck for rank in row.waiting
        }
        roots = self._roots(waits_for)
        return Hang(
            source=self.dumps.source,
            world_size=len(self.ranks),
            text=_text(roots, len(self.ranks)),
            roots=roots,
            stuck=tuple(self.stuck),
            ranks=tuple(self._rank(rank, waits_for) for rank in self.ranks),
            mismatches=tuple(self._mismatches()),
            warnings=tuple(self._warnings()),
        )

    def _roots(self, waits_for: Mapping[int, set[int]]) -> tuple[Root, ...]:
        """Where following the waits ends, or goes round in a circle."""
        awaited = {rank for others in waits_for.values() for rank in others}
        ends = {rank for rank in awaited | set(waits_for) | set(self.finished_elsewhere) if not waits_for.get(rank)}
        parts: dict[tuple[RootKind, object], list[int]] = defaultdict(list)
        for rank in sorted(ends):
            kind = self._kind(rank)
            parts[kind, self.key.get(rank) if kind is RootKind.TRANSPORT else None].append(rank)
        found = [self._root(kind, tuple(ranks), waits_for) for (kind, _), ranks in parts.items()]
        reaching = _reach(waits_for, ends) | ends
        circling = {rank: others - reaching for rank, others in waits_for.items() if rank not in reaching}
        if circling:
            found.append(self._root(RootKind.CYCLE, _cycle(circling), waits_for))
        return tuple(sorted(found, key=lambda root: -root.held_up))

    def _kind(self, rank: int) -> RootKind:
        if rank not in self.dumps.by_rank:
            return RootKind.NO_DUMP
        if rank in self.finished_elsewhere:
            return RootKind.DEVICE
        return RootKind.TRANSPORT if rank in self.head else RootKind.HOST

    def _root(self, kind: RootKind, ranks: tuple[int, ...], waits_for: Mapping[int, set[int]]) -> Root:
        held_up = len(_reach(waits_for, set(ranks)) - set(ranks))
        text, look_at = _WORDS[kind]
        return Root(kind, ranks, held_up, f"{_ranks(ranks)}: {text}{self._evidence(kind, ranks)}", look_at)

    def _evidence(self, kind: RootKind, ranks: Sequence[int]) -> str:
        """What of the dumps shows it, of the first of the ranks."""
        rank = ranks[0]
        if kind is RootKind.DEVICE:
            operation = _operation(self.key[rank], self.head[rank])
            return f" (rank {rank}: {operation.words}, finished by rank {self.finished_elsewhere[rank]})"
        if kind is RootKind.TRANSPORT:
            return f" ({_operation(self.key[rank], self.head[rank]).words})"
        if kind is RootKind.CYCLE:
            return f" ({'; '.join(f'rank {r}: {_operation(self.key[r], self.head[r]).words}' for r in ranks[:LISTED])})"
        awaiting = next((row for row in self.stuck if any(one.rank == rank for one in row.absent)), None)
        return f" ({awaiting.operation.words})" if awaiting is not None else ""

    def _rank(self, rank: int, waits_for: Mapping[int, set[int]]) -> RankAtHang:
        dump = self.dumps.by_rank.get(rank)
        if dump is None:
            return RankAtHang(rank, dump=False, pending=0, first_pending=None, last_finished="")
        head = self.head.get(rank)
        operation = _operation(self.key[rank], head) if head is not None else None
        return RankAtHang(
            rank,
            dump=True,
            pending=len(self.pending[rank]),
            first_pending=operation,
            last_finished=_last_finished(dump, head or self._awaited_in(rank)),
            waits_for=tuple(sorted(waits_for.get(rank, ()))),
            called_at=head.called_at if head is not None else "",
        )

    def _awaited_in(self, rank: int) -> Entry | None:
        """A call that others wait in for this rank, as one of them has it."""
        row = next((row for row in self.stuck if any(one.rank == rank for one in row.absent)), None)
        return None if row is None else self.head[row.waiting[0]]

    def _mismatches(self) -> Iterable[str]:
        """Ranks that call different ops, or ones of different sizes, at the same place of a group."""
        calls: dict[tuple[Group, int], dict[tuple[str, str], list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, entries in self.pending.items():
            for entry in entries:
                if not entry.is_message:
                    sizes = entry.sizes if entry.name in SAME_SIZES else ""
                    calls[entry.group, entry.sequence][entry.name, sizes].append(rank)
        for (group, sequence), found in calls.items():
            if len(found) > 1:
                parts = "; ".join(f"{_ranks(ranks)}: {' '.join(call).strip()}" for call, ranks in found.items())
                yield f"call {sequence} of group {group.name} {group.description} differs: {parts}"

    def _warnings(self) -> Iterable[str]:
        yield from self.dumps.warnings
        absent = [rank for rank in self.ranks if rank not in self.dumps.by_rank]
        if absent:
            yield f"no dump of {_ranks(absent)}"
        empty = [rank for rank, dump in self.dumps.by_rank.items() if not dump.entries]
        if empty and len(empty) < len(self.dumps.by_rank):
            yield f"the dump of {_ranks(empty)} has no entries beside full ones: nothing was pending there"


_WORDS = {
    RootKind.HOST: (
        "the host has not come to the op that others wait in, and nothing is pending on the device",
        "the stack of its Python threads (py-spy dump --pid ...), its log, its data loading",
    ),
    RootKind.DEVICE: (
        "the device does not finish an op that other ranks have finished",
        "its GPU: Xid errors in dmesg, nvidia-smi -q, its log",
    ),
    RootKind.NO_DUMP: (
        "no dump: the process has died, or could not write one",
        "its log, and whether its machine is up",
    ),
    RootKind.TRANSPORT: (
        "all members are in the op, and it does not end",
        "the network between them (NCCL_DEBUG=INFO: interfaces and transport), and the kernels before it on their GPUs",
    ),
    RootKind.CYCLE: (
        "each waits for the next",
        "the order in which the ranks named call these ops: it has to be the same on all of them",
    ),
}


def _used_by(dumps: Dumps) -> dict[str, list[int]]:
    """The ranks that have used each group, by its name; all of them for the default group."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank, dump in dumps.by_rank.items():
        for name in dump.called.keys() | {entry.group.name for entry in dump.entries}:
            found[name].append(rank)
    entries = (entry for dump in dumps.by_rank.values() for entry in dump.entries)
    for name in {entry.group.name for entry in entries if entry.group.description == DEFAULT_GROUP}:
        found[name] = sorted(dumps.by_rank)
    return found


def _faces(there: Entry, here: Entry, rank: int) -> bool:
    """Whether a call of the peer can be the other end of a message of ``rank``."""
    opposite = {"send": "recv", "recv": "send"}[here.name]
    return there.name == opposite and there.peer == rank and there.group.name == here.group.name


def _operation(key: _Key, entry: Entry) -> Operation:
    return Operation(
        group=entry.group.name,
        description=entry.group.description,
        name="message" if entry.is_message else entry.name,
        sequence=key.sequence,
        source=key.source if entry.is_message else None,
        destination=key.destination if entry.is_message else None,
        sizes=entry.sizes,
    )


def _last_finished(dump: Dump, head: Entry | None) -> str:
    """The last call that a rank has finished; by the dump's counts that of the group of ``head``."""
    finished = [entry for entry in dump.entries if entry.finished]
    if finished:
        last = finished[-1]
        return f"{last.name} {last.sequence} (group {last.group.name} {last.group.description})"
    if head is not None and (number := dump.finished.get(head.group.name, UNKNOWN)) != UNKNOWN:
        return f"number {number} of group {head.group.name} {head.group.description}"
    return ""


def _reach(waits_for: Mapping[int, set[int]], ends: Iterable[int]) -> set[int]:
    """The ranks that wait for one of these, directly or through others."""
    waited_by: dict[int, list[int]] = defaultdict(list)
    for rank, others in waits_for.items():
        for other in others:
            waited_by[other].append(rank)
    found: set[int] = set()
    todo = list(ends)
    while todo:
        for rank in waited_by[todo.pop()]:
            if rank not in found:
                found.add(rank)
                todo.append(rank)
    return found


def _cycle(waits_for: Mapping[int, set[int]]) -> tuple[int, ...]:
    """A circle among ranks each of which waits for another of them.

    >>> _cycle({0: {1}, 1: {2}, 2: {1}})
    (1, 2)
    """
    rank = min(waits_for)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = min(waits_for[rank])
    return tuple(path[path.index(rank) :])


def _text(roots: Sequence[Root], world_size: int) -> str:
    if not roots:
        return "no rank waits for another: nothing is pending in these dumps, or only on ranks that wait for nobody"
    ranks = tuple(dict.fromkeys(rank for root in roots for rank in root.ranks))
    held_up = max(root.held_up for root in roots)
    if roots[0].kind is RootKind.TRANSPORT and not held_up:
        return roots[0].text
    if roots[0].kind is RootKind.CYCLE:
        others = f", and {held_up} of {world_size} ranks for them" if held_up else ""
        return f"{_ranks(roots[0].ranks)} wait for each other{others}"
    return (
        f"{_ranks(ranks)} hold{'s' if len(ranks) == 1 else ''} the job up: {held_up} of {world_size} ranks wait there"
    )


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> _ranks([3]), _ranks([1, 2])
    ('rank 3', 'ranks 1, 2')
    """
    more = f" and {len(ranks) - LISTED} more" if len(ranks) > LISTED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:LISTED]))}{more}"
