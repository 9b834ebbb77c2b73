"""``ppdiag run``: start a job, record it, explain it."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ppdiag.errors import NoPipelineFound, NothingRecorded, PpdiagError, see
from ppdiag.launch import (
    check_command,
    default_run_directory,
    job_variables,
    note_end,
    prepare_run_directory,
    rank_files,
    run_job,
)
from ppdiag.options import (
    adapters_option,
    layer_times_option,
    layout_options,
    max_size_option,
    mode,
    mode_options,
    nccl_option,
    report_options,
    wanted,
)
from ppdiag.outputs import CONDITION_HOLDS, Wanted, check_targets, report
from ppdiag.silence import why_silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.stated import StatedLayout


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option(
    "-o", "--output", metavar="DIR", type=click.Path(path_type=Path), help="Run directory (default: a new one)."
)
@report_options
@max_size_option
@nccl_option
@mode_options
@layer_times_option
@adapters_option
@layout_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(  # noqa: PLR0913  (one argument an option)
    command: tuple[str, ...],
    *,
    output: Path | None,
    json_target: str | None,
    html: Path | None,
    fail_on: tuple[str, ...],
    quiet: bool,
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
    """Run COMMAND, record what its ranks do, and say what they waited for.

    COMMAND is started as it is, with any launcher: torchrun, python, accelerate, deepspeed, srun. Its input, output,
    signals and exit code pass through; the summary is printed on stderr when it has ended.

        ppdiag run -- torchrun --nproc-per-node 4 train.py
    """
    asked = wanted(json_target, html, fail_on, quiet=quiet)
    steps = mode(dormant=dormant, every=every, window=window, measure_overhead=measure_overhead)
    check_command(command)
    output = output or default_run_directory()
    check_targets(asked, run_directory=output)
    path = prepare_run_directory(output, command, layout)
    before = rank_files(path)
    variables = job_variables(
        path, os.environ, max_bytes=max_size, nccl=nccl, mode=steps, adapters=adapters, layer_times=layer_times
    )
    exit_code = run_job(command, variables, meanwhile=lambda: None if quiet else _say_what_is_wrong(command))
    note_end(path, exit_code)
    if rank_files(path) - before:
        holding = _explain(path, asked, layout, quiet=quiet, dormant=dormant)
    else:
        holding = _say_silent(path, exit_code)
    sys.exit(CONDITION_HOLDS if holding and exit_code == 0 else exit_code)


def _say_what_is_wrong(command: Sequence[str]) -> None:
    """What ``ppdiag check`` finds in the command; never in the way of the job, which has started by now."""
    try:
        from ppdiag.commands import check  # noqa: PLC0415  (heavy: only once the job has been started)

        for line in check.lines(command):
            _say(line)
    except PpdiagError as error:
        _say(f"{error} {see(error.slug)}")
    except Exception as error:  # noqa: BLE001  (a fault of the check is no fault of the job)
        _say(f"the check of the command failed: {type(error).__name__}: {error} {see(PpdiagError.slug)}")


def _explain(path: Path, asked: Wanted, layout: StatedLayout, *, quiet: bool, dormant: bool) -> Sequence[str]:
    """Analyse the run; what goes wrong is said and never changes the exit code of the job.

    Returns:
        The conditions that hold.
    """
    try:
        holding = report([path], asked, layout=layout, summary_on_stderr=True)
    except PpdiagError as error:
        unexpected = ""
        asleep = dormant and isinstance(error, NoPipelineFound)
        _say(f"{error} {see(error.slug)}" + ("; the job was dormant: did ppdiag record wake it?" if asleep else ""))
    except KeyboardInterrupt:
        unexpected = ""
        _say("analysis interrupted")
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001  (a fault of the analysis is no fault of the job)
        unexpected = "-v "
        if click.get_current_context().find_root().params.get("verbose"):
            traceback.print_exception(error)
        _say(f"the analysis failed: {type(error).__name__}: {error} {see(PpdiagError.slug)}")
    else:
        for condition in holding:
            _say(f"--fail-on {condition}")
        if not quiet:
            _say(f"the record is kept in {path}" + (f", the report in {asked.html}" if asked.html else ""))
        return holding
    _say(f"the record is kept in {path}; try ppdiag {unexpected}analyze {path}")
    return ()


def _say_silent(path: Path, exit_code: int) -> Sequence[str]:
    failed = f"The job failed ({exit_code}); what it said itself is above. " if exit_code else ""
    _say(f"nothing was recorded. {failed}{why_silent(path)} {see(NothingRecorded.slug)}")
    return ()


def _say(text: str) -> None:
    """Say something on standard error, where it can be written: a full disk there must not cost the job's exit code."""
    with contextlib.suppress(OSError):
        click.echo(f"ppdiag: {text}", err=True)
