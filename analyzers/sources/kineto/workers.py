"""Reads the files of a job, several at a time in processes of their own where that pays."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ppdiag.analyzers.sources.kineto.rank import RankRecord, read_file
from ppdiag.errors import BadRecord, PpdiagError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.analyzers.sources import Progress

    _Result = tuple[list[RankRecord], list[PpdiagError]]
    """What a file holds, or why it could not be read."""

WORTH_BYTES = 32 << 20
"""Of all files together, as they lie on disk: below it the processes cost more than they save."""


def read_ranks(files: Sequence[Path], progress: Progress | None) -> tuple[list[RankRecord], list[PpdiagError]]:
    """The records of all files in their order, and why some could not be read."""
    workers = min(_processors(), len(files))
    if workers < 2 or sum(path.stat().st_size for path in files) < WORTH_BYTES:
        return _read(files, progress)
    return _read_in_processes(files, workers, progress)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read(files: Sequence[Path], progress: Progress | None) -> tuple[list[RankRecord], list[PpdiagError]]:
    records: list[RankRecord] = []
    failures: list[PpdiagError] = []
    for done, path in enumerate(files):
        if progress is not None:
            progress("reading files", done, len(files))
        try:
            records += read_file(path)
        except PpdiagError as error:
            failures.append(error)
        except OSError as error:
            failures.append(BadRecord(f"{path}: cannot be read ({error.strerror or error})"))
    return records, failures


def _read_in_processes(
    files: Sequence[Path], workers: int, progress: Progress | None
) -> tuple[list[RankRecord], list[PpdiagError]]:
    """Each process reads a share of the files, the largest dealt out first.

    They are started anew and not forked, since the caller may have threads, and not through multiprocessing, which
    would run the caller's main script again.
    """
    order = sorted(range(len(files)), key=lambda n: -files[n].stat().st_size)
    found: dict[int, list[RankRecord]] = {}
    failures: list[PpdiagError] = []
    with tempfile.TemporaryDirectory(prefix="ppdiag-") as folder:
        started = []
        try:
            for worker in range(workers):
                share = order[worker::workers]
                output = Path(folder) / str(worker)
                command = [sys.executable, "-m", __name__, str(output), *(str(files[n]) for n in share)]
                started.append((subprocess.Popen(command, env=_environment()), output, share))  # noqa: S603
            for done, (process, output, share) in enumerate(started):
                if progress is not None:
                    progress("reading files", done, workers)
                results = _results(process, output, [files[n] for n in share])
                for n, (records, failed) in zip(share, results, strict=True):
                    found[n] = records
                    failures += failed
        finally:
            for process, _, _ in started:
                process.kill()
                process.wait()
    return [record for n in sorted(found) for record in found[n]], failures


def _results(process: subprocess.Popen[bytes], output: Path, files: Sequence[Path]) -> list[_Result]:
    """What a process found in its files, in their order."""
    code = process.wait()
    if code or not output.is_file():
        return [([], [BadRecord(f"{path}: its reader ended with code {code}")]) for path in files]
    results: list[_Result] = pickle.loads(output.read_bytes())  # noqa: S301  (written by us)
    return results


def _environment() -> dict[str, str]:
    """The caller's, in which the process finds the same packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def main(output: str, files: Sequence[str]) -> None:
    """Reads files and leaves what was found in the file ``output``."""
    results = [_read([Path(path)], None) for path in files]
    Path(output).write_bytes(pickle.dumps(results, protocol=5))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
