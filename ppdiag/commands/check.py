"""``ppdiag check``: what a training command has wrong or wastes, before it starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ppdiag.options import pick

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = "ppdiag.check/1"
ERRORS_FOUND = 3
"""Exit code where the job cannot run as asked."""


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--device", help="The GPU, of those that ppdiag plan knows: says whether interleaving pays.")
@click.option("--network", help="The network between nodes, of those that ppdiag plan knows.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def check(command: tuple[str, ...], *, device: str | None, network: str | None, as_json: bool) -> None:
    """Read COMMAND as it would be started, and say what is wrong with its layout or wastes time. Nothing is run.

    It understands torchrun, deepspeed, srun and accelerate, and the arguments of Megatron, DeepSpeed (its JSON) and
    torchtitan (its TOML).

    \b
        ppdiag check -- torchrun --nproc-per-node 8 pretrain_gpt.py …
    """  # noqa: D301  (\b: click does not wrap what follows)
    from ppdiag.analyzers.planning.check import ERROR  # noqa: PLC0415
    from ppdiag.analyzers.planning.check import check as find  # noqa: PLC0415
    from ppdiag.analyzers.planning.hardware import DEVICES, NETWORKS  # noqa: PLC0415
    from ppdiag.reports.findings import render  # noqa: PLC0415

    gpu = None if device is None else pick(DEVICES, device, "device")
    link = None if network is None else pick(NETWORKS, network, "network")
    _, findings = find(command, folder=Path.cwd(), device=gpu, network=link)
    if as_json:
        click.echo(json.dumps({"schema": SCHEMA, "findings": [one.to_dict() for one in findings]}, indent=1))
    else:
        click.echo(render(findings))
    if any(one.severity == ERROR for one in findings):
        sys.exit(ERRORS_FOUND)


def lines(command: Sequence[str]) -> list[str]:
    """What to say of a command that is about to start: errors and warnings, one line each; nothing if all is well.

    Raises:
        PpdiagError: a configuration that the command names cannot be read.
    """
    from ppdiag.analyzers.planning.check import NOTE  # noqa: PLC0415
    from ppdiag.analyzers.planning.check import check as find  # noqa: PLC0415
    from ppdiag.reports.words import visible  # noqa: PLC0415

    _, findings = find(command, folder=Path.cwd())
    return [visible(f"{one.severity}: {one.rule}: {one.words}") for one in findings if one.severity != NOTE]
