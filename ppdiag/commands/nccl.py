"""``ppdiag nccl``: read NCCL's logs and say what really connects the ranks."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ppdiag.outputs import STANDARD_OUTPUT, terminal, writing_text

STANDARD_INPUT = Path("/dev/stdin")


@click.command()
@click.argument("paths", metavar="FILE|DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "json_target", metavar="FILE|-", help="Write all that was found as JSON; - is stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Print no summary.")
def nccl(paths: tuple[Path, ...], json_target: str | None, *, quiet: bool) -> None:
    """Say which transport NCCL really used between ranks.

    FILE is a log of a job that ran with NCCL_DEBUG=INFO: one for all ranks or one for each, with or without prefixes
    of torchrun, srun, mpirun or Ray; - is standard input. DIR is a run directory or a folder of logs.
    """
    from ppdiag.analyzers.nccl.reader import read_logs  # noqa: PLC0415  (only this command needs it)
    from ppdiag.analyzers.nccl.transports import pairs  # noqa: PLC0415

    report = read_logs([STANDARD_INPUT if str(path) == "-" else path for path in paths])
    if json_target is not None:
        with writing_text(json_target) as stream:
            stream.write(json.dumps(report.to_dict(), indent=1) + "\n")
    if not quiet and json_target != STANDARD_OUTPUT:
        from ppdiag.reports.nccl_table import render  # noqa: PLC0415  (rich is slow to import)

        with terminal() as console:
            render(report, pairs(report), console)
