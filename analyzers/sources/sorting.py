"""Sorts out what the user named: which files are a recording of what, which of them are read, and what is left out."""

from __future__ import annotations

import glob
import itertools
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppdiag.errors import NotARun, PathNotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ppdiag.analyzers.sources import Source

MOST_FILES = 100_000
LISTED = 4
HEAD_BYTES = 1 << 16
HANGS = ("flight_recorder", "nccl_inspector")
"""Sources that hold no steps: read only where there is nothing else."""
OWN_ANSWER = b'"schema": "ppdiag.'
"""In the JSON of our own reports."""
WHOLE = "run_directory"
"""Its recordings are directories, which are not taken apart."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is read: paths of one recording, by the source of this name, and what is said of the others."""

    name: str
    paths: tuple[Path, ...]
    left_out: tuple[str, ...] = ()


def sort_out(paths: Sequence[Path], sources: Mapping[str, Source]) -> Chosen:
    """Chooses the source that reads the paths.

    A path may be a file, a directory, or a pattern that the shell did not expand. Where a directory (or the list of
    paths) holds files of several kinds, the kind with most files is read, and the rest is named.

    Raises:
        PathNotFound: a path does not exist, or a pattern matches nothing.
        NotARun: no source recognises anything.
    """
    named = [path for given in paths for path in expand(given)]
    for path in named:
        if not os.access(path, os.R_OK):
            raise NotARun(f"{path}: cannot be read (permission denied)")
    if WHOLE in sources and all(sources[WHOLE].recognises(path) for path in named):
        return Chosen(WHOLE, tuple(named))
    kinds, unknown = _kinds(named, sources)
    if len(kinds) == 1 and not unknown:
        name, files = next(iter(kinds.items()))
        return Chosen(name, tuple(named if all(sources[name].recognises(path) for path in named) else files))
    whole = next((name for name, source in sources.items() if all(source.recognises(path) for path in named)), None)
    if not kinds and whole is not None:  # a source whose recordings are directories
        return Chosen(whole, tuple(named))
    if not kinds:
        what = _looked_at(named, sources) or "; ppdiag analyze --help lists the formats"
        raise NotARun(f"{some(paths)}: not a recording that ppdiag can read{what}")
    best = max(kinds, key=lambda name: (name not in HANGS, len(kinds[name])))
    left_out = [f"{_files(kinds[name])} of {sources[name].description}" for name in kinds if name != best]
    left_out += [f"{_files(unknown)} of no kind that is known"] if unknown else []
    said = f"read as {sources[best].description}: {_files(kinds[best])}; left out: {'; '.join(left_out)}"
    return Chosen(best, tuple(kinds[best]), (said,) if left_out else ())


def expand(path: Path) -> list[Path]:
    """The paths that a pattern matches; a path that exists is itself.

    Raises:
        PathNotFound: there is nothing of that name.
        NotARun: it is a pipe or a device, which cannot be read twice, or for ever.
    """
    if path.exists():
        if not (path.is_file() or path.is_dir()):
            raise NotARun(f"{path}: neither a file nor a directory; name a file that the recording was written to")
        return [path]
    if not glob.has_magic(str(path)):
        raise PathNotFound(f"{path}: no such file or directory")
    found = [Path(name) for name in itertools.islice(glob.iglob(str(path), recursive=True), MOST_FILES)]  # noqa: PTH207
    if not found:
        raise PathNotFound(f"{path}: no file matches this pattern")
    return sorted(found)


def _kinds(paths: Sequence[Path], sources: Mapping[str, Source]) -> tuple[dict[str, list[Path]], list[Path]]:
    """Files and runs by the source that reads them, and those that none reads, or nobody may read."""
    kinds: dict[str, list[Path]] = defaultdict(list)
    unknown = []
    for path in leaves(paths, sources):
        readable = os.access(path, os.R_OK)
        kind = next((name for name, source in sources.items() if readable and source.recognises(path)), None)
        if kind is not None:
            kinds[kind].append(path)
        elif not path.name.startswith("."):
            unknown.append(path)
    return kinds, unknown


def leaves(paths: Iterable[Path], sources: Mapping[str, Source]) -> Iterable[Path]:
    """Files, and those of the paths that are runs. Runs in a directory may be of several jobs: so name them."""
    for path in paths:
        if WHOLE in sources and path.is_dir() and not sources[WHOLE].recognises(path):
            inside = sorted(itertools.islice(path.iterdir(), MOST_FILES))
            yield from (file for file in inside if file.is_file())
        else:
            yield path


def _looked_at(paths: Sequence[Path], sources: Mapping[str, Source]) -> str:
    """What kind of thing the path is, where that helps."""
    inside = [entry for path in paths if path.is_dir() for entry in sorted(path.iterdir()) if entry.is_dir()]
    runs = [entry for entry in inside if WHOLE in sources and sources[WHOLE].recognises(entry)]
    if runs:
        return f", but it holds {len(runs)} run{'s' if len(runs) > 1 else ''}: name one of {some(runs)}"
    if all(path.is_dir() and not any(path.iterdir()) for path in paths):
        return ": the directory is empty" if len(paths) == 1 else ": the directories are empty"
    known = (_what_it_is(path, sources) for path in leaves(paths, sources))
    if words := next(filter(None, known), ""):
        return words
    if inside:
        return "; directories in it are not searched, name them"
    return ""


def _what_it_is(path: Path, sources: Mapping[str, Source]) -> str:
    """What a file is that is no recording and yet known."""
    if _begins_with(path, b" NCCL INFO "):
        return "; NCCL's logs are read by ppdiag nccl"
    if _begins_with(path, OWN_ANSWER):
        return ": it is an answer of ppdiag; name the recording that it is of"
    if WHOLE in sources and sources[WHOLE].recognises(path.parent):
        return f": it is a part of a run; name {path.parent}"
    return ""


def _begins_with(path: Path, words: bytes) -> bool:
    """Whether the words are in the first part of a file."""
    with path.open("rb") as stream:
        return words in stream.read(HEAD_BYTES)


def some(paths: Sequence[Path]) -> str:
    """The first few paths, and how many more there are."""
    more = f" and {len(paths) - LISTED} more" if len(paths) > LISTED else ""
    return ", ".join(map(str, paths[:LISTED])) + more


def _files(paths: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in paths[:LISTED])
    return f"{len(paths)} file{'s' if len(paths) > 1 else ''} ({names}{', …' if len(paths) > LISTED else ''})"
