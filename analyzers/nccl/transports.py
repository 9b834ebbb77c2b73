"""Questions to a report: what connects two ranks?"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ppdiag.analyzers.nccl.model import FallbackStatus, Family

if TYPE_CHECKING:
    from ppdiag.analyzers.nccl.model import Connection, NcclReport


@dataclass(frozen=True, slots=True)
class Pair:
    """All channels from one rank to another over one transport."""

    source: int | None
    """Rank in the job; None where the log does not tell (or for the network's own end)."""
    destination: int | None
    communicator: str
    ends: tuple[int | None, int | None]
    """Ranks in the communicator."""
    transport: str
    family: Family
    channels: int = 0
    """Different channels and connections; each counts once, though both sides report it."""
    hosts: tuple[str, ...] = ()
    """Of those who wrote the lines."""


def pairs(report: NcclReport) -> tuple[Pair, ...]:
    """The connections, counted by pair of ranks and transport."""
    lanes: dict[Pair, set[tuple[int, int | None]]] = defaultdict(set)
    hosts: dict[Pair, dict[str, None]] = defaultdict(dict)
    for connection in _one_side(report):
        key = Pair(
            source=connection.source_job_rank,
            destination=connection.destination_job_rank,
            communicator=connection.communicator,
            ends=(
                connection.source.rank if connection.source else None,
                connection.destination.rank if connection.destination else None,
            ),
            transport=connection.text,
            family=connection.family,
        )
        lanes[key].add((connection.channel, connection.index))
        hosts[key][connection.process.host] = None
    found = [replace(key, channels=len(lane), hosts=tuple(hosts[key])) for key, lane in lanes.items()]
    return tuple(sorted(found, key=_order))


def _one_side(report: NcclReport) -> list[Connection]:
    """The connections as their senders report them; as the receivers do where the sender's log is missing."""
    sent = {_lane(each) for each in report.connections if each.direction == "send"}
    return [each for each in report.connections if each.direction == "send" or _lane(each) not in sent]


def _lane(connection: Connection) -> tuple[Any, ...]:
    ends = tuple(end.rank if end else None for end in (connection.source, connection.destination))
    return (connection.communicator, connection.channel, connection.index, ends)


def _order(pair: Pair) -> tuple[float, float, str, str]:
    source, destination = (float("inf") if rank is None else rank for rank in (pair.source, pair.destination))
    return source, destination, pair.communicator, pair.transport


def transports_of(report: NcclReport) -> tuple[dict[str, Any], ...]:
    """The rows of ``Diagnosis.transports``.

    Each has ``src_rank``, ``dst_rank`` (in the job, or null), ``communicator``, ``transport``, ``family``,
    ``channels``, ``hosts`` and ``fallback``: null, or for TCP ``status``, ``reasons`` and ``advice`` of the verdict.
    NVLink SHARP has one row a communicator, without ranks.
    """
    return (*(_row(report, pair) for pair in pairs(report)), *_nvls(report))


def _row(report: NcclReport, pair: Pair) -> dict[str, Any]:
    verdict = report.fallback
    concerned = pair.family in {Family.SOCKET, Family.LIBFABRIC} and any(host in verdict.hosts for host in pair.hosts)
    fallback = {"status": verdict.status.value, "reasons": list(verdict.reasons), "advice": verdict.advice}
    return {
        "src_rank": pair.source,
        "dst_rank": pair.destination,
        "communicator": pair.communicator,
        "transport": pair.transport,
        "family": pair.family.value,
        "channels": pair.channels,
        "hosts": list(pair.hosts),
        "fallback": fallback if concerned and verdict.status is not FallbackStatus.NONE else None,
    }


def _nvls(report: NcclReport) -> tuple[dict[str, Any], ...]:
    users: dict[str, list[str]] = defaultdict(list)
    for communicator in report.communicators:
        if communicator.nvls:
            users[communicator.id].append(communicator.process.host)
    return tuple(
        {
            "src_rank": None,
            "dst_rank": None,
            "communicator": identity,
            "transport": "NVLS",
            "family": "NVLS",
            "channels": 0,
            "hosts": sorted(set(hosts)),
            "fallback": None,
        }
        for identity, hosts in users.items()
    )
