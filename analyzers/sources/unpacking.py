"""Unpacks recordings that were packed with gzip or zip, where their own source does not read them packed.

What is unpacked lies in a directory of its own until the recording was read. It is bounded, so that a few bytes cannot
fill the disk; names within an archive cannot lead out of it. Messages speak of the files that the user named.
"""

from __future__ import annotations

import tempfile
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from ppdiag.analyzers.sources.kineto.blocks import GZIP_MAGIC, LEAST_INFLATED_BYTES, MOST_INFLATION, Outline, chunks
from ppdiag.analyzers.sources.sorting import expand, leaves
from ppdiag.errors import BadRecord, PpdiagError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ppdiag.analyzers.sources import Source

ZIP_MAGIC = b"PK\x03\x04"
MOST_MEMBERS = 10_000
CHUNK_BYTES = 1 << 20
DEPTH = 2
"""An archive of packed files is unpacked, and no further."""
_FAILURES = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)
"""Of the stdlib's zip: damaged, with a password, of a method that is not built in."""


@dataclass(slots=True)
class Unpacked:
    """What is read instead of what was named.

    Attributes:
        names: of each file or directory that was unpacked, that by which the user knows it.
    """

    paths: tuple[Path, ...]
    warnings: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def words(self, text: str) -> str:
        """A text with the user's names in place of those of the unpacked files."""
        for name in reversed(self.names):
            text = text.replace(name, self.names[name])
        return text


@contextmanager
def unpacked(paths: Sequence[Path], sources: Mapping[str, Source]) -> Iterator[Unpacked]:
    """The paths, those that are packed replaced by what is in them.

    Raises:
        PathNotFound: a path does not exist.
        BadRecord: there is no room to unpack one.
    """
    named = [path for given in paths for path in expand(given)]
    files = list(leaves(named, sources))
    if not any(_how(path, sources) for path in files):
        yield Unpacked(tuple(paths))
        return
    with tempfile.TemporaryDirectory(prefix="ppdiag-unpacked-") as folder:
        found = Unpacked(())
        for turn in range(DEPTH):
            files = [file for path in files for file in _instead(path, sources, Path(folder) / str(turn), found)]
        found.paths = tuple(files)
        try:
            yield found
        except PpdiagError as error:
            raise type(error)(found.words(str(error))) from error


def _how(path: Path, sources: Mapping[str, Source]) -> bytes:
    """The magic of a packed file that no source reads as it is; empty for all others."""
    try:
        with path.open("rb") as stream:
            begin = stream.read(len(ZIP_MAGIC))
    except OSError:
        return b""
    magic = next((magic for magic in (GZIP_MAGIC, ZIP_MAGIC) if begin.startswith(magic)), b"")
    return magic if magic and not any(source.recognises(path) for source in sources.values()) else b""


def _instead(path: Path, sources: Mapping[str, Source], folder: Path, found: Unpacked) -> list[Path]:
    """What is read in place of a path: itself where it is not packed."""
    magic = _how(path, sources)
    if not magic:
        return [path]
    target = folder / str(len(found.names))
    try:
        target.mkdir(parents=True)
        inside = _gunzip(path, target, found) if magic == GZIP_MAGIC else _unzip(path, target, found)
    except OSError as error:
        why = f"cannot be unpacked in {tempfile.gettempdir()} ({error.strerror or error})"
        raise BadRecord(f"{found.words(str(path))}: {why}") from error
    return list(leaves(inside, sources))


def _gunzip(path: Path, target: Path, found: Unpacked) -> list[Path]:
    outline = Outline()
    file = target / (path.stem if path.suffix == ".gz" else path.name)
    found.names[str(file)] = found.words(str(path))
    with file.open("wb") as stream:
        for chunk in chunks(path, outline):
            stream.write(chunk)
    found.warnings += [f"{path.name}: {damage}" for damage in outline.damage]
    return [file]


def _unzip(path: Path, target: Path, found: Unpacked) -> list[Path]:
    """The files at the top of an archive, and its directories of one level (a run is one)."""
    found.names[str(target)] = found.words(str(path))
    room = max(LEAST_INFLATED_BYTES, MOST_INFLATION * path.stat().st_size)
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            if len(members) > MOST_MEMBERS:
                found.warnings.append(f"{path.name}: of its {len(members)} files the first {MOST_MEMBERS} are read")
            for member in members[:MOST_MEMBERS]:
                with archive.open(member) as packed:
                    room -= _copy(packed, _inside(target, member.filename), room)
                if room < 0:
                    found.warnings.append(f"{path.name}: it unpacks to more than {MOST_INFLATION} times its size")
                    break
    except _FAILURES as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        found.warnings.append(f"{path.name}: it is damaged or cannot be unpacked ({error}); read as far as it goes")
    return sorted(target.iterdir())


def _inside(target: Path, name: str) -> Path:
    """Where a member is put: never outside of ``target``."""
    parts = [part for part in PurePosixPath(name.replace("\\", "/")).parts if part not in ("/", "..", ".")]
    file = target.joinpath(*(part.replace("\0", "_")[:200] for part in parts or ["unnamed"]))
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _copy(packed: IO[bytes], file: Path, room: int) -> int:
    """Writes a member as far as there is room; returns its bytes, more than ``room`` where there was not enough."""
    written = 0
    with file.open("wb") as stream:
        while written <= room and (chunk := packed.read(CHUNK_BYTES)):
            written += len(chunk)
            stream.write(chunk)
    return written
