"""Turns the entries of logs into a report: each rule of the table has one method here."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING

from ppdiag.analyzers.nccl.bounded import Bounded
from ppdiag.analyzers.nccl.complaints import Complaints, by_severity
from ppdiag.analyzers.nccl.fallback import find_fallback
from ppdiag.analyzers.nccl.findings import find_more
from ppdiag.analyzers.nccl.lines import Line, Splitter
from ppdiag.analyzers.nccl.model import Counts, NcclReport
from ppdiag.analyzers.nccl.ranks import Known, resolve
from ppdiag.analyzers.nccl.rules import LOOKS_LIKE_A_CONNECTION, NAMES_A_TRANSPORT, RULES
from ppdiag.analyzers.nccl.surroundings import Surroundings
from ppdiag.analyzers.nccl.watchdog import Watchdog, is_watchdog
from ppdiag.analyzers.nccl.wiring import MAX_RECORDS, Wiring

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ppdiag.analyzers.nccl.lines import Entry

    Handler = Callable[[Entry, re.Match[str]], None]

_RELEVANT = re.compile(r"CCL|nccl|via (?:NET|P2P|SHM|COLLNET)/")
"""Most lines of a training log are not NCCL's."""


class Parser:
    """Takes lines, in order, of any number of files; :meth:`report` gives what they say."""

    def __init__(self) -> None:
        self._splitter = Splitter()
        self._watchdog = Watchdog()
        self._complaints = Complaints()
        self._wiring = Wiring(self._complaints)
        self._found = Surroundings()
        self._hints: Bounded[tuple[str, int], int] = Bounded(MAX_RECORDS)
        self._sources: list[str] = []
        self._handlers = {rule.field: self._handler(rule.field) for rule in RULES}
        self._lines = self._nccl_lines = self._torn = self._unknown = self._overlong = 0

    def source(self, name: str) -> None:
        """What is read from now on."""
        self._sources.append(name)
        self._splitter = Splitter()

    def feed(self, line: Line) -> None:
        """Take one line."""
        self._lines += 1
        self._overlong += line.overlong
        if not _RELEVANT.search(line.text):
            return
        for entry in self._splitter.entries(line):
            if entry.host:
                self._entry(entry)
            else:
                self._without_header(entry)

    def report(self, ranks: Mapping[tuple[str, int], int] | None = None, world_size: int | None = None) -> NcclReport:
        """What all lines say.

        Args:
            ranks: rank in the job of each (host, process), where a record of the job has it.
            world_size: of the job, likewise.
        """
        found, communicators = self._found, self._wiring.communicators
        connections = resolve(self._wiring.connections, communicators, Known(self._hints, ranks, world_size))
        hcas = tuple(found.hcas.values())
        return NcclReport(
            sources=tuple(self._sources),
            versions=tuple(found.versions),
            networks_loaded=tuple(found.networks),
            providers=tuple(found.providers),
            environment=tuple(sorted(found.environment)),
            hcas=hcas,
            interfaces=tuple(found.interfaces),
            plugins=tuple(found.plugins),
            gdr=tuple(found.gdr),
            communicators=communicators,
            connections=connections,
            messages=by_severity(
                (*self._complaints.messages(), *find_more(connections, hcas, tuple(found.interfaces)))
            ),
            watchdog=self._watchdog.reports(),
            fallback=find_fallback(connections, hcas, tuple(found.reasons)),
            counts=self._counts(),
        )

    def _counts(self) -> Counts:
        return Counts(
            lines=self._lines,
            nccl_lines=self._nccl_lines,
            torn=self._torn,
            unknown_connections=self._unknown,
            overlong=self._overlong,
            dropped=self._wiring.dropped + self._found.dropped,
        )

    def _without_header(self, entry: Entry) -> None:
        text = entry.text
        if is_watchdog(text):
            self._watchdog.feed(text, entry.rank)
        elif NAMES_A_TRANSPORT.search(text):
            self._torn += 1
            self._unknown += 1
        elif not entry.torn and text.startswith(("NCCL version ", "RCCL version ")):
            self._nccl_lines += 1
            self._apply(entry)
        else:
            self._complaints.exception(text)

    def _entry(self, entry: Entry) -> None:
        self._nccl_lines += 1
        if entry.rank is not None:
            self._hints.keep((entry.host, entry.pid), entry.rank)
        if entry.torn:
            self._torn += 1
            self._unknown += bool(LOOKS_LIKE_A_CONNECTION.search(entry.text))
        if entry.level == "WARN":
            self._complaints.warning(entry)
        elif not entry.torn and not self._apply(entry):
            if LOOKS_LIKE_A_CONNECTION.search(entry.text):
                self._unknown += 1
            self._complaints.info(entry)

    def _apply(self, entry: Entry) -> bool:
        """Let the first rule that matches take the entry."""
        for rule in RULES:
            if rule.starts and not entry.text.startswith(rule.starts):
                continue
            match = rule.pattern.match(entry.text)
            if match:
                self._handlers[rule.field](entry, match)
                return True
        return False

    def _handler(self, field: str) -> Handler:
        """The method that takes a rule's matches; a rule without one is a mistake in the table."""
        owners = (self, self._wiring, self._found)
        handler: Handler = next(getattr(owner, f"on_{field}") for owner in owners if hasattr(owner, f"on_{field}"))
        return handler

    def on_trace(self, entry: Entry, match: re.Match[str]) -> None:
        """An error return on its way up."""
        self._complaints.trace(entry, PurePath(match["file"]).name, int(match["code"]))
