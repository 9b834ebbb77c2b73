"""What changed between two runs, for a terminal: how much, why, where, and whether it is more than noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ppdiag.comparison import WORK, Outcome, What
from ppdiag.diagnosis import percent
from ppdiag.reports.fitting import that_fit
from ppdiag.reports.words import cause_label, count_of, duration, known_duration, visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, RenderableType

    from ppdiag.comparison import Change, Comparison, PlaceChange, Side, StageChange

MOST_PLACES = 8
MOST_STAGES = 16
WIDE = 70
"""In narrower terminals the table of single ops is left out."""
GIVES_UP = ("95 % interval", "of A's step", "A", "B")
"""Columns of the table of parts that a narrow terminal does without, in this order."""
INDENT = 2
MOST = 0.5
"""A place is most of a change that it has more than this share of."""
SHOWN = 0.001
"""Places that change less of the step than this are not listed."""
STYLES = {Outcome.SLOWER: "bold red", Outcome.FASTER: "bold green", Outcome.UNKNOWN: "bold yellow"}
NOISE = {
    Outcome.SLOWER: "B is {share} slower than A",
    Outcome.FASTER: "B is {share} faster than A",
    Outcome.NO_DIFFERENCE: "No difference beyond the noise of the steps",
    Outcome.UNKNOWN: "Too few steps to tell a difference from noise",
}


def render(found: Comparison, console: Console) -> None:
    """Print the comparison."""
    unit = _Unit(max(found.step.a_s, found.step.b_s))
    parts: list[list[RenderableType]] = [
        _headline(found, unit),
        [_grid([("A", _side(found.a)), ("B", _side(found.b))])],
        _parts(found, unit, console.width),
        _places(found, unit),
        _stages(found, console.width),
        [_text("Read this with care", "bold"), _grid([("!", note) for note in found.notes])] if found.notes else [],
    ]
    for i, part in enumerate(part for part in parts if part):
        if i:
            console.print()
        for line in part:
            console.print(line, markup=False, highlight=False, emoji=False)


class _Unit:
    """One unit for all times of the tables, so that they can be added up by eye."""

    def __init__(self, largest_s: float) -> None:
        self.factor, self.name = next(
            ((factor, name) for factor, name in ((1.0, "s"), (1e-3, "ms")) if largest_s >= factor), (1e-6, "us")
        )

    def signed(self, seconds: float) -> str:
        return f"{self._rounded(seconds):+.2f}" if math.isfinite(seconds) else "?"

    def plain(self, seconds: float) -> str:
        return f"{self._rounded(seconds):.2f}"

    def _rounded(self, seconds: float) -> float:
        """Two decimals; what rounds to nothing has no sign."""
        return round(seconds / self.factor, 2) + 0.0


def _text(text: str, style: str = "") -> Text:
    return Text(visible(text), style, overflow="fold")


def _grid(rows: Iterable[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(_text(label), _text(text))
    return table


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    return Padding(table, (0, 0, 0, INDENT), expand=False)


def _headline(found: Comparison, unit: _Unit) -> list[RenderableType]:
    step = found.step
    text = NOISE[step.outcome].format(share=percent(abs(found.slower)))
    if not found.same_work and step.outcome in (Outcome.SLOWER, Outcome.FASTER):
        longer = "longer" if step.change_s > 0 else "shorter"
        text = f"A step of B is {percent(abs(found.slower))} {longer} than one of A, and does not do the same work"
    lines: list[RenderableType] = [_text(text, STYLES.get(step.outcome, "bold"))]
    first = _largest_part(found)
    if first is not None and step.outcome in (Outcome.SLOWER, Outcome.FASTER):
        part = "Most of it" if first.change_s / step.change_s > MOST else "The largest part"
        lines.append(_text(f"  {part}: {_place(first)} ({unit.signed(first.change_s)} {unit.name} a step)"))
    return lines


def _largest_part(found: Comparison) -> PlaceChange | None:
    """The place that changed the step most, in the direction in which it changed."""
    sign = math.copysign(1.0, found.step.change_s)
    named = [place for place in found.places if place.what not in (What.TOGETHER, What.UNEXPLAINED)]
    return max((place for place in named if sign * place.change_s > 0), key=lambda p: sign * p.change_s, default=None)


def _side(side: Side) -> str:
    job = side.job
    shape = f"P={job.pp} V={job.vpp} M={job.microbatches}"
    return (
        f"{side.source} ({count_of(job.world_size, 'rank')}, {shape}, {job.schedule_name}; "
        f"{count_of(side.steps, 'step')}, median {duration(side.median_s)})"
    )


def _parts(found: Comparison, unit: _Unit, width: int) -> list[RenderableType]:
    names = ("why", "A", "B", "change", "95 % interval", "of A's step")
    rows = [_row(_part_name(part.name), part, found.step.a_s, unit) for part in found.parts]
    rows.append(_row("step", found.step, found.step.a_s, unit))
    fit = that_fit([names, *rows], width - INDENT, GIVES_UP)
    shown = [[row[i] for i in fit] for row in rows]
    return [_text(f"Mean time of a step, in {unit.name}", "bold"), _table([names[i] for i in fit], shown)]


def _part_name(name: str) -> str:
    return name if name == WORK else cause_label(name)


def _row(name: str, change: Change, step_s: float, unit: _Unit) -> tuple[str, ...]:
    known = math.isfinite(change.low_s)
    interval = f"{unit.signed(change.low_s)} to {unit.signed(change.high_s)}" if known else "unknown"
    share = f"{100 * change.change_s / step_s:+.1f} %"
    return name, unit.plain(change.a_s), unit.plain(change.b_s), unit.signed(change.change_s), interval, share


def _places(found: Comparison, unit: _Unit) -> list[RenderableType]:
    """The largest changes; the rest in one row, so that the column sums to the change of the step."""
    if not found.places:
        return []
    listed = [place for place in found.places if abs(place.change_s) >= SHOWN * found.step.a_s][:MOST_PLACES]
    rest_s = found.step.change_s - sum(place.change_s for place in listed)
    rows = [(_place(place), unit.signed(place.change_s)) for place in listed]
    rows += [("all others", unit.signed(rest_s)), ("step", unit.signed(found.step.change_s))]
    title = f"Where: what the step changes by when this place alone changes, in {unit.name}"
    return [_text(title, "bold"), _table(("place", "change"), rows)]


def _place(place: PlaceChange) -> str:
    names = {
        What.WORK: f"work of stage {place.stage}" + (f" on rank {place.rank}" if place.rank is not None else ""),
        What.OPTIMIZER: "optimizer",
        What.HOST: f"host of rank {place.rank}",
        What.COLLECTIVE: f"collectives of group {place.group}",
        What.TOGETHER: "several together",
        What.UNEXPLAINED: "unexplained",
    }
    if place.what is What.TRANSFER and place.link is not None:
        return f"transfers between ranks {place.link[0]} and {place.link[1]}"
    return names[place.what]


def _stages(found: Comparison, width: int) -> list[RenderableType]:
    """Medians of single ops: the stages that changed most, in their order."""
    if width < WIDE or not found.stages:
        return []
    chosen = sorted(found.stages, key=lambda stage: -abs(sum(stage.b_s) - sum(stage.a_s)))[:MOST_STAGES]
    chosen = sorted(chosen, key=lambda stage: stage.stage)
    kinds = [i for i in range(3) if any(stage.a_s[i] or stage.b_s[i] for stage in found.stages)]
    names = ["stage", *(f"{'FBW'[i]} {side}" for i in kinds for side in "AB"), "change"]
    left_out = len(found.stages) - len(chosen)
    title = "Median time of one op" + (f" ({left_out} stages that changed less are left out)" if left_out else "")
    return [_text(title, "bold"), _table(names, [_stage(stage, kinds) for stage in chosen])]


def _stage(stage: StageChange, kinds: Sequence[int]) -> list[str]:
    times = [known_duration(side[i]) for i in kinds for side in (stage.a_s, stage.b_s)]
    before, after = sum(stage.a_s), sum(stage.b_s)
    return [str(stage.stage), *times, f"{100 * (after / before - 1):+.1f} %" if before > 0 else "-"]
