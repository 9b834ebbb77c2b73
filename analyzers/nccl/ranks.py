"""Which communicator a channel belongs to, and which ranks of the job its ends are.

NCCL's channel lines carry ranks of the communicator and not its name. The thread that sets a communicator up writes its
channels too, up to NCCL 2.21; later ones are connected when first used, by other threads. So: first the thread, then
the communicators of the same GPU whose ranks and devices fit; where several fit, none is named.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ppdiag.analyzers.nccl.model import Communicator, Connection, Endpoint, Process


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of ranks from outside of NCCL's lines."""

    hints: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Rank in the job of a (host, process id), from the launcher's prefix."""
    ranks: Mapping[tuple[str, int], int] | None = None
    """Rank in the job of each (host, process id), from a record of it; where given, nothing else is believed."""
    world_size: int | None = None
    """Number of the job's ranks."""


def resolve(
    connections: Iterable[Connection], communicators: Sequence[Communicator], known: Known
) -> tuple[Connection, ...]:
    """The connections with their communicators and ranks in the job, as far as those can be told."""
    book = _Book(communicators, known)
    return tuple(book.resolved(connection) for connection in connections)


class _Book:
    """All communicators, by GPU, process and id."""

    def __init__(self, communicators: Sequence[Communicator], known: Known) -> None:
        self._of: dict[Process, list[Communicator]] = defaultdict(list)
        self._of_pid: dict[tuple[str, int], dict[Process, None]] = defaultdict(dict)
        self._members: dict[str, dict[int, Communicator]] = defaultdict(dict)
        for communicator in communicators:
            process = communicator.process
            self._of[process].append(communicator)
            self._of_pid[process.host, process.pid][process] = None
            self._members[communicator.id][communicator.rank] = communicator
        self._recorded = known.ranks is not None
        largest = max((communicator.size for communicator in communicators), default=0)
        # Without a record the largest communicator is taken for the world, if all GPUs that were seen fit into it.
        guess = largest if not self._recorded and len(self._of) <= largest else 0
        self._world_size = known.world_size or guess
        self._job_rank = self._recorded_ranks(known.ranks) if known.ranks is not None else self._told_ranks(known.hints)

    def _recorded_ranks(self, ranks: Mapping[tuple[str, int], int]) -> dict[Process, int]:
        # NCCL prints the name of a host up to its first dot.
        short = {(host.partition(".")[0], pid): rank for (host, pid), rank in ranks.items()}
        return self._by_process(short)

    def _told_ranks(self, hints: Mapping[tuple[str, int], int]) -> dict[Process, int]:
        """Ranks in the world communicator; without one the launcher's numbers, if each stands for one process."""
        world: dict[Process, int] = {}
        for process, communicators in self._of.items():
            for each in communicators:
                if each.size == self._world_size:
                    world.setdefault(process, each.rank)
        return world or (self._by_process(hints) if len(set(hints.values())) == len(hints) else {})

    def _by_process(self, ranks: Mapping[tuple[str, int], int]) -> dict[Process, int]:
        """For processes with one GPU: a rank is one GPU."""
        found = {}
        for (host, pid), processes in self._of_pid.items():
            rank = ranks.get((host, pid), ranks.get((host.partition(".")[0], pid)))
            if len(processes) == 1 and rank is not None:
                found[next(iter(processes))] = rank
        return found

    def resolved(self, connection: Connection) -> Connection:
        """The connection with what can be told."""
        communicator = self._communicator(connection)
        return replace(
            connection,
            communicator=communicator.id if communicator else "",
            source_job_rank=self._rank_of(connection.source, communicator),
            destination_job_rank=self._rank_of(connection.destination, communicator),
        )

    def _communicator(self, connection: Connection) -> Communicator | None:
        own = self._own(connection.process)
        if connection.communicator:
            return next((each for each in own if each.id == connection.communicator), None)
        fitting = [each for each in own if self._fits(connection, each)]
        return fitting[-1] if len({each.id for each in fitting}) == 1 else None

    def _own(self, process: Process) -> list[Communicator]:
        """Communicators of the GPU; of the whole process where the line came from a thread that had chosen none."""
        if process in self._of:
            return self._of[process]
        return [each for other in self._of_pid.get((process.host, process.pid), {}) for each in self._of[other]]

    def _fits(self, connection: Connection, communicator: Communicator) -> bool:
        ends = (connection.source, connection.destination)
        mine = ends[0] if connection.direction == "send" else ends[1]
        if mine is None or mine.rank != communicator.rank:
            return False
        members = self._members[communicator.id]
        return all(
            end is None or (end.rank < communicator.size and _may_be(end, members.get(end.rank))) for end in ends
        )

    def _rank_of(self, end: Endpoint | None, communicator: Communicator | None) -> int | None:
        if end is None:
            return None
        if communicator is None:
            # With no communicator in the whole log there is one numbering only: the line's own.
            return None if self._of or self._recorded else end.rank
        member = self._members[communicator.id].get(end.rank)
        if member is not None and member.process in self._job_rank:
            return self._job_rank[member.process]
        return end.rank if communicator.size == self._world_size else None


def _may_be(end: Endpoint, member: Communicator | None) -> bool:
    """Whether the device in brackets may be this member's: its bus id (to NCCL 2.18.1) or NVML index (later)."""
    if member is None or not end.device or member.nvml_device is None:
        return True
    return end.device in {member.bus_id, str(member.nvml_device)}
