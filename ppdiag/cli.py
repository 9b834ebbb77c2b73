"""The command line: finds the command, and turns errors into one line and an exit code."""

from __future__ import annotations

import difflib
import logging
import os
import sys
import traceback
from typing import Any, NoReturn

import click

import ppdiag
from ppdiag.commands import COMMANDS
from ppdiag.errors import CannotRead, PpdiagError, see
from ppdiag.options import WholeSentences
from ppdiag.outputs import discard_output, printing

INTERRUPTED = 130
"""128 + SIGINT, as a shell has it."""
BROKEN_PIPE = 141
"""128 + SIGPIPE."""

NEAR = 0.6
"""Likeness of a name that is suggested for one that there is not, 0 to 1."""


class CommandGroup(WholeSentences):
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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is meant; one that there is not gets the nearest names (analyse: analyze)."""
        name = args[0]
        near = difflib.get_close_matches(name, COMMANDS.names(), n=2, cutoff=NEAR)
        if near and name not in COMMANDS.names():
            ctx.fail(f"there is no command {_printable(name)!r}; did you mean {' or '.join(near)}?")
        return super().resolve_command(ctx, args)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401  (click's signature)
    ) -> click.Context:
        """Read the command line; ``--help`` and ``--version`` are printed here."""
        open_closed_streams()
        try:
            with printing():
                return super().make_context(info_name, args, parent, **extra)
        except BrokenPipeError:
            _reader_is_gone()
        except PpdiagError as error:
            _fail(error)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  (click's signature)
        """Run the command; never lets a traceback through unless it was asked for."""
        try:
            with printing():
                return super().invoke(ctx)
        except PpdiagError as error:
            _fail(error)
        except KeyboardInterrupt:
            click.echo("ppdiag: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            _reader_is_gone()
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except OSError as error:
            _fail(CannotRead(f"{os.fsdecode(error.filename or 'a file')}: {error.strerror or error}"))
        except Exception as error:  # noqa: BLE001  (a fault of ours, in one line; -v shows where)
            if ctx.params.get("verbose"):
                traceback.print_exception(error)
            line = (
                f"unexpected {type(error).__name__}: {_printable(str(error))} {see(PpdiagError.slug)}; -v shows where"
            )
            click.echo(f"ppdiag: {line}", err=True)
            sys.exit(PpdiagError.exit_code)


def open_closed_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr something in their place.

    The next file opened would take its number, and what was meant for the terminal would land there. Writing to a
    standard output that was closed still fails; what was to be said on standard error is lost.
    """
    for number, mode in ((0, "r"), (1, "w"), (2, "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)  # takes the lowest number free: this one
            setattr(sys, ("stdin", "stdout", "stderr")[number], open(number, mode, closefd=False))  # noqa: SIM115


def _fail(error: PpdiagError) -> NoReturn:
    click.echo(f"ppdiag: {_printable(str(error))} {see(error.slug)}", err=True)
    sys.exit(error.exit_code)


def _printable(text: str) -> str:
    r"""A text that may quote a hostile file, on one line and without what a terminal would obey.

    >>> _printable("a\x1b[2Jb\n")
    'a\\x1b[2Jb\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _reader_is_gone() -> NoReturn:
    discard_output()
    sys.exit(BROKEN_PIPE)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(ppdiag.__version__, prog_name="ppdiag", message="%(prog)s %(version)s")
@click.option("-v", "--verbose", is_flag=True, help="Show where an unexpected error comes from.")
def main(*, verbose: bool) -> None:  # noqa: ARG001  (read where errors become words)
    """Find out what each GPU of a pipeline-parallel training job is waiting for."""
    # Where HOME cannot be written, as in many containers, matplotlib advises on that in two long lines.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
