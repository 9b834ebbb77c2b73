"""``ppdiag export``: a record as a file for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ppdiag.outputs import progress, writing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppdiag.exported import Exported

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--perfetto", type=_FILE, help="Write a trace for ui.perfetto.dev, in Perfetto's own format.")
@click.option("--chrome", type=_FILE, help="Write a trace in Chrome's JSON; .gz at the end packs it.")
@click.option("--parquet", type=_FILE, help="Write the spans as a Parquet table (needs pyarrow).")
@click.option("--csv", type=_FILE, help="Write the spans as a CSV table; .gz at the end packs it.")
def export(
    paths: tuple[Path, ...], *, perfetto: Path | None, chrome: Path | None, parquet: Path | None, csv: Path | None
) -> None:
    """Write a recorded job as a trace to look at, or as a table.

    PATH is a run directory, or a recording of another tool that ppdiag reads. A trace has a track for the ops, the idle
    time by cause, and the messages of each rank, with arrows from each send to its receive.
    """
    wanted = [(perfetto, _perfetto), (chrome, _chrome), (parquet, _parquet), (csv, _csv)]
    chosen: list[tuple[Path, Callable[[Exported, Path], None]]] = [(path, write) for path, write in wanted if path]
    if not chosen:
        raise click.UsageError("nothing to write: give --perfetto, --chrome, --parquet or --csv")
    found = _read(paths)
    if found.note:
        click.echo(f"ppdiag: there is no idle time by cause in it: {found.note}", err=True)
    for path, write in chosen:
        with writing(path):
            write(found, path)


def _read(paths: tuple[Path, ...]) -> Exported:
    from ppdiag.analyzers.exporting import export as exported  # noqa: PLC0415  (numpy loads here, not for --help)
    from ppdiag.analyzers.sources import read_trace  # noqa: PLC0415

    with progress() as tell:
        return exported(read_trace(paths, tell), tell)


def _perfetto(found: Exported, path: Path) -> None:
    from ppdiag.reports.perfetto import write  # noqa: PLC0415

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


def _text(path: Path) -> Any:  # noqa: ANN401  (a text stream)
    """A file to write text to, packed where its name ends in .gz."""
    if path.suffix == ".gz":
        import gzip  # noqa: PLC0415

        return gzip.open(path, "wt", encoding="utf-8", compresslevel=5)
    return path.open("w", encoding="utf-8", newline="")
