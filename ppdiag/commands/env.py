"""``ppdiag env``: the variables for launchers that ppdiag does not start."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ppdiag.launch import job_variables, prepare_run_directory
from ppdiag.options import (
    adapters_option,
    layer_times_option,
    layout_options,
    max_size_option,
    mode,
    mode_options,
    nccl_option,
)

if TYPE_CHECKING:
    from ppdiag.stated import StatedLayout


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@max_size_option
@nccl_option
@mode_options
@layer_times_option
@adapters_option
@layout_options
def env(  # noqa: PLR0913  (one argument an option)
    directory: Path,
    *,
    max_size: int | None,
    nccl: bool,
    dormant: bool,
    every: int | None,
    window: int | None,
    measure_overhead: bool,
    layer_times: bool,
    adapters: bool,
    layout: StatedLayout,
) -> None:
    """Print the variables that make a job record into DIRECTORY.

    For sbatch, Kubernetes and others that start the job themselves. In a shell:

        eval "$(ppdiag env /shared/run1)"

    The directory is made if need be. It must be seen by all nodes under the same path, as must ppdiag itself.
    """
    steps = mode(dormant=dormant, every=every, window=window, measure_overhead=measure_overhead)
    path = prepare_run_directory(directory, layout=layout)
    variables = job_variables(
        path, os.environ, max_bytes=max_size, nccl=nccl, mode=steps, adapters=adapters, layer_times=layer_times
    )
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")
