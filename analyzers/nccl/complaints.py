"""NCCL's complaints, each once, and which of them mean nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ppdiag.analyzers.nccl.known_messages import (
    COMPLAINT_INFO,
    HARMLESS_INFO,
    RESULT_ADVICE,
    RESULTS,
    Known,
    classify,
)
from ppdiag.analyzers.nccl.model import Message, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ppdiag.analyzers.nccl.lines import Entry

MAX_MESSAGES = 5_000
"""Different ones; a job that has more says the same thing with other numbers."""
MAX_PROCESSES = 100_000
MAX_HOSTS_NAMED = 64

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_ADDRESS_IN_USE = re.compile(r"[Aa]ddress already in use|Call to bind failed")
_EXCEPTION = re.compile(
    r"nccl(?:UnhandledCuda|System|Internal|Remote)Error\b|nccl(?:InvalidUsage|InvalidArgument)\b(?=:)"
)


@dataclass(slots=True)
class _Gathered:
    """A message while it is counted."""

    message: Message
    hosts: dict[str, None] = field(default_factory=dict)


class Complaints:
    """Gathers warnings, complaining INFO lines and traces of error returns."""

    def __init__(self) -> None:
        self._gathered: dict[str, _Gathered] = {}
        self._last_warning: dict[tuple[str, int], str] = {}
        self._warned: set[tuple[str, int]] = set()
        self._ending: set[tuple[str, int]] = set()
        self._returns: dict[tuple[str, int], list[tuple[Entry, str, int]]] = {}

    def warning(self, entry: Entry) -> None:
        """A WARN."""
        if not entry.text.strip():
            return
        known = classify(entry.text) or _OTHER
        key = self._add(entry, known.slug, known.severity, known.advice)
        process = (entry.host, entry.pid)
        if len(self._warned) < MAX_PROCESSES:
            self._last_warning[process] = key
            if known.severity is not Severity.HARMLESS:
                self._warned.add(process)

    def info(self, entry: Entry) -> None:
        """An INFO line that is no fact; kept where it complains."""
        if entry.text.startswith(("RAS failed to establish", "Continuing in spite of a RAS")):
            self._forgive_bind(entry)
        if not COMPLAINT_INFO.search(entry.text):
            return
        harmless = HARMLESS_INFO.search(entry.text) is not None
        self._add(entry, "info", Severity.HARMLESS if harmless else Severity.NOTE, "")

    def exception(self, text: str) -> None:
        """A line of Python's: torch names NCCL's error in its exception."""
        match = _EXCEPTION.search(text)
        if match is None:
            return
        code = next((code for code, name in RESULTS.items() if name == match[0]), 2)
        self._count(_line("exception", Severity.ERROR, text[:500], RESULT_ADVICE[code]), "exception " + match[0], "")

    def teardown(self, entry: Entry) -> None:
        """A communicator of this process is being taken down."""
        if len(self._ending) < MAX_PROCESSES:
            self._ending.add((entry.host, entry.pid))

    def trace(self, entry: Entry, file: str, code: int) -> None:
        """``file.cc:line -> code``: an error return on its way up. Judged at the end, when the warnings are known."""
        if code not in RESULTS:
            return
        process = (entry.host, entry.pid)
        ending = process in self._ending
        if file == "socket.cc" and code == 3 and ending:  # sockets are cut off at teardown
            self._add(entry, "teardown", Severity.HARMLESS, "")
            return
        found = self._returns.setdefault(process, []) if len(self._returns) < MAX_PROCESSES else []
        if len(found) < MAX_HOSTS_NAMED:
            found.append((entry, file, code))

    def messages(self) -> tuple[Message, ...]:
        """All of them, in the order of their first appearance."""
        self._judge_returns()
        return tuple(
            replace(gathered.message, hosts=tuple(list(gathered.hosts)[:MAX_HOSTS_NAMED]))
            for gathered in self._gathered.values()
        )

    def _judge_returns(self) -> None:
        for process, found in self._returns.items():
            for entry, file, code in found:
                # Some versions return 2 from net_ib.cc while they only look for devices; a real failure warns first.
                alone = process not in self._warned
                quiet = alone and file in {"net_ib.cc", "socket.cc"}
                severity = Severity.HARMLESS if quiet else Severity.NOTE
                advice = "" if quiet else RESULT_ADVICE.get(code, "")
                self._add(entry, f"returned-{RESULTS[code]}", severity, advice)
        self._returns = {}

    def _forgive_bind(self, entry: Entry) -> None:
        """A bind that failed for RAS, NCCL's status service: another job's has the port, and nothing is lost."""
        key = self._last_warning.get((entry.host, entry.pid), "")
        gathered = self._gathered.get(key)
        if gathered is not None and _ADDRESS_IN_USE.search(gathered.message.text):
            gathered.message = replace(gathered.message, slug="ras-bind", severity=Severity.HARMLESS, advice="")
            self._warned.discard((entry.host, entry.pid))

    def _add(self, entry: Entry, slug: str, severity: Severity, advice: str) -> str:
        text = entry.text.strip()[:1000]
        key = f"{slug} {entry.where} {_NUMBERS.sub('#', text)}"
        message = replace(_line(slug, severity, text, advice), where=entry.where)
        self._count(message, key, entry.host, entry.repeats)
        return key

    def _count(self, message: Message, key: str, host: str, times: int = 1) -> None:
        gathered = self._gathered.get(key)
        if gathered is None:
            if len(self._gathered) >= MAX_MESSAGES:
                return
            gathered = self._gathered[key] = _Gathered(message)
        gathered.message = replace(gathered.message, count=gathered.message.count + times)
        if host and len(gathered.hosts) < MAX_HOSTS_NAMED:
            gathered.hosts[host] = None


_OTHER = Known("other", Severity.WARNING, re.compile(""), "", ("", ""), "")


def _line(slug: str, severity: Severity, text: str, advice: str) -> Message:
    return Message(slug=slug, severity=severity, text=text, where="", advice=advice, count=0, hosts=())


def by_severity(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The worst first; the order stays among equals."""
    order = list(Severity)
    return tuple(sorted(messages, key=lambda message: order.index(message.severity)))
