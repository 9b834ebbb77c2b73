"""Lines of a log: launcher prefixes off, origin known, torn and interleaved entries told apart.

NCCL begins each entry with ``host:pid:thread [device] NCCL LEVEL``. Where several ranks share one file, an entry may
begin in the middle of another's line. So a line is cut at every such beginning; all but the last entry of a line, and
a last line without its newline, are *torn*: their text may lack its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LINE_BYTES = 16 << 10
"""NCCL's own buffer for an entry holds 1 KiB, for a long list of devices 2 KiB; a longer line is not NCCL's alone."""
MAX_HOSTS = 100_000

_HEADER = re.compile(
    r"(?:(?<![\w.-])|(?<=NCCL INFO)|(?<=NCCL WARN))"
    r"(?P<host>[\w.-]{1,255}):(?P<pid>\d{1,10}):(?P<thread>\d{1,10}) \[(?P<device>-?\d{1,5})\] "
    r"(?:\d{1,12}\.\d{1,9} )?(?:(?P<where>[\w./+-]{1,200}:\d{1,7}) )?NCCL (?P<level>INFO|WARN|TRACE) ?"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_REPEATED = re.compile(r" *\[repeated (\d{1,9})x across cluster\].*\Z", re.DOTALL)
_PREFIXES = (
    # (what it is, form); the group is the rank in the job where there is one
    ("torchrun", re.compile(r"\[(?!rank\d)[A-Za-z_]\w{0,60}?\d{1,6}\]:\s?")),  # [default0]: holds the local rank only
    ("torch", re.compile(r"\[rank(\d{1,6})\]:\s?")),
    ("mpirun", re.compile(r"\[(?:[\w.@-]{0,200}@)?\d{1,10},(\d{1,6})\]<std(?:out|err|diag)>:\s?")),
    ("ray", re.compile(r"\([\w.:<>-]{1,100} pid=\d{1,10}(?:, ip=[0-9a-fA-F.:]{2,45})?\) ?")),
    ("srun", re.compile(r" {0,5}(\d{1,6}): ")),
    ("time", re.compile(r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?:?\s")),
    ("pod", re.compile(r"\[pod/[\w./-]{1,250}\] ")),
    ("compose", re.compile(r"[\w.-]{1,100} {0,20}\| ")),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file."""

    text: str
    whole: bool
    """It ended with a newline, within ``MAX_LINE_BYTES``."""
    overlong: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of NCCL, or with an empty ``host`` a line without its header."""

    host: str
    pid: int
    thread: int
    device: int
    where: str
    """Source file and line, on warnings."""
    level: str
    """INFO | WARN | TRACE, or empty without header."""
    text: str
    torn: bool
    rank: int | None
    """Rank in the job that the launcher put before the line."""
    repeats: int = 1
    """How often the launcher says that it was printed."""


def read_lines(stream: BinaryIO) -> Iterator[Line]:
    """The lines of a binary stream; of a longer line than ``MAX_LINE_BYTES`` the beginning only."""
    while chunk := stream.readline(MAX_LINE_BYTES):
        whole = chunk.endswith(b"\n")
        text = chunk.rstrip(b"\r\n").decode("utf-8", "replace")
        overlong = len(chunk) == MAX_LINE_BYTES and not whole
        while overlong and (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
            pass
        yield Line(text, whole, overlong)


class Splitter:
    """Cuts lines into entries; remembers hosts, since a torn line runs into the host's name of the next entry."""

    def __init__(self) -> None:
        self._hosts: set[str] = set()

    def entries(self, line: Line) -> Iterator[Entry]:
        """The entries of a line, in order."""
        text, repeats = _without_repeats(_COLOUR.sub("", line.text))
        rank, start = _strip_prefixes(text)
        headers = list(_HEADER.finditer(text, start))
        if not headers:
            yield Entry("", 0, 0, 0, "", "", text[start:], not line.whole, rank, repeats)
            return
        if headers[0].start() > start:
            # Another program's unfinished line (a progress bar), or the end of a torn entry: no entry of its own, but
            # it must be seen if it says that something is connected.
            yield Entry("", 0, 0, 0, "", "", text[start : headers[0].start()], torn=True, rank=None)
        for i, header in enumerate(headers):
            last = i + 1 == len(headers)
            end = len(text) if last else headers[i + 1].start()
            host = self._host(header["host"], trusted=header.start() == start)
            torn = not (last and line.whole)
            hint = rank if header.start() == start else None
            yield _entry(header, host, text[header.end() : end], torn=torn, rank=hint, repeats=repeats)

    def _host(self, name: str, *, trusted: bool) -> str:
        """The host of a header, which in the middle of a line may have the end of a torn word before it."""
        if trusted:
            if len(self._hosts) < MAX_HOSTS:
                self._hosts.add(name)
            return name
        if name in self._hosts:
            return name
        ends = [host for host in self._hosts if name.endswith(host)]
        return max(ends, key=len) if ends else name


def _entry(  # noqa: PLR0913  (the parts of one record)
    header: re.Match[str], host: str, text: str, *, torn: bool, rank: int | None, repeats: int
) -> Entry:
    return Entry(
        host=host,
        pid=int(header["pid"]),
        thread=int(header["thread"]),
        device=int(header["device"]),
        where=header["where"] or "",
        level=header["level"],
        text=text,
        torn=torn,
        rank=rank,
        repeats=repeats,
    )


def _without_repeats(text: str) -> tuple[str, int]:
    """The line without Ray's note on lines that it folded together, and how many there were.

    >>> _without_repeats("NCCL INFO Using network IB [repeated 7x across cluster]")
    ('NCCL INFO Using network IB', 7)
    """
    match = _REPEATED.search(text) if "[repeated " in text else None
    return (text[: match.start()], int(match[1])) if match else (text, 1)


def _strip_prefixes(text: str) -> tuple[int | None, int]:
    """Rank in the job, if a prefix has it, and where the line itself begins.

    >>> _strip_prefixes("[1,3]<stdout>:gpu1:7:9 [3] NCCL INFO")
    (3, 14)
    """
    rank, start = None, 0
    for _ in range(len(_PREFIXES)):
        for _, form in _PREFIXES:
            match = form.match(text, start)
            if match:
                rank = int(match[1]) if form.groups and rank is None else rank
                start = match.end()
                break
        else:
            break
    return rank, start
