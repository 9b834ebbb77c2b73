"""``ppdiag record``: wake the probes of a running job for some steps."""

from __future__ import annotations

from pathlib import Path

import click

from ppdiag.live import Job
from ppdiag.options import NumberRange


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1, 1_000_000), default=10, show_default=True, help="Steps to record.")
@click.option(
    "--patience",
    metavar="SECONDS",
    type=NumberRange(min=1),
    default=600.0,
    show_default=True,
    help="How long to wait for the ranks, at each turn.",
)
def record(directory: Path, *, steps: int, patience: float) -> None:
    """Record some steps of a job that was started with ppdiag run --dormant.

    DIRECTORY is its run directory. All ranks wake at the same boundary between two steps, and sleep again afterwards.
    """
    job = Job(directory, patience_s=patience, tell=_say)
    _, late = job.record(steps)
    if late:
        _say(f"{late} ranks saw the command late: the first steps are incomplete and will be left out")
    _say(f"done: ppdiag analyze {directory}")


def _say(text: str) -> None:
    click.echo(f"ppdiag: {text}", err=True)
