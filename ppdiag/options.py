"""Command-line options that several commands share, and the kinds of values that they take."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ppdiag.conditions import parse_condition
from ppdiag.errors import BadShape
from ppdiag.outputs import STANDARD_OUTPUT, Wanted
from ppdiag.stated import DEFAULT_ORDER, MOST_RANKS, StatedLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")
LEAST_RECORD_BYTES = 100_000
"""Some 1500 spans: two steps of a small pipeline."""
WIDEST_SUMMARY = 400
"""Characters of a command's first sentence in a list of commands: all of it, over several lines."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


class WholeSentences(click.Group):
    """A group whose help has each command's whole first sentence (click would cut it)."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(WIDEST_SUMMARY)) for name, command in commands if command]
            )


def size_bytes(text: str) -> int:
    """A number of bytes, with an optional decimal unit.

    Raises:
        click.BadParameter: it is no size.

    >>> size_bytes("1.5k"), size_bytes("2 GB")
    (1500, 2000000000)
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?)b?", text.strip().lower())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size; write for instance 500M or 2G")
    return round(float(match[1]) * _UNITS[match[2]])


class NumberRange(click.FloatRange):
    """A number within bounds. What click lets pass as one and is none (nan) is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """The number.

        Raises:
            click.BadParameter: it is none, or out of bounds.
        """
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def record_size_bytes(text: str) -> int:
    """A size that a rank's record may have.

    Raises:
        click.BadParameter: it is none, or so small that nothing could be recorded.

    >>> record_size_bytes("500M")
    500000000
    """
    size = size_bytes(text)
    if size < LEAST_RECORD_BYTES:
        raise click.BadParameter(
            f"{text!r} is too small to record anything; give at least {LEAST_RECORD_BYTES // 1000}k"
        )
    return size


def pick(table: Mapping[str, T], name: str, what: str) -> T:
    """The row of this name.

    Raises:
        BadShape: there is none; the message lists those that there are.
    """
    if name not in table:
        raise BadShape(f"{name!r} is no known {what}; choose from {', '.join(table)}")
    return table[name]


def max_size_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option --max-size."""
    text = "Stop recording a rank at this size, e.g. 2G."
    return click.option("--max-size", metavar="SIZE", type=record_size_bytes, help=text)(command)


def nccl_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option --nccl/--no-nccl."""
    text = "Have NCCL write its log into the run directory, unless you set NCCL_DEBUG yourself (default: on)."
    return click.option("--nccl/--no-nccl", default=True, help=text)(command)


def adapters_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option --adapters/--no-adapters."""
    text = "Name stages and microbatches as the framework does (default: on); off, they are found from the messages."
    return click.option("--adapters/--no-adapters", default=True, help=text)(command)


def layer_times_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option --layer-times."""
    text = "Time each layer too, in five steps: for the best split of them."
    return click.option("--layer-times", is_flag=True, help=text)(command)


def mode_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which steps are recorded: --dormant, --every, --window, --measure-overhead."""
    for option in reversed(
        (
            click.option("--dormant", is_flag=True, help="Record nothing until ppdiag record asks for it."),
            click.option("--every", metavar="K", type=click.IntRange(min=2), help="Record a window of steps every K."),
            click.option("--window", metavar="N", type=click.IntRange(min=1), help="Its steps (default: 5)."),
            click.option(
                "--measure-overhead", is_flag=True, help="Record blocks of steps in turns, and say what it costs."
            ),
        )
    ):
        command = option(command)
    return command


def mode(*, dormant: bool, every: int | None, window: int | None, measure_overhead: bool) -> str:
    """The mode of the hooks that these options ask for.

    Raises:
        click.UsageError: they contradict each other.

    >>> mode(dormant=False, every=100, window=None, measure_overhead=False)
    'every:100:5'
    """
    if window is not None and every is None:
        raise click.UsageError("--window needs --every")
    if dormant and every is not None:
        raise click.UsageError("--dormant waits for ppdiag record, and --every does not: give one of them")
    if every is not None and (window or DEFAULT_WINDOW) >= every:
        raise click.UsageError(
            f"--every {every} with windows of {window or DEFAULT_WINDOW} steps is every step: drop it"
        )
    if measure_overhead and (dormant or every is not None):
        raise click.UsageError("--measure-overhead goes with neither --dormant nor --every")
    if measure_overhead:
        return "overhead"
    if every is not None:
        return f"every:{every}:{window or DEFAULT_WINDOW}"
    return "dormant" if dormant else ""


DEFAULT_WINDOW = 5
"""Steps of a window where --window is not given."""


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say what to do with a diagnosis: --json, --html, --fail-on, --quiet."""
    for option in reversed(
        (
            click.option("--json", "json_target", metavar="FILE|-", help="Write the diagnosis as JSON; - is stdout."),
            click.option(
                "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the report as one page."
            ),
            click.option(
                "--fail-on",
                multiple=True,
                metavar="CONDITION",
                help="Exit with 3 where this holds, e.g. 'idle>0.3'. May be repeated.",
            ),
            click.option("-q", "--quiet", is_flag=True, help="Print no summary."),
        )
    ):
        command = option(command)
    return command


def layout_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that state the job's layout: --pp, --vpp, --tp, --dp, --order. The command gets a ``layout``."""

    @functools.wraps(command)
    def with_layout(*args: Any, **named: Any) -> Any:  # noqa: ANN401  (whatever the command takes)
        sizes = {name: named.pop(name) for name in ("pp", "vpp", "tp", "dp", "order")}
        return command(*args, layout=StatedLayout(**sizes), **named)

    meanings = {"pp": "Ranks along the pipeline", "vpp": "Virtual stages of a rank", "tp": "Tensor-parallel ranks"}
    order_help = "How ranks are numbered: the dimension of neighbouring ranks first."
    decorated: Callable[..., Any] = click.option(
        "--order", metavar="ORDER", default=DEFAULT_ORDER, show_default=True, help=order_help
    )(with_layout)
    for name, meaning in reversed({**meanings, "dp": "Data-parallel replicas"}.items()):
        text = f"{meaning}, where the record does not tell."
        decorated = click.option(f"--{name}", metavar="N", type=click.IntRange(1, MOST_RANKS), help=text)(decorated)
    return decorated


def wanted(json_target: str | None, html: Path | None, fail_on: Sequence[str], *, quiet: bool) -> Wanted:
    """What the options ask for.

    Raises:
        BadCondition: one of ``fail_on`` cannot be read.
    """
    conditions = tuple(parse_condition(text) for text in fail_on)
    return Wanted(json_target, html, conditions, summary=not quiet and json_target != STANDARD_OUTPUT)
