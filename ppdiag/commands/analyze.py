"""``ppdiag analyze``: explain a record that is already there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ppdiag.errors import NothingRecorded
from ppdiag.options import layout_options, report_options, wanted
from ppdiag.outputs import CONDITION_HOLDS, report
from ppdiag.silence import why_silent

if TYPE_CHECKING:
    from ppdiag.stated import StatedLayout

FORMATS = (
    "run directories of `ppdiag run`",
    "exports of `ppdiag export` (--perfetto, --chrome)",
    "MegaScan traces of Megatron (.json)",
    "op tables of StragglerAnalysis (.parquet)",
    "traces of veScale's ndtimeline (trace_step…)",
    "traces of torch.profiler (.json, .json.gz), one a rank",
    "exports of Nsight Systems (.sqlite)",
    "logs of NCCL's Inspector (.log, .jsonl)",
    "dumps of PyTorch's Flight Recorder (pickle or JSON, one a rank)",
)
"""The descriptions of our sources, which are not loaded for a page of help."""


class _WithFormats(click.Command):
    """A command whose help ends with the formats that can be read."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  (click's)
        """The formats, one a line."""
        with formatter.section("What can be read"):
            for words in FORMATS:
                formatter.write_text(words)


@click.command(cls=_WithFormats)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--rank",
    "ranks",
    multiple=True,
    metavar="N",
    type=click.IntRange(min=0),
    help="Rank of a file that does not say it. May be repeated, in the order of such files.",
)
@layout_options
@report_options
def analyze(  # noqa: PLR0913  (one argument an option)
    paths: tuple[Path, ...],
    ranks: tuple[int, ...],
    json_target: str | None,
    html: Path | None,
    fail_on: tuple[str, ...],
    *,
    quiet: bool,
    layout: StatedLayout,
) -> None:
    """Say what the ranks of a recorded job waited for.

    PATH is a run directory of ppdiag run, which may be read while the job still writes it, or a recording of another
    tool that ppdiag reads.
    """
    try:
        holding = report(paths, wanted(json_target, html, fail_on, quiet=quiet), ranks=ranks, layout=layout)
    except NothingRecorded as error:
        raise NothingRecorded(f"{error}. {why_silent(paths[0])}") from error
    for condition in holding:
        click.echo(f"ppdiag: --fail-on {condition}", err=True)
    if holding:
        sys.exit(CONDITION_HOLDS)
