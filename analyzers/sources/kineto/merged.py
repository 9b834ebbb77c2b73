"""Tells the ranks apart that a script merged into one file.

torch.profiler writes one rank a file; there is no common way to merge them, but each has to keep the ranks' tracks
apart, and does so by the ids of processes: a name before them (``rank3_4711``, ``[TP00-PP01] 4711``), the rank itself
as the id, a number added, or nothing, since the processes of one machine have ids of their own. Kernels have the number
of their device for it; where that is not changed in a way that names the rank, they belong to the process that launched
them, else to the one whose events stand before them in the file.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.analyzers.sources.kineto.events import Category, Events
from ppdiag.analyzers.sources.kineto.host import whole
from ppdiag.errors import BadRecord
from ppdiag.model import NONE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

HOST = (Category.LABEL, Category.COMMUNICATION_OP, Category.CPU_OP, Category.LAUNCH, Category.FORWARD_MARK)
LEAST_SHARE = 0.02
"""Of the events of the largest process: what has fewer is no rank, but a damaged event or two."""
CLEARLY = 2
"""A process launched a device's kernels if it has so many times as many fitting launches as any other."""
_RANK = re.compile(r"rank[\s_:.#-]*(\d{1,6})", re.IGNORECASE)
_NUMBER_AT_END = re.compile(r"[\s_:.-]*\d+$")


@dataclass(frozen=True, slots=True)
class Part:
    """One rank of a file.

    Attributes:
        name: what tells it apart, for messages; empty where the file has one rank.
        pids: the ids of its process and devices; empty: all.
        rank: as the ids or the header have it; None where they do not.
    """

    name: str = ""
    pids: frozenset[Any] = frozenset()
    rank: int | None = None


def parts_of(path: Path, events: Events, launches: Callable[[], Events]) -> tuple[Part, ...]:
    """The ranks of a file; most have one.

    Args:
        path: for messages.
        events: of the file, with annotations and messages of the host.
        launches: reads the file again, for what launched each kernel.

    Raises:
        BadRecord: there are several, and whose kernels are which cannot be told.
    """
    hosts = _processes(events, HOST)
    devices = _processes(events, (Category.KERNEL, Category.COPY, Category.DEVICE_LABEL))
    if len(hosts) < 2:
        return (Part(),)
    owner = _by_name(hosts, devices) or _by_device(hosts, devices, events, launches)
    if owner is None:
        raise BadRecord(
            f"{path}: holds {len(hosts)} processes merged into one file, and whose kernels are which cannot be told "
            f"(they are of {len(devices)} device{'s'[: len(devices) > 1]}); name the files that were merged, one a rank"
        )
    found: dict[str, set[Any]] = {}
    for pid, name in owner.items():
        found.setdefault(name, set()).add(pid)
    ranks = _ranks(list(found), events.facts.get("distributedInfo"))
    return tuple(Part(name, frozenset(pids), ranks.get(name)) for name, pids in found.items())


def events_of(part: Part, events: Events) -> Events:
    """Those events of a file that are of one rank."""
    if not part.pids:
        return events
    mine = np.array([pid in part.pids for pid, _ in events.threads] or [False])[events.thread]
    number = np.cumsum(mine) - 1
    told = events.facts.get("distributedInfo")
    common = {name: value for name, value in told.items() if name != "rank"} if isinstance(told, dict) else told
    return replace(
        events,
        start_ns=events.start_ns[mine],
        end_ns=events.end_ns[mine],
        category=events.category[mine],
        name=events.name[mine],
        thread=events.thread[mine],
        arguments={int(number[i]): found for i, found in events.arguments.items() if mine[i]},
        facts=events.facts | {"distributedInfo": common},  # the header is that of the first file
    )


def _processes(events: Events, categories: tuple[Category, ...]) -> dict[Any, int]:
    """How many events of these categories each process (or device) has, in the order in which they appear."""
    counts: Counter[Any] = Counter()
    per_thread = np.bincount(events.thread[events.of(*categories)], minlength=len(events.threads))
    for (pid, _), count in zip(events.threads, per_thread.tolist(), strict=True):
        if count and pid is not None:
            counts[pid] += count
    least = LEAST_SHARE * max(counts.values(), default=0)
    return {pid: count for pid, count in counts.items() if count >= least}


def _by_name(hosts: Mapping[Any, int], devices: Mapping[Any, int]) -> dict[Any, str] | None:
    """The name of the rank in each id; None where not all have one, or where it tells no two apart."""
    pids = dict.fromkeys([*hosts, *devices])
    if set(devices) <= set(hosts) == set(range(len(hosts))) and devices:
        return {pid: f"rank {pid}" for pid in pids}
    if not all(isinstance(pid, str) for pid in pids):
        return None
    named = {pid: _RANK.search(pid) for pid in pids}
    names = {pid: f"rank {int(found[1])}" if found else _NUMBER_AT_END.sub("", pid) for pid, found in named.items()}
    of_hosts = {names[pid] for pid in hosts}
    apart = len(of_hosts) > 1 and all(names.values()) and all(names[pid] in of_hosts for pid in devices)
    return names if apart else None


def _by_device(
    hosts: Mapping[Any, int], devices: Mapping[Any, int], events: Events, launches: Callable[[], Events]
) -> dict[Any, str] | None:
    """The process of each device; None where it cannot be told."""
    own = {pid: f"process {pid}" for pid in hosts}
    if not devices:
        return own
    if set(devices) & set(hosts) or len(devices) < len(hosts):
        return None
    launcher = _launchers(devices, hosts, launches()) or _before(hosts, devices, events)
    return None if launcher is None else own | {device: own[host] for device, host in launcher.items()}


def _launchers(devices: Mapping[Any, int], hosts: Mapping[Any, int], launched: Events) -> dict[Any, Any] | None:
    """The process that launched each device's kernels, by their correlation; None where several fit as well."""
    calls: dict[Any, dict[Any, int]] = defaultdict(dict)
    kernels: list[tuple[Any, Any, int]] = []
    for i, arguments in launched.arguments.items():
        number, pid = whole(arguments.correlation, most=1 << 62), launched.threads[int(launched.thread[i])][0]
        if number == NONE:
            continue
        if launched.category[i] == Category.LAUNCH and pid in hosts:
            calls[number][pid] = int(launched.start_ns[i])
        elif pid in devices:
            kernels.append((pid, number, int(launched.start_ns[i])))
    fitting: dict[Any, Counter[Any]] = {device: Counter() for device in devices}
    for device, number, start in kernels:
        fitting[device].update(host for host, called in calls.get(number, {}).items() if called <= start)
    found = {}
    for device, counts in fitting.items():
        (host, most), *others = [*counts.most_common(2), (None, 0)]
        if not most or most < CLEARLY * others[0][1]:
            return None
        found[device] = host
    return found if set(found.values()) == set(hosts) else None


def _before(hosts: Mapping[Any, int], devices: Mapping[Any, int], events: Events) -> dict[Any, Any] | None:
    """The process whose events stand before a device's in the file, as torch.profiler writes them."""
    found: dict[Any, Any] = {}
    host: Any = None
    for pid, _ in events.threads:
        host = pid if pid in hosts else host
        if pid in devices and pid not in found:
            found[pid] = host
    return found if set(found.values()) == set(hosts) else None  # None is the host of a device before all of them


def _ranks(names: list[str], told: Any) -> dict[str, int]:  # noqa: ANN401  (a value of the header)
    """The rank of each name: its own, else that of the header's entry in its place."""
    own = {name: int(found[1]) for name in names if (found := _RANK.fullmatch(name))}
    if own or not isinstance(told, list) or len(told) != len(names):
        return own
    ranks = [whole(entry.get("rank")) if isinstance(entry, dict) else NONE for entry in told]
    return dict(zip(names, ranks, strict=True)) if NONE not in ranks and len(set(ranks)) == len(ranks) else {}
