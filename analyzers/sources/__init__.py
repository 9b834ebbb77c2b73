"""Readers of recordings, one file a format: each gives a :class:`~ppdiag.trace.Trace` or says what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ppdiag.errors import NotARun, PathNotFound
from ppdiag.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ppdiag.trace import Trace

    Progress = Callable[[str, int, int], None]
    """Told what is being done, how much of it is done, and how much there is."""

SOURCES = Registry(
    "ppdiag.sources",
    {
        "run_directory": "ppdiag.analyzers.sources.run_directory:RunDirectory",
        "megascan": "ppdiag.analyzers.sources.megascan:MegaScan",
        "straggler_analysis": "ppdiag.analyzers.sources.straggler_analysis:StragglerAnalysis",
        "nsight_systems": "ppdiag.analyzers.sources.nsight_systems:NsightSystems",
    },
)


class Source(Protocol):
    """A format that can be read."""

    description: str
    """What it reads, in the words of an error message."""

    def recognises(self, path: Path) -> bool:
        """Whether the path looks like this format; looks at names and first bytes only."""
        ...

    def read(self, paths: Sequence[Path], progress: Progress | None) -> Trace:
        """The trace of all paths together."""
        ...


def read_trace(paths: Sequence[Path], progress: Progress | None = None) -> Trace:
    """Reads one recording, of whichever known format.

    Args:
        paths: what the user named: files or directories that belong to one job.
        progress: told about long work.

    Raises:
        PathNotFound: a path does not exist.
        NotARun: no source recognises the paths, or they are of different formats.
    """
    for path in paths:
        if not path.exists():
            raise PathNotFound(f"{path}: no such file or directory")
    sources: list[Source] = [SOURCES.load(name)() for name in SOURCES.names()]
    for source in sources:
        if all(source.recognises(path) for path in paths):
            return source.read(paths, progress)
    known = "; ".join(source.description for source in sources)
    raise NotARun(f"{', '.join(map(str, paths))}: not a recording that ppdiag can read (it reads {known})")
