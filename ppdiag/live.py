"""Speaks with the ranks of a running job, through files in its run directory: the side of the command line.

The other side is ``ppdiag.hooks.control``. A window of steps is agreed on in two rounds: every rank says in which step
it is; then a step is named that none of them has reached.
"""

from __future__ import annotations

import cmath
import contextlib
import json
import math
import os
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ppdiag.errors import NoAnswer, NotARun, PathNotFound
from ppdiag.rundir import (
    ATTACHED_MODE,
    CONTROL_FILE,
    RUN_FILE,
    RankFile,
    parse_rank_file_name,
    read_header,
    read_run_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PERIOD_S = 0.1
AHEAD_S = 2.0
"""How far ahead the first step lies: time for the command to be seen on all hosts of a network file system."""
AHEAD_STEPS = 2
"""And at least so many steps."""
MOST_APART = 0.4
"""Of a step, between its ends on the first rank and on the last. From a half on, one may be of the next step."""


@dataclass(slots=True)
class Rank:
    """The words of one rank, read as they come."""

    name: RankFile
    path: Path
    offset: int = 0
    mode: str = ""
    answers: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> None:
        """Take in the lines that are new and whole."""
        with contextlib.suppress(OSError), self.path.open("rb") as stream:
            stream.seek(self.offset)
            lines, _, _ = stream.read().rpartition(b"\n")
            self.offset += len(lines) + 1 if lines else 0
            for line in lines.splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    self._take(json.loads(line))

    def _take(self, word: dict[str, Any]) -> None:
        if word["type"] == "control":
            self.answers.append(word)
        elif word["type"] == "fact" and word["name"] == "mode":
            self.mode = str(word["value"])


class Job:
    """A running job, seen through its run directory.

    Args:
        path: the run directory.
        patience_s: longest time to wait for anything.
        tell: told what is being waited for.

    Raises:
        PathNotFound, NotARun: there is no run there.
        NoAnswer: the job has ended, or it records by itself.
    """

    def __init__(self, path: Path, *, patience_s: float, tell: Callable[[str], None]) -> None:
        if not path.is_dir():
            raise PathNotFound(f"{path}: no such directory")
        self.path = path
        self._patience_s = patience_s
        self._tell = tell
        self._ranks: dict[int, Rank] = {}
        self._look()
        if not self._ranks and not (path / RUN_FILE).exists():
            raise NotARun(f"{path} is not the run directory of a job")
        if _has_ended(path):
            raise NoAnswer(f"the job in {path} has ended; ppdiag analyze {path} shows what was recorded")

    def record(self, steps: int) -> tuple[int, int]:
        """Have this many steps recorded; returns when they have been.

        Returns:
            The first step, and how many ranks began late (their first steps are incomplete).
        """
        command = secrets.token_hex(8)
        try:
            self._write(command, steps, start=-1, ahead={})
            asked = self._wait_for(command, "say in which step they are", lambda word: word.get("start") == -1)
            ahead = self._ahead(asked)
            answers = [{**word, "step": word["step"] - ahead.get(rank, 0)} for rank, word in asked.items()]
            start = first_step(answers, time.time_ns())
            self._write(command, steps, start=start, ahead=ahead)
            self._tell(f"steps {start} to {start + steps - 1} will be recorded")
            begun = self._wait_for(command, "begin", lambda word: word.get("awake") is True)
            self._wait_for(command, "finish", lambda word: word.get("awake") is False)
        finally:
            (self.path / CONTROL_FILE).unlink(missing_ok=True)
        return start, sum(word["step"] > start for word in begun.values())

    def _ahead(self, asked: dict[int, dict[str, Any]]) -> dict[int, int]:
        """How far each rank counts ahead, where they were armed while the job ran.

        Raises:
            NoAnswer: it cannot be told.
        """
        if not any(rank.mode == ATTACHED_MODE for rank in self._ranks.values()):
            return {}
        ahead = steps_ahead(asked)
        if ahead is None:
            raise NoAnswer(
                f"the ranks in {self.path} were attached to in different steps, and their steps end too far apart to "
                "tell which are the same; start the job with ppdiag run --dormant"
            )
        return ahead

    def _write(self, command: str, steps: int, *, start: int, ahead: dict[int, int]) -> None:
        scratch = self.path / f".{CONTROL_FILE}.{os.getpid()}"
        scratch.unlink(missing_ok=True)
        with os.fdopen(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump({"id": command, "steps": steps, "start": start, "ahead": ahead}, file)
        scratch.replace(self.path / CONTROL_FILE)

    def _look(self) -> None:
        """Find the files of the last start of each rank."""
        for path in self.path.iterdir():
            name = parse_rank_file_name(path.name)
            if name is not None and name.suffix == "jsonl":
                known = self._ranks.get(name.rank)
                if known is None or known.name.start < name.start:
                    self._ranks[name.rank] = Rank(name, path)
        for rank in self._ranks.values():
            rank.read()

    def _wait_for(
        self, command: str, what: str, is_meant: Callable[[dict[str, Any]], bool]
    ) -> dict[int, dict[str, Any]]:
        """One word of this kind from every rank, by rank.

        Raises:
            NoAnswer: some rank has not spoken in time.
        """
        deadline, told = time.monotonic() + self._patience_s, ""
        while True:
            self._look()
            self._check()
            words = {rank: next(_meant(known, command, is_meant), None) for rank, known in self._ranks.items()}
            silent = sorted(set(range(self._world_size())) - {rank for rank, word in words.items() if word is not None})
            if self._ranks and not silent:
                return {rank: word for rank, word in words.items() if word is not None}
            if time.monotonic() > deadline and not self._ranks:
                raise NoAnswer(
                    f"after {self._patience_s:.0f} s, no rank has reported in {self.path}: does the job run, and was "
                    "it started with ppdiag run --dormant, or with the variables of ppdiag env --dormant?"
                )
            if time.monotonic() > deadline:
                raise NoAnswer(
                    f"after {self._patience_s:.0f} s, {len(silent)} ranks ({_few(silent)}) did not {what}; a "
                    "rank answers when its optimizer has stepped (--patience waits longer)"
                )
            whom = f"rank {_few(silent)}" if self._ranks else "a first rank"
            if told != (now := f"waiting for {whom} to {what}"):
                told = now
                self._tell(told)
            time.sleep(PERIOD_S)

    def _check(self) -> None:
        if _has_ended(self.path):
            raise NoAnswer(f"the job in {self.path} has ended in the meantime")
        modes = {rank.mode for rank in self._ranks.values()}
        if modes and not modes & {"dormant", ATTACHED_MODE} and any(rank.offset for rank in self._ranks.values()):
            raise NoAnswer(f"the job in {self.path} was not started with --dormant: it records by itself")

    def _world_size(self) -> int:
        for rank in self._ranks.values():
            size = read_header(rank.path.with_suffix(".spans")).get("world_size")
            if isinstance(size, int):
                return size
        return len(self._ranks)


def first_step(answers: list[dict[str, Any]], now_unix_ns: int) -> int:
    """A step that no rank has reached, and will not before it has seen the command.

    Each answer tells the step that has ended (``step``), when (``unix_ns``), and how long it took (``step_ns``).

    >>> first_step([{"step": 7, "step_ns": 500_000_000, "unix_ns": 0}], now_unix_ns=1_000_000_000)
    16
    """
    steps: list[int] = []
    for answer in answers:
        step_s = max(answer["step_ns"] / 1e9, 1e-3)
        passed_s = max(0.0, (now_unix_ns - answer["unix_ns"]) / 1e9)
        steps.append(int(answer["step"]) + 1 + AHEAD_STEPS + math.ceil((passed_s + AHEAD_S) / step_s))
    return max(steps)


def steps_ahead(asked: dict[int, dict[str, Any]]) -> dict[int, int] | None:
    """By how many steps each rank counts ahead of the one that counts least; None where it cannot be told.

    Ranks work on the same step at about the same time. So what a rank's answer leaves of the time of day once its own
    steps are taken off differs between ranks by whole steps, and by the part of a step by which one ends before the
    other: around the middle of these parts (on a circle, since they are parts of a step) the whole steps are counted.

    >>> steps_ahead({0: {"step": 7, "step_ns": 100, "unix_ns": 1000}, 1: {"step": 3, "step_ns": 100, "unix_ns": 1010}})
    {0: 4, 1: 0}
    """
    step_ns = sorted(word["step_ns"] for word in asked.values())[len(asked) // 2]
    first_ns = min(word["unix_ns"] for word in asked.values())
    begun = {rank: (word["unix_ns"] - first_ns) / step_ns - word["step"] for rank, word in asked.items()}
    around = sum(cmath.exp(2j * math.pi * at) for at in begun.values())
    middle = cmath.phase(around) / (2 * math.pi)
    whole = {rank: -round(at - middle) for rank, at in begun.items()}
    parts = [at - middle + whole[rank] for rank, at in begun.items()]
    if max(parts) - min(parts) > MOST_APART:
        return None
    return {rank: count - min(whole.values()) for rank, count in whole.items()}


def _meant(rank: Rank, command: str, is_meant: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
    return (word for word in rank.answers if word.get("id") == command and is_meant(word))


def _has_ended(path: Path) -> bool:
    return "ended_unix_ns" in read_run_file(path)


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
