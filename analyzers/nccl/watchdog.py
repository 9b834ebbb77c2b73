"""Messages of the watchdog of torch's ProcessGroupNCCL: which rank stopped at which op.

Each is printed up to three times a rank (when found, when the process is taken down, in the exception), and its facts
come in several lines; they are folded into one report for a rank and sequence number.

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp of torch 1.13 to 2.9.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ppdiag.analyzers.nccl.model import WatchdogReport

LARGEST_COUNT = 10**12
"""No job enqueues that many ops; larger numbers are uninitialised memory (3904955349522264369 has been seen)."""
MAX_REPORTS = 100_000

_RANK = re.compile(r"\[(?:PG (?:ID )?(?P<pg>\S{1,64}) ?(?P<group>[^\]]{0,200}?) )?Rank (?P<rank>\d{1,7})\]")
_WORK = re.compile(r"WorkNCCL\((?:SeqNum=(?P<seq>\d{1,20}), )?OpType=(?P<op>\w{1,64})")
_TIMEOUT = re.compile(r"Timeout\(ms\)=(\d{1,15})")
_RAN = re.compile(r"ran for (\d{1,15}) milliseconds")
_AT = re.compile(r"(?:at work sequence id: |detected by watchdog at work: |Timeout at NCCL work: )(\d{1,20})")
_ENQUEUED = re.compile(r"[Ll]ast enqueued (?:NCCL )?work: (-?\d{1,20})")
_COMPLETED = re.compile(r"last completed (?:NCCL )?work: (-?\d{1,20})")
_TOLD = re.compile(r"dump signal due to a collective timeout from {1,2}rank (\d{1,7})")


@dataclass(frozen=True, slots=True)
class _Found:
    """What one line says."""

    rank: int
    group: str
    op: str
    seq: int | None
    timeout_ms: int | None
    ran_ms: int | None
    enqueued: int | None
    completed: int | None
    told_by: int | None


def is_watchdog(text: str) -> bool:
    """Whether a line may be one of the watchdog's; cheap."""
    return "atchdog caught" in text or "enqueued" in text


class Watchdog:
    """Gathers the messages of all ranks."""

    def __init__(self) -> None:
        self._reports: dict[tuple[int, int | None], WatchdogReport] = {}

    def feed(self, text: str, rank: int | None) -> None:
        """Take a line; ``rank`` is the one that the launcher put before it."""
        found = _parse(text, rank)
        if found is None:
            return
        key = (found.rank, found.seq)
        known = self._reports.get(key)
        if known is not None:
            self._reports[key] = _merged(known, found)
        elif len(self._reports) < MAX_REPORTS:
            self._reports[key] = WatchdogReport(
                rank=found.rank,
                group=found.group,
                op=found.op,
                seq=found.seq,
                timeout_ms=found.timeout_ms,
                ran_ms=found.ran_ms,
                last_enqueued=found.enqueued,
                last_completed=found.completed,
                told_by=found.told_by,
                times_printed=1,
            )

    def reports(self) -> tuple[WatchdogReport, ...]:
        """One report for each rank and sequence number, by rank."""
        return tuple(sorted(self._reports.values(), key=lambda report: (report.rank, report.seq or -1)))


def _parse(text: str, rank: int | None) -> _Found | None:
    where = _RANK.search(text)
    work, at, told = _WORK.search(text), _AT.search(text), _TOLD.search(text)
    if (rank is None and where is None) or (work is None and at is None and told is None):
        return None
    local = int(where["rank"]) if where else -1
    seq = (work["seq"] if work else None) or (at[1] if at else None)
    enqueued, completed = _count(_ENQUEUED.search(text)), _count(_COMPLETED.search(text))
    if enqueued is not None and completed is not None and completed > enqueued:
        completed = None
    return _Found(
        rank=rank if rank is not None else local,
        group=_group(where),
        op=work["op"] if work else "",
        seq=int(seq) if seq and int(seq) < LARGEST_COUNT else None,
        timeout_ms=_number(_TIMEOUT.search(text)) if work else None,
        ran_ms=_number(_RAN.search(text)) if work else None,
        enqueued=enqueued,
        completed=completed,
        told_by=int(told[1]) if told else None,
    )


def _group(where: re.Match[str] | None) -> str:
    """Name of the group: ``[PG 0 (default_pg) Rank 1]``, ``[PG ID 0 PG GUID 0(default_pg) Rank 4]``.

    >>> _group(_RANK.search("[PG ID 0 PG GUID 0(default_pg) Rank 4]")), _group(_RANK.search("[PG 0 (tp) Rank 1]"))
    ('default_pg', 'tp')
    >>> _group(_RANK.search("[PG ID 2 PG GUID 3 Rank 3]"))
    '2'
    """
    if where is None or where["pg"] is None:
        return ""
    name = re.search(r"\(([^)]{1,200})\)", where["group"] or "")
    return name[1] if name else str(where["pg"])


def _number(match: re.Match[str] | None) -> int | None:
    return int(match[1]) if match else None


def _count(match: re.Match[str] | None) -> int | None:
    number = _number(match)
    return number if number is not None and -1 <= number <= LARGEST_COUNT else None


def _merged(known: WatchdogReport, found: _Found) -> WatchdogReport:
    def first(old: int | None, new: int | None) -> int | None:
        return old if old is not None else new

    # The same kind of line again is a repeat; a line of the other kind completes the report.
    repeats = bool(found.op) == bool(known.op)
    return replace(
        known,
        group=known.group or found.group,
        op=known.op or found.op,
        timeout_ms=first(known.timeout_ms, found.timeout_ms),
        ran_ms=first(known.ran_ms, found.ran_ms),
        last_enqueued=first(known.last_enqueued, found.enqueued),
        last_completed=first(known.last_completed, found.completed),
        told_by=first(known.told_by, found.told_by),
        times_printed=known.times_printed + repeats,
    )
