"""``ppdiag attach``: arm a process that was started without ppdiag, where Python offers a safe way to."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from ppdiag.errors import AttachFailed
from ppdiag.launch import bootstrap_directory, prepare_run_directory
from ppdiag.rundir import ATTACHED_MODE, MODE_VARIABLE, RUN_DIR_VARIABLE

SCRIPT = """\
import os, sys
if "ppdiag.hooks.install" not in sys.modules:
    os.environ.update({variables!r})
    from runpy import run_path
    run_path({bootstrap!r})
"""
"""Run by the process between two instructions of its main thread. The file is not named ``sitecustomize`` there, and so
arms the process and chains to nothing."""


@click.command()
@click.argument("pids", metavar="PID...", nargs=-1, required=True, type=click.IntRange(min=1))
@click.option("-o", "--output", metavar="DIR", required=True, type=click.Path(path_type=Path), help="Run directory.")
def attach(pids: tuple[int, ...], *, output: Path) -> None:
    """Arm the ranks PID... of a running job; ppdiag record then wakes them.

    Needs Python 3.14 or later, on both sides, which lets one process have another run a script when it is safe
    (sys.remote_exec). ppdiag uses no debugger and no ptrace: those end jobs. Give all ranks of the host in one call,
    and do so on every host.
    """
    remote_exec = getattr(sys, "remote_exec", None)
    if remote_exec is None:
        raise AttachFailed(
            f"this is Python {sys.version_info.major}.{sys.version_info.minor}, and only 3.14 has a safe way into a "
            "running process; start the job with ppdiag run --dormant (it costs nothing), then use ppdiag record"
        )
    path = prepare_run_directory(output)
    variables = {RUN_DIR_VARIABLE: str(path), MODE_VARIABLE: ATTACHED_MODE}
    script = SCRIPT.format(variables=variables, bootstrap=os.path.join(bootstrap_directory(), "sitecustomize.py"))  # noqa: PTH118
    with tempfile.NamedTemporaryFile("w", suffix=".py", prefix="ppdiag-attach-", delete=False) as file:
        file.write(script)  # it stays: the processes read it when they come to it
    for pid in pids:
        try:
            remote_exec(pid, file.name)
        except (OSError, RuntimeError, ValueError) as error:
            raise AttachFailed(f"process {pid}: {error}") from error
    click.echo(f"ppdiag: {len(pids)} processes are armed; next: ppdiag record {output}", err=True)
