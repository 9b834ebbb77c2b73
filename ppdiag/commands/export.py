"""``ppdiag export``: a record as a file for other tools."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import click

from ppdiag.outputs import STANDARD_OUTPUT, printing, progress, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ppdiag.exported import Exported

_FILE = click.Path(dir_okay=False, path_type=Path, allow_dash=True)


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--perfetto", type=_FILE, help="Write a trace for ui.perfetto.dev, in its own format; - is stdout.")
@click.option("--chrome", type=_FILE, help="Write a trace in Chrome's JSON; - is stdout, .gz packs it.")
@click.option("--parquet", type=_FILE, help="Write the spans as a Parquet table (needs pyarrow).")
@click.option("--csv", type=_FILE, help="Write the spans as a CSV table; - is stdout, .gz packs it.")
def export(
    paths: tuple[Path, ...], *, perfetto: Path | None, chrome: Path | None, parquet: Path | None, csv: Path | None
) -> None:
    """Write a recorded job as a trace to look at, or as a table.

    PATH is a run directory, or a recording of another tool that ppdiag reads. A trace has a track for the ops, the idle
    time by cause, and the messages of each rank, with arrows from each send to its receive.
    """
    wanted = [(perfetto, _perfetto), (chrome, _chrome), (parquet, _parquet), (csv, _csv)]
    chosen: list[tuple[Path, Callable[[Exported, Path], None]]] = [(path, write) for path, write in wanted if path]
    if str(parquet) == STANDARD_OUTPUT:
        raise click.UsageError("--parquet needs a file: a Parquet table is not written from its beginning to its end")
    if not chosen:
        raise click.UsageError("nothing to write: give --perfetto, --chrome, --parquet or --csv")
    found = _read(paths)
    if found.note:
        click.echo(f"ppdiag: there is no idle time by cause in it: {found.note}", err=True)
    for path, write in chosen:
        with writing(path), _whole_or_none(path):
            write(found, path)


def _read(paths: tuple[Path, ...]) -> Exported:
    from ppdiag.analyzers.exporting import export as exported  # noqa: PLC0415  (numpy loads here, not for --help)
    from ppdiag.analyzers.sources import read_trace  # noqa: PLC0415

    with progress() as tell:
        return exported(read_trace(paths, tell), tell)


@contextlib.contextmanager
def _whole_or_none(path: Path) -> Iterator[None]:
    """Where a file is written: one that could not be written to its end is removed."""
    try:
        yield
    except BaseException:
        if path.is_file():
            path.unlink()
        raise


def _perfetto(found: Exported, path: Path) -> None:
    from ppdiag.reports.perfetto import write  # noqa: PLC0415

    if str(path) == STANDARD_OUTPUT:
        with printing():
            write(found, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        return
    with path.open("wb") as stream:
        write(found, stream)


def _chrome(found: Exported, path: Path) -> None:
    from ppdiag.reports.chrome import write  # noqa: PLC0415

    with _text(path) as stream:
        write(found, stream)


def _parquet(found: Exported, path: Path) -> None:
    from ppdiag.reports.tables import write_parquet  # noqa: PLC0415

    write_parquet(found, path)


def _csv(found: Exported, path: Path) -> None:
    from ppdiag.reports.tables import write_csv  # noqa: PLC0415

    with _text(path) as stream:
        write_csv(found, stream)


@contextlib.contextmanager
def _text(path: Path) -> Iterator[TextIO]:
    """A file to write text to, packed where its name ends in .gz; standard output for ``-``."""
    if path.suffix == ".gz":
        import gzip  # noqa: PLC0415

        with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as packed:
            yield cast("TextIO", packed)
    elif str(path) == STANDARD_OUTPUT:
        with printing():
            yield sys.stdout
    else:
        with path.open("w", encoding="utf-8", newline="") as stream:
            yield stream
