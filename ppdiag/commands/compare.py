"""``ppdiag compare``: what changed from one run to another, and whether it is more than noise."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ppdiag.comparison import WORK, Outcome
from ppdiag.conditions import Condition, parse_condition
from ppdiag.diagnosis import Cause
from ppdiag.errors import BadCondition, NotComparable
from ppdiag.outputs import CONDITION_HOLDS, STANDARD_OUTPUT, take_apart, terminal, writing_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.comparison import Change, Comparison

SLOWER = "slower"
QUANTITIES = (SLOWER, WORK, *(cause.value for cause in Cause))
"""What ``--fail-on`` can ask: by what share of A's step time the step, or a part of it, is longer in B."""


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--json", "json_target", metavar="FILE|-", help="Write the comparison as JSON; - is stdout.")
@click.option(
    "--fail-on",
    multiple=True,
    metavar="CONDITION",
    help="Exit with 3 where this holds beyond the noise, e.g. 'slower>0.05'. May be repeated.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print no summary.")
def compare(a: Path, b: Path, *, json_target: str | None, fail_on: tuple[str, ...], quiet: bool) -> None:
    """Say what changed from run A to run B, by cause and place, and whether it is more than the noise of the steps.

    A and B are run directories, or recordings of other tools that ppdiag reads.
    """
    conditions = [_condition(text) for text in fail_on]
    found = _compare(a, b)
    if json_target is not None:
        with writing_text(json_target) as stream:
            stream.write(json.dumps(found.to_dict(), indent=1) + "\n")
    if not quiet and json_target != STANDARD_OUTPUT:
        from ppdiag.reports.comparison import render  # noqa: PLC0415  (rich is slow to import)

        with terminal() as console:
            render(found, console)
    holding = _holding(found, conditions)
    for line in holding:
        click.echo(f"ppdiag: --fail-on {line}", err=True)
    if holding:
        sys.exit(CONDITION_HOLDS)


def _condition(text: str) -> Condition:
    condition = parse_condition(text, QUANTITIES)
    if condition.comparison not in (">", ">="):
        raise BadCondition(f"cannot read the condition {text!r}; what can be asked is whether B takes longer: > or >=")
    return condition


def _compare(a: Path, b: Path) -> Comparison:
    from ppdiag.analyzers.compare import compare as compared  # noqa: PLC0415  (numpy loads here, not for --help)

    return compared(take_apart([a]), take_apart([b]))


def _holding(found: Comparison, conditions: Sequence[Condition]) -> list[str]:
    """The conditions that hold beyond the noise, in words.

    Raises:
        NotComparable: there are conditions, and the steps of the two do not do the same work.
    """
    if conditions and not found.same_work:
        raise NotComparable(f"a step of {found.a.source} and one of {found.b.source} do not do the same work")
    changes = {SLOWER: found.step, **{part.name: part for part in found.parts}}
    return [line for condition in conditions if (line := _said(condition, changes[condition.name], found.step.a_s))]


def _said(condition: Condition, change: Change, step_s: float) -> str:
    share = change.change_s / step_s
    beyond_noise = change.outcome is Outcome.SLOWER
    return f"{condition} ({condition.name} is {share:.3g})" if beyond_noise and condition.is_true_of(share) else ""
