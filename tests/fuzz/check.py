"""Reads one bad recording and says what went wrong: anything but an answer, or an error of ours in one line."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import traceback
from typing import TYPE_CHECKING, Any

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.hang import diagnose_hang
from ppdiag.analyzers.sources import SOURCES, read_recording
from ppdiag.errors import PpdiagError
from ppdiag.trace import Trace
from tests.fuzz.mutate import bad_recording

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fuzz.seeds import Files

DIAGNOSED = 20
"""One in so many of what can be read is diagnosed too: that takes a hundred times as long."""
MOST_MEMORY_BYTES = 1 << 30
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "ctypes.dlopen")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Watch:
    """Watches what the process does through Python's audit events; they cannot be taken off again."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._event)

    def _event(self, name: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if name in FORBIDDEN:
            self.seen.append(f"{name} {args[:1]!r:.200}")
        elif name == "open" and isinstance(args[2], int) and args[2] & _WRITES:
            path = os.fspath(args[0]) if isinstance(args[0], (str, bytes, os.PathLike)) else ""
            if not str(path).startswith((self.folder, "/dev/null")) and "__pycache__" not in str(path):
                self.seen.append(f"writes {path!r}")


def write(folder: Path, files: Files) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def trouble(source: str, n: int, folder: Path, watch: Watch) -> str:
    """Empty where all is well. Time and memory are the caller's to watch."""
    write(folder, bad_recording(source, n))
    scratch = folder.with_name(f"{folder.name}-unpacked")
    scratch.mkdir(exist_ok=True)
    tempfile.tempdir = str(scratch)
    watch.seen.clear()
    watch.folder = str(folder)
    try:
        _read(source, folder, n)
    except PpdiagError as error:
        if "\n" in str(error):
            watch.seen.append(f"an error of several lines: {error!r:.300}")
    except BaseException:
        watch.seen.append(traceback.format_exc(limit=-6))
    finally:
        watch.folder = tempfile.tempdir = None
    watch.seen += [f"left behind: {path}" for path in scratch.iterdir()]
    return "\n".join(watch.seen)


def _read(source: str, folder: Path, n: int) -> None:
    reader = SOURCES.load(source)()
    paths = [folder] if source == "run_directory" else sorted(folder.iterdir())
    if n % DIAGNOSED == 0:
        recording = read_recording([folder])
    elif all(reader.recognises(path) for path in paths):
        recording = reader.read(paths, None)
    else:
        return
    if isinstance(recording, Trace):
        if n % DIAGNOSED == 0:
            diagnose(recording)
    else:
        diagnose_hang(recording)


def memory_bytes() -> int:
    """The most that this process has ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
