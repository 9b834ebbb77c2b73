"""From a record to what the user asked to see: analyse, write the reports, check the conditions."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppdiag.errors import OutputFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ppdiag.conditions import Condition
    from ppdiag.diagnosis import Diagnosis

    Progress = Callable[[str, int, int], None]

STANDARD_OUTPUT = "-"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asked for."""

    json: str | None = None
    """A file, or ``-`` for standard output."""
    html: Path | None = None
    conditions: tuple[Condition, ...] = ()
    summary: bool = True


def report(paths: Sequence[Path], wanted: Wanted, *, summary_on_stderr: bool = False) -> list[str]:
    """Analyse a record and write all that is wanted.

    Returns:
        The conditions that hold, in words.

    Raises:
        PpdiagError: the record cannot be used, or a report cannot be written.
    """
    diagnosis = _diagnose(paths)
    if wanted.json is not None:
        _write_json(diagnosis, wanted.json)
    if wanted.html is not None:
        with writing(wanted.html):
            _report("html")(diagnosis, wanted.html)
    if wanted.summary:
        _print_summary(diagnosis, on_stderr=summary_on_stderr)
    return [
        f"{condition} ({condition.name} is {condition.value(diagnosis):.3g})"
        for condition in wanted.conditions
        if condition.holds(diagnosis)
    ]


def _diagnose(paths: Sequence[Path]) -> Diagnosis:
    # numpy and pandas load here, after the job has ended and not for --help.
    from ppdiag.analyzers.diagnose import diagnose  # noqa: PLC0415
    from ppdiag.analyzers.sources import read_trace  # noqa: PLC0415

    with _progress() as progress:
        return diagnose(read_trace(paths, progress), progress)


def _report(name: str) -> Any:  # noqa: ANN401  (each report has its own signature)
    from ppdiag.reports import REPORTS  # noqa: PLC0415  (loads templates and figures)

    return REPORTS.load(name)


def _write_json(diagnosis: Diagnosis, target: str) -> None:
    write = _report("json")
    if target == STANDARD_OUTPUT:
        write(diagnosis, sys.stdout)
        sys.stdout.flush()
        return
    with writing(target), Path(target).open("w", encoding="utf-8") as stream:
        write(diagnosis, stream)


def _print_summary(diagnosis: Diagnosis, *, on_stderr: bool) -> None:
    from rich.console import Console  # noqa: PLC0415  (slow to import)

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            """Rich would end the process with code 1; the command group knows the right one."""
            raise BrokenPipeError

    _report("terminal")(diagnosis, Terminal(stderr=on_stderr))


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


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """A progress line on stderr while it is a terminal; nothing at all elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415

    tasks: dict[str, Any] = {}
    with Bars(console=Console(stderr=True), transient=True) as bars:

        def show(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done, total=total)

        yield show
