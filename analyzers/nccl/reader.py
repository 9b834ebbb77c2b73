"""Reads log files and directories of them, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.nccl.lines import read_lines
from ppdiag.analyzers.nccl.parser import Parser
from ppdiag.errors import BadRecord, NotARun, PathNotFound
from ppdiag.rundir import read_header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ppdiag.analyzers.nccl.model import NcclReport

OWN_LOGS = "nccl-*.log"
"""Names of the logs that ``ppdiag run`` lets NCCL write into the run directory."""
MAX_FILES = 20_000
_SUFFIXES = {".log", ".txt", ".out", ".err", ".nccl", ""}


def read_logs(
    paths: Sequence[Path], *, ranks: Mapping[tuple[str, int], int] | None = None, world_size: int | None = None
) -> NcclReport:
    """What the logs say, all of them taken as one job.

    Args:
        paths: files, or directories: of these the files ``nccl-*.log``, or where there are none all that may be logs.
        ranks: rank in the job of each (host, process id); by default what the run directories among ``paths`` say.
        world_size: of the job, likewise.

    Raises:
        PathNotFound: a path does not exist.
        BadRecord: a file cannot be read.
        NotARun: there is no line of NCCL in them.
    """
    parser = Parser()
    for path in paths:
        if not path.exists():
            raise PathNotFound(f"{path}: no such file or directory")
        for file in log_files(path):
            _read(file, parser)
    if ranks is None:
        ranks, world_size = recorded_ranks(paths)
    report = parser.report(ranks, world_size)
    if not report.counts.nccl_lines and not report.watchdog:
        names = ", ".join(map(str, paths))
        raise NotARun(f"{names}: no line of NCCL in it; run the job with NCCL_DEBUG=INFO and name that log")
    return report


def log_files(path: Path) -> list[Path]:
    """The files that a path stands for, in the order of their names."""
    if not path.is_dir():
        return [path]
    return own_logs(path) or sorted(file for file in path.rglob("*") if _may_be_a_log(file))[:MAX_FILES]


def own_logs(directory: Path) -> list[Path]:
    """The logs that NCCL wrote into a run directory."""
    return sorted(file for file in directory.glob(OWN_LOGS) if file.is_file())[:MAX_FILES]


def recorded_ranks(paths: Sequence[Path]) -> tuple[dict[tuple[str, int], int] | None, int | None]:
    """Rank of each (host, process id), and the number of ranks, as the run directories among the paths have them.

    Returns:
        ``(None, None)`` where no path is a run directory with a readable record.
    """
    ranks: dict[tuple[str, int], int] = {}
    sizes = []
    for file in (file for path in paths if path.is_dir() for file in path.glob("rank*.spans")):
        header = read_header(file)
        host, pid, rank, size = (header.get(name) for name in ("host", "pid", "rank", "world_size"))
        if isinstance(host, str) and isinstance(pid, int) and isinstance(rank, int):
            ranks[host, pid] = rank
            sizes += [size] if isinstance(size, int) else []
    return (ranks, max(sizes, default=None)) if ranks else (None, None)


def _may_be_a_log(path: Path) -> bool:
    """By its name: ``NCCL_DEBUG_FILE=nccl.%h.%p`` ends in a number."""
    suffix = path.suffix
    return path.is_file() and (suffix in _SUFFIXES or suffix[1:].isdigit())


def _read(path: Path, parser: Parser) -> None:
    parser.source(str(path))
    try:
        with path.open("rb") as stream:
            for line in read_lines(stream):
                parser.feed(line)
    except OSError as error:
        raise BadRecord(f"{path}: cannot be read: {error.strerror or error}") from error
