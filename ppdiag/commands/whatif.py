"""``ppdiag whatif``: what a change of a recorded job would do to its step time."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ppdiag.errors import BadShape, NothingRecorded
from ppdiag.options import NumberRange, layout_options
from ppdiag.outputs import printing, take_apart
from ppdiag.silence import why_silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.analyzers.what_if import Change, LinkFactor, Place, Run
    from ppdiag.analyzers.what_if.survey import Answer
    from ppdiag.stated import StatedLayout

GIB = 1 << 30
MOST_CHANGES = 64
"""Combinations of alternatives that one call predicts."""
MOST_NUMBER = 1_000_000


class Wish(NamedTuple):
    """What the options ask for, as they were written."""

    microbatches: str | None
    keep_batch: bool
    schedule: tuple[str, ...]
    layers: str | None
    layers_now: str | None
    balance: bool
    link: tuple[str, ...]
    network: str | None
    overlap: bool
    checkpoint: bool
    repair: tuple[str, ...]

    @property
    def changes_something(self) -> bool:
        """Whether any change is asked for."""
        return any(self._replace(keep_batch=False, layers_now=None))


@click.command()
@click.argument("paths", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--microbatches", metavar="M[,M...]", help="Other numbers of microbatches.")
@click.option("--keep-batch", is_flag=True, help="With --microbatches: smaller ones of the same batch, not more.")
@click.option("--schedule", multiple=True, metavar="NAME[:V]", help="Another schedule. May be repeated.")
@click.option("--layers", metavar="N,N,...", help="Another split: layers of each stage.")
@click.option(
    "--layers-now",
    metavar="N,N,...",
    help="Layers of each stage in the run (default: as recorded, else as even as they go).",
)
@click.option("--balance", is_flag=True, help="The best split of the layers, by measured times.")
@click.option("--link", multiple=True, metavar="A-B=xF", help="The link of two stages F times as fast.")
@click.option("--network", metavar="xF", help="All links F times as fast.")
@click.option("--overlap", is_flag=True, help="No rank waits for a send, and messages travel at once.")
@click.option("--checkpoint", is_flag=True, help="Each backward runs its forward again.")
@click.option("--repair", multiple=True, metavar="stage:N|rank:N", help="No slower than the others. May be repeated.")
@click.option(
    "--memory-limit",
    metavar="GIB",
    type=NumberRange(0, 1e6),
    help="What a rank may hold at most (default: its device).",
)
@layout_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def whatif(  # noqa: PLR0913  (one argument an option)
    paths: tuple[Path, ...],
    *,
    microbatches: str | None,
    keep_batch: bool,
    schedule: tuple[str, ...],
    layers: str | None,
    layers_now: str | None,
    balance: bool,
    link: tuple[str, ...],
    network: str | None,
    overlap: bool,
    checkpoint: bool,
    repair: tuple[str, ...],
    memory_limit: float | None,
    as_json: bool,
    layout: StatedLayout,
) -> None:
    """Say what a change would do to the step time of a recorded job.

    Several options are one change; lists (--microbatches 8,16, --schedule twice) are alternatives. Without any, every
    single change that makes sense is tried, the most gain first.
    """
    wish = Wish(microbatches, keep_batch, schedule, layers, layers_now, balance, link, network, overlap, checkpoint,
                repair)  # fmt: skip
    _check(wish)
    run = _run(paths, layout)
    limit_bytes = None if memory_limit is None else memory_limit * GIB
    found = _answer(run, wish, limit_bytes)
    from ppdiag.reports import what_if as words  # noqa: PLC0415  (numpy loads here)

    if not found.predictions and found.refused:
        raise BadShape("; ".join(dict.fromkeys(one.reason for one in found.refused)))
    with printing():
        click.echo(json.dumps(words.plain(run, found), indent=1) if as_json else words.table(run, found))


def _check(wish: Wish) -> None:
    """Refuses what needs no run to be seen."""
    if wish.keep_batch and wish.microbatches is None:
        raise click.UsageError("--keep-batch needs --microbatches")
    if wish.balance and wish.layers is not None:
        raise click.UsageError("--balance finds the split that --layers gives: use one of them")


def _run(paths: Sequence[Path], layout: StatedLayout) -> Run:
    from ppdiag.analyzers.what_if import run_of  # noqa: PLC0415  (numpy and pandas load here)

    try:
        return run_of(take_apart(paths, layout))
    except NothingRecorded as error:
        raise NothingRecorded(f"{error}. {why_silent(paths[0])}") from error


def _answer(run: Run, wish: Wish, limit_bytes: float | None) -> Answer:
    from ppdiag.analyzers.what_if import Change, memory, predict, survey  # noqa: PLC0415

    if limit_bytes is None:
        limit_bytes = memory.device_bytes(run)
    elif predict(run, Change()).memory.bytes_R is None:
        raise BadShape("the record has no readings of the device's memory: --memory-limit has nothing to go by")
    if wish.changes_something:
        changes = _changes(run, wish, limit_bytes)
    else:
        now = _numbers(wish.layers_now, "--layers-now") if wish.layers_now else None
        changes = survey.single_changes(run, now=now, limit_bytes=limit_bytes)
    return survey.answer(run, changes, limit_bytes=limit_bytes)


def _changes(run: Run, wish: Wish, limit_bytes: float | None) -> list[Change]:
    """The change that is asked for, once for each combination of alternatives."""
    from ppdiag.analyzers.what_if import Change, plans, survey  # noqa: PLC0415

    now = _numbers(wish.layers_now, "--layers-now") if wish.layers_now else None
    layers = _numbers(wish.layers, "--layers") if wish.layers else None
    if wish.balance:
        layers = survey.best_layers(run, now, limit_bytes=limit_bytes).layers
    links = tuple(_link(text) for text in wish.link)
    if wish.network is not None:
        links += (_network(wish.network),)
    counts: tuple[int | None, ...] = (None,)
    if wish.microbatches:
        counts = _numbers(wish.microbatches, "--microbatches")
    schedules: list[tuple[str | None, int | None]] = [(None, None)]
    if wish.schedule:
        schedules = [_schedule(text) for text in wish.schedule]
    if len(counts) * len(schedules) > MOST_CHANGES:
        raise BadShape(f"{len(counts) * len(schedules)} combinations are too many; {MOST_CHANGES} are the most")
    return [
        Change(
            microbatches=count,
            keep_batch=wish.keep_batch,
            schedule=plans.known_schedule(name) if name else None,
            chunks=chunks,
            layers=layers,
            layers_now=now,
            links=links,
            overlap=wish.overlap,
            checkpoint=wish.checkpoint,
            repair=tuple(_place(text) for text in wish.repair),
        )
        for count, (name, chunks) in product(counts, schedules)
    ]


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers above 0, with commas between.

    Raises:
        BadShape: they are something else.
    """
    parts = text.split(",")
    if not all(re.fullmatch(r" *[0-9]{1,7} *", part) and 0 < int(part) <= MOST_NUMBER for part in parts):
        raise BadShape(f"cannot read {option} {text!r:.50}; write numbers from 1 with commas between, e.g. 8,16")
    return tuple(int(part) for part in parts)


def _schedule(text: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"([A-Za-z0-9-]+)(?::([1-9][0-9]{0,2}))?", text)
    if match is None:
        raise BadShape(f"cannot read --schedule {text!r:.50}; write NAME or NAME:V, e.g. interleaved:2")
    return match[1], int(match[2]) if match[2] else None


def _link(text: str) -> LinkFactor:
    from ppdiag.analyzers.what_if import LinkFactor  # noqa: PLC0415

    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})=(x.+)", text)
    if match is None:
        raise BadShape(f"cannot read --link {text!r:.50}; write two stages and how many times as fast, e.g. 0-1=x10")
    return LinkFactor((int(match[1]), int(match[2])), _faster(match[3], "--link"))


def _network(text: str) -> LinkFactor:
    from ppdiag.analyzers.what_if import LinkFactor  # noqa: PLC0415

    return LinkFactor(None, _faster(text, "--network"))


def _faster(text: str, option: str) -> float:
    """``xF`` as a number.

    Raises:
        BadShape: it is none, or not from a thousandth to a million.
    """
    match = re.fullmatch(r"x([0-9]{1,7}(?:\.[0-9]{1,6})?)", text)
    if match is None or not 1e-3 <= float(match[1]) <= MOST_NUMBER:
        raise BadShape(f"cannot read {option} {text!r:.50}; write how many times as fast, from x0.001 to x1000000")
    return float(match[1])


def _place(text: str) -> Place:
    from ppdiag.analyzers.what_if import Place  # noqa: PLC0415

    match = re.fullmatch(r"(stage|rank):([0-9]{1,7})", text)
    if match is None:
        raise BadShape(f"cannot read --repair {text!r:.50}; write stage:N or rank:N")
    return Place(match[1], int(match[2]))
