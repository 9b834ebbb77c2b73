"""From a record to what the user asked to see: analyse, write the reports, check the conditions."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppdiag.errors import OutputFailed
from ppdiag.hang import Hang
from ppdiag.memory import keep_freed_memory
from ppdiag.stated import NOT_STATED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TextIO

    from rich.console import Console

    from ppdiag.analyzers.diagnose import Analysis
    from ppdiag.conditions import Condition
    from ppdiag.diagnosis import Diagnosis
    from ppdiag.stated import StatedLayout

    Progress = Callable[[str, int, int], None]

STANDARD_OUTPUT = "-"
CONDITION_HOLDS = 3
"""Exit code where a ``--fail-on`` condition holds (of ``ppdiag run``: and the job itself succeeded)."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asked for."""

    json: str | None = None
    """A file, or ``-`` for standard output."""
    html: Path | None = None
    conditions: tuple[Condition, ...] = ()
    summary: bool = True


def report(
    paths: Sequence[Path],
    wanted: Wanted,
    *,
    ranks: Sequence[int] = (),
    layout: StatedLayout = NOT_STATED,
    summary_on_stderr: bool = False,
) -> list[str]:
    """Analyse a record and write all that is wanted.

    Args:
        paths: the record.
        wanted: what to do with the diagnosis.
        ranks: of files that do not say theirs, in their order.
        layout: as the user states it; else that which was stated when the job was started.
        summary_on_stderr: keep standard output for the job.

    Returns:
        The conditions that hold, in words.

    Raises:
        PpdiagError: the record cannot be used, or a report cannot be written.
    """
    diagnosis = _diagnose(paths, ranks, layout)
    if isinstance(diagnosis, Hang):
        _report_hang(diagnosis, wanted, on_stderr=summary_on_stderr)
        return []
    try:
        _write_files(diagnosis, wanted)
    finally:  # a file that cannot be written costs no one the answer
        if wanted.summary:
            _print_summary(diagnosis, on_stderr=summary_on_stderr)
    return [
        f"{condition} ({condition.name} is {condition.value(diagnosis):.3g})"
        for condition in wanted.conditions
        if condition.holds(diagnosis)
    ]


def check_targets(wanted: Wanted, *, run_directory: Path) -> None:
    """Find out before a job starts that its report could not be written after it.

    Args:
        wanted: what the user asked for.
        run_directory: of the job; it need not be there yet.

    Raises:
        OutputFailed: a file is to be written into a directory that is not there or cannot be written.
    """
    for target in (wanted.html, wanted.json):
        if target is None or target == STANDARD_OUTPUT:
            continue
        directory = Path(target).parent
        if directory.is_dir() and os.access(directory, os.W_OK):
            continue
        if os.path.abspath(directory) != os.path.abspath(run_directory):  # noqa: PTH100  (links as they are)
            raise OutputFailed(f"cannot write {target}: {_what_is_wrong(directory)}; the job was not started")


def _what_is_wrong(directory: Path) -> str:
    return f"{directory} cannot be written" if directory.is_dir() else f"there is no directory {directory}"


def _write_files(diagnosis: Diagnosis, wanted: Wanted) -> None:
    if wanted.json is not None:
        _write_json(diagnosis, wanted.json)
    if wanted.html is not None:
        with writing(wanted.html):
            _report("html")(diagnosis, wanted.html)


def _diagnose(paths: Sequence[Path], ranks: Sequence[int], layout: StatedLayout) -> Diagnosis | Hang:
    # numpy and pandas load here, after the job has ended and not for --help.
    from ppdiag.analyzers.diagnose import diagnose  # noqa: PLC0415
    from ppdiag.analyzers.hang import diagnose_hang  # noqa: PLC0415
    from ppdiag.analyzers.sources import read_recording  # noqa: PLC0415
    from ppdiag.trace import Trace  # noqa: PLC0415

    keep_freed_memory()
    with progress() as tell:
        recording = read_recording(paths, tell, ranks)
        if not isinstance(recording, Trace):
            return diagnose_hang(recording)
        return diagnose(replace(recording, layout=layout or recording.layout), tell)


def take_apart(paths: Sequence[Path], layout: StatedLayout = NOT_STATED) -> Analysis:
    """A record taken apart, for questions that its diagnosis does not answer.

    Raises:
        PpdiagError: the record cannot be used.
    """
    from ppdiag.analyzers.diagnose import analyse  # noqa: PLC0415
    from ppdiag.analyzers.sources import read_trace  # noqa: PLC0415

    keep_freed_memory()
    with progress() as tell:
        trace = read_trace(paths, tell)
        return analyse(replace(trace, layout=layout or trace.layout), tell)


def _report_hang(hang: Hang, wanted: Wanted, *, on_stderr: bool) -> None:
    """Writes what was found of a hang: it has no step, so that there is no page of it, and no condition on one."""
    if wanted.html is not None or wanted.conditions:
        raise OutputFailed(
            f"{hang.source}: dumps of a hang hold no times: no --html, no --fail-on; --json has all of it"
        )
    if wanted.json is not None:
        _write_json(hang, wanted.json)
    if wanted.summary:
        with terminal(on_stderr=on_stderr) as console:
            _report("hang")(hang, console)


def _report(name: str) -> Any:  # noqa: ANN401  (each report has its own signature)
    from ppdiag.reports import REPORTS  # noqa: PLC0415  (loads templates and figures)

    return REPORTS.load(name)


def _write_json(diagnosis: Diagnosis | Hang, target: str) -> None:
    with writing_text(target) as stream:
        _report("json")(diagnosis, stream)


def _print_summary(diagnosis: Diagnosis, *, on_stderr: bool) -> None:
    with terminal(on_stderr=on_stderr) as console:
        _report("terminal")(diagnosis, console)


class _Text(StringIO):
    """A text in memory that may hold what a stream of an encoding can show."""

    encoding = "utf-8"

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.encoding = encoding


@contextlib.contextmanager
def terminal(*, on_stderr: bool = False) -> Iterator[Console]:
    """A console on stdout or stderr. Where that is no terminal, no line ends in blanks.

    Raises:
        OutputFailed: stdout cannot be written.
    """
    from rich.console import Console  # noqa: PLC0415  (slow to import)

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            """Rich would end the process with code 1; the command group knows the right one."""
            raise BrokenPipeError

    stream = sys.stderr if on_stderr else sys.stdout
    if stream.isatty():
        # Of a terminal that calls itself dumb, rich takes the width for 80 whatever it is.
        width, height = shutil.get_terminal_size() if _is_dumb() else (None, None)
        yield Terminal(file=stream, width=width, height=height)
        return
    text = _Text(stream.encoding)
    yield Terminal(file=text)
    with contextlib.nullcontext() if on_stderr else printing():
        stream.write("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))
        stream.flush()


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Where something is written to standard output, and nothing of it stays behind in Python's buffer.

    Raises:
        OutputFailed: it cannot be written.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None:  # of another file
            raise
        discard_output()
        raise OutputFailed(f"cannot write to standard output: {error.strerror or error}") from error


def discard_output() -> None:
    """Throw away what is and will be written to standard output: Python would complain at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def writing_text(target: str) -> Iterator[TextIO]:
    """A text file that the user named, or standard output for ``-``.

    Raises:
        OutputFailed: it cannot be written.
    """
    if target == STANDARD_OUTPUT:
        with printing():
            yield sys.stdout
        return
    with writing(target), Path(target).open("w", encoding="utf-8") as stream:
        yield stream


@contextlib.contextmanager
def writing(target: str | Path) -> Iterator[None]:
    """Where a file of the user's is written: what goes wrong there is an error of that name.

    Raises:
        OutputFailed: the file cannot be written.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(f"cannot write {target}: {error.strerror or error}") from error


def _is_dumb() -> bool:
    return os.environ.get("TERM", "") in {"dumb", "unknown"}


@contextlib.contextmanager
def progress() -> Iterator[Progress | None]:
    """A progress line on stderr while it is a terminal that can take one back; nothing at all elsewhere."""
    if not sys.stderr.isatty() or _is_dumb():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415

    with Bars(console=Console(stderr=True), transient=True) as bars:
        line = bars.add_task("", visible=False)

        def show(label: str, done: int, total: int) -> None:
            bars.update(line, description=label, completed=done, total=total, visible=True)

        yield show
