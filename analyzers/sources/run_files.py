"""Which files of a run directory belong to one job, and how they are read: in pieces, never whole."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ppdiag.analyzers.sources import rank_state
from ppdiag.analyzers.validation import whole_or_none
from ppdiag.errors import NotARun
from ppdiag.rundir import PROCESSES_FILE, RUN_FILE, parse_rank_file_name, read_header, read_run_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

MOST_BYTES_OF_WORDS = 64 << 20
"""Bound on a file of lines in words; more is not ours."""
MOST_RAISED = 120
"""Characters of an exception's text that are shown."""
SEARCHED_BYTES = 1 << 20
AT_ONCE_NS = 1_000_000_000
"""Two starts of a rank overlap where the first was alive this long after the second began: a restart waits longer."""


class FileBytes:
    """A file as far as ``bytes`` are needed to decode it: its slices are read when asked for.

    Not a mapping of the file: one that shrinks under a mapping would end the process.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._fd = stream.fileno()
        self._size = os.fstat(self._fd).st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self._size)
        return os.pread(self._fd, max(0, stop - start), start)

    def find(self, sub: bytes, start: int) -> int:
        """Where ``sub`` is first found at or after ``start``; -1 where it is not."""
        while start < self._size:
            found = self[start : start + SEARCHED_BYTES].find(sub)
            if found >= 0:
                return start + found
            start += SEARCHED_BYTES - len(sub) + 1
        return -1


def latest_files(paths: Sequence[Path]) -> tuple[dict[int, Path], list[str]]:
    """The span file of the last start of each rank, and what the user should know of it.

    Raises:
        NotARun: two directories hold the same rank, or jobs that ran at the same time cannot be told apart.
    """
    starts = _starts(paths)
    lives = {rank: [_life(path) for _, path in sorted(found)] for rank, found in starts.items() if len(found) > 1}
    if any(_at_once(own) for own in lives.values()):
        return _of_one_launcher(starts, lives)
    files = {rank: max(found)[1] for rank, found in starts.items()}
    return _of_the_last_start(files, lives) if lives else (files, [])


def _starts(paths: Sequence[Path]) -> dict[int, list[tuple[int, Path]]]:
    """For each rank the number of each of its starts, and its span file."""
    starts: dict[int, list[tuple[int, Path]]] = defaultdict(list)
    for directory in dict.fromkeys(path.resolve() for path in paths):
        for path in sorted(directory.iterdir()):
            name = parse_rank_file_name(path.name)
            if name is None or name.suffix != "spans":
                continue
            starts[name.rank].append((name.start, path))
            if starts[name.rank][0][1].parent != path.parent:
                raise NotARun(
                    f"{starts[name.rank][0][1].parent} and {path.parent} both hold rank {name.rank}: several "
                    "directories are read together where each machine of a job wrote its own; name one job at a time"
                )
    return starts


class _Life(NamedTuple):
    """When one process of a rank lived, in Unix time, and who started it."""

    path: Path
    begin_ns: int
    end_ns: int
    """Its last heartbeat; equal to ``begin_ns`` where it is not known."""
    host: str
    pid: int


def _life(path: Path) -> _Life:
    header = read_header(path)
    begin_ns = whole_or_none(header, "started_unix_ns") or 0
    local_ns = whole_or_none(header, "started_local_ns")
    heartbeat_ns = rank_state.read(path.with_suffix(".state")).heartbeat_ns
    lived_ns = max(0, heartbeat_ns - local_ns) if local_ns is not None and heartbeat_ns else 0
    return _Life(path, begin_ns, begin_ns + lived_ns, str(header.get("host", "")), whole_or_none(header, "pid") or 0)


def _at_once(lives: Sequence[_Life]) -> bool:
    """Whether two processes of one rank lived at the same time on one host: clocks of two may be seconds apart."""
    lives = sorted(lives, key=lambda life: (life.host, life.begin_ns))
    return any(
        earlier.host == later.host and earlier.end_ns > later.begin_ns + AT_ONCE_NS
        for earlier, later in pairwise(lives)
    )


def _of_the_last_start(
    files: Mapping[int, Path], lives: Mapping[int, Sequence[_Life]]
) -> tuple[dict[int, Path], list[str]]:
    """The ranks of the last start of a job that was started several times, and how the one before it ended.

    A rank records once all have joined the job: one that was last seen before the newest process began belongs to an
    earlier start, and in the last one its process ended too soon to record anything.
    """
    last = {rank: _life(path) for rank, path in files.items()}
    began_ns = max(map(_process_began_ns, last.values()))
    kept = {rank: life.path for rank, life in last.items() if life.end_ns + AT_ONCE_NS >= began_ns}
    most = max(map(len, lives.values()))
    warnings = [f"ranks were started up to {most} times in this directory; only the last start is shown"]
    before = [life for rank, life in last.items() if rank not in kept]
    before += [own[-2] for rank, own in lives.items() if rank in kept]
    if ended := _first_that_raised(before):
        warnings.append(f"the start before the last ended when {ended}")
    if lost := [str(rank) for rank in last if rank not in kept]:
        warnings.append(f"in the last start, rank {', '.join(lost)} ended before it had recorded anything")
    return kept, warnings


def _process_began_ns(life: _Life) -> int:
    """When the process of this life began, in Unix time; 0 where it did not say so."""
    try:
        processes, _ = read_lines(life.path.parent / PROCESSES_FILE)
    except OSError:
        return 0
    times = (whole_or_none(process, "unix_ns") or 0 for process in processes if process.get("pid") == life.pid)
    return max((time_ns for time_ns in times if time_ns <= life.begin_ns), default=0)


def _first_that_raised(lives: Sequence[_Life]) -> str:
    """Which rank raised first, and what, in words; empty where none did."""
    raised = [life for life in lives if rank_state.read(life.path.with_suffix(".state")).status == "raised"]
    if not raised:
        return ""
    first = min(raised, key=lambda life: life.end_ns)
    name = parse_rank_file_name(first.path.name)
    try:
        words, _ = read_lines(first.path.with_suffix(".jsonl"))
    except OSError:
        words = []
    what = [str(word.get("value")).partition("\n")[0][:MOST_RAISED] for word in words if word.get("name") == "raised"]
    return f"rank {name.rank if name else ''} raised" + (f" {what[-1]}" if what else "")


def _of_one_launcher(
    starts: Mapping[int, Sequence[tuple[int, Path]]], lives: Mapping[int, Sequence[_Life]]
) -> tuple[dict[int, Path], list[str]]:
    """The ranks that the launcher of the newest process started, where launchers tell the jobs apart.

    Raises:
        NotARun: they do not.
    """
    directory = next(iter(starts.values()))[0][1].parent
    launcher_of = _launchers(directory)
    jobs: dict[int | None, dict[int, _Life]] = defaultdict(dict)
    everyone = [(rank, _life(path)) for rank, found in starts.items() for _, path in found]
    mixed = len({life.host for _, life in everyone}) > 1
    for rank, life in everyone:
        launcher = launcher_of.get(life.pid)
        mixed |= launcher is None or rank in jobs[launcher]
        jobs[launcher][rank] = life
    newest = max(jobs.values(), key=lambda job: max(life.begin_ns for life in job.values()))
    if mixed or set(newest) != set(starts):
        raise NotARun(
            f"{directory}: several jobs wrote into this directory at the same time, and their ranks cannot be told "
            f"apart (rank {next(iter(lives))} ran {len(lives[next(iter(lives))])} times at once); give each job a "
            "directory of its own with -o"
        )
    warning = f"{len(jobs)} jobs wrote into this directory at the same time; only the one begun last is shown"
    return {rank: life.path for rank, life in newest.items()}, [warning]


def _launchers(directory: Path) -> dict[int, int]:
    """Process -> the process that started it, of those that said so."""
    try:
        processes, _ = read_lines(directory / PROCESSES_FILE)
    except OSError:
        return {}
    pairs = ((whole_or_none(process, "pid"), whole_or_none(process, "ppid")) for process in processes)
    return {pid: parent for pid, parent in pairs if pid is not None and parent is not None}


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The JSON objects of a file of lines, and what is wrong with it.

    The last line may be torn where the process was killed: one without its line break is left out in silence.
    """
    with path.open("rb") as stream:
        # A read makes room for all that it may get: no more than is there.
        data = stream.read(min(os.fstat(stream.fileno()).st_size, MOST_BYTES_OF_WORDS + 1))
    whole, _, _ = data.rpartition(b"\n")
    found, damaged = [], 0
    for line in whole.splitlines():
        try:
            word = json.loads(line)
        except (ValueError, RecursionError):
            word = None
        if isinstance(word, dict):
            found.append(word)
        else:
            damaged += 1
    warnings = [f"{path.name}: {damaged} damaged lines were left out"] if damaged else []
    if len(data) > MOST_BYTES_OF_WORDS:
        warnings.append(f"{path.name}: only its first {MOST_BYTES_OF_WORDS >> 20} MiB were read")
    return found, warnings


def damage(directory: Path) -> list[str]:
    """What is wrong with the files of a run that belong to no rank; nothing where they are not there."""
    found = []
    if (directory / RUN_FILE).exists() and not read_run_file(directory):
        found.append(f"{RUN_FILE}: damaged, so that the command and the end of the job are unknown")
    try:
        found += read_lines(directory / PROCESSES_FILE)[1]
    except FileNotFoundError:
        pass
    except OSError as error:
        found.append(f"{PROCESSES_FILE}: cannot be read ({error.strerror})")
    return found
