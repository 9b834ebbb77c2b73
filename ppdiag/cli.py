"""The command line: finds the command, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import click

import ppdiag
from ppdiag.commands import COMMANDS
from ppdiag.errors import PpdiagError

INTERRUPTED = 130
"""128 + SIGINT, as a shell has it."""
BROKEN_PIPE = 141
"""128 + SIGPIPE."""
MESSAGES = "docs/messages.md"


class CommandGroup(click.Group):
    """Loads a command when it is asked for, and is the one place where errors become words and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        """Names of the commands, in the order of the table."""
        return COMMANDS.names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of this name; None where there is none."""
        if cmd_name not in COMMANDS.names():
            return None
        command: click.Command = COMMANDS.load(cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  (click's signature)
        """Run the command; never lets a traceback through unless it was asked for."""
        try:
            return super().invoke(ctx)
        except PpdiagError as error:
            _fail(f"{error} (see {MESSAGES}#{error.slug})", error, ctx)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("ppdiag: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            # The reader of our output has gone. Python would complain again when it flushes stdout at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(BROKEN_PIPE)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except Exception as error:  # noqa: BLE001  (a fault of ours, in one line; -v shows where)
            _fail(f"unexpected {type(error).__name__}: {error} (see {MESSAGES}#error; -v shows where)", error, ctx)
            sys.exit(PpdiagError.exit_code)


def _fail(line: str, error: Exception, ctx: click.Context) -> None:
    if ctx.params.get("verbose"):
        traceback.print_exception(error)
    click.echo(f"ppdiag: {line}", err=True)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(ppdiag.__version__, prog_name="ppdiag", message="%(prog)s %(version)s")
@click.option("-v", "--verbose", is_flag=True, help="Show where an error comes from.")
def main(*, verbose: bool) -> None:
    """Find out what each GPU of a pipeline-parallel training job is waiting for."""


if __name__ == "__main__":
    main()
