"""Readers of recordings, one file a format: each gives a :class:`~ppdiag.trace.Trace` or says what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ppdiag.analyzers.sources.sorting import Chosen, some, sort_out
from ppdiag.analyzers.sources.unpacking import unpacked
from ppdiag.errors import CannotRead, NoPipelineFound, PpdiagError
from ppdiag.registry import Registry
from ppdiag.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ppdiag.analyzers.sources.flight_recorder import Dumps

    Progress = Callable[[str, int, int], None]
    """Told what is being done, how much of it is done, and how much there is."""

SOURCES = Registry(
    "ppdiag.sources",
    {
        "run_directory": "ppdiag.analyzers.sources.run_directory:RunDirectory",
        "exported": "ppdiag.analyzers.sources.exported:Exported",
        "megascan": "ppdiag.analyzers.sources.megascan:MegaScan",
        "straggler_analysis": "ppdiag.analyzers.sources.straggler_analysis:StragglerAnalysis",
        "ndtimeline": "ppdiag.analyzers.sources.ndtimeline:NdTimeline",
        "kineto": "ppdiag.analyzers.sources.kineto.source:Kineto",
        "nsight_systems": "ppdiag.analyzers.sources.nsight_systems:NsightSystems",
        "nccl_inspector": "ppdiag.analyzers.sources.nccl_inspector:NcclInspector",
        "flight_recorder": "ppdiag.analyzers.sources.flight_recorder:FlightRecorder",
    },
)


class Source(Protocol):
    """A format that can be read."""

    description: str
    """What it reads, in the words of an error message."""

    def recognises(self, path: Path) -> bool:
        """Whether the path looks like this format; looks at names and first bytes only."""
        ...

    def read(self, paths: Sequence[Path], progress: Progress | None) -> Trace | Dumps:
        """The trace of all paths together; dumps where the format holds no times."""
        ...


def read_recording(paths: Sequence[Path], progress: Progress | None = None, ranks: Sequence[int] = ()) -> Trace | Dumps:
    """Reads one recording, of whichever known format.

    Args:
        paths: what the user named: files, directories or patterns that belong to one job.
        progress: told about long work.
        ranks: of the files that do not say theirs, in their order; for formats in which that occurs (their sources have
            an attribute of this name).

    Returns:
        A trace; dumps where the recording holds no times.

    Raises:
        PathNotFound: a path does not exist.
        NotARun: no source recognises the paths.
        CannotRead: the system does not let a file be read to its end.
    """
    sources: dict[str, Source] = {name: SOURCES.load(name)() for name in SOURCES.names()}
    for source in sources.values():
        if ranks and hasattr(source, "ranks"):
            source.ranks = tuple(ranks)
    try:
        with unpacked(paths, sources) as found:
            chosen = sort_out(found.paths, sources)
            recording = _read(sources[chosen.name], chosen, progress)
    except OSError as error:
        if error.filename is None:  # of a stream: nothing else says what was read
            raise CannotRead(f"{some(paths)}: {error.strerror or error}") from error
        raise
    if found.names or chosen.left_out:
        return _named(recording, paths, [found.words(said) for said in (*chosen.left_out, *found.warnings)])
    return recording


def _read(source: Source, chosen: Chosen, progress: Progress | None) -> Trace | Dumps:
    """What a source makes of its files; an error says what else was there."""
    try:
        return source.read(chosen.paths, progress)
    except PpdiagError as error:
        if not chosen.left_out:
            raise
        raise type(error)("; ".join((str(error), *chosen.left_out))) from error


def _named(recording: Trace | Dumps, paths: Sequence[Path], warnings: list[str]) -> Trace | Dumps:
    """The recording under the names that the user gave, with what is to be said of them."""
    said = (*warnings, *recording.warnings)
    if isinstance(recording, Trace):
        return replace(recording, warnings=said, job=replace(recording.job, source=some(paths)))
    return replace(recording, warnings=said, source=some(paths))


def read_trace(paths: Sequence[Path], progress: Progress | None = None) -> Trace:
    """Reads one recording that holds times.

    Raises:
        NoPipelineFound: it holds dumps of a hang, and no times.
        PathNotFound, NotARun: as :func:`read_recording`.
    """
    recording = read_recording(paths, progress)
    if not isinstance(recording, Trace):
        raise NoPipelineFound(
            f"{recording.source}: these dumps say who waits for whom, and hold no times; ppdiag analyze says it"
        )
    return recording
