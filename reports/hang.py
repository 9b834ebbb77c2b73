"""The summary of a hang for a terminal: who holds the job up, who waits for whom, and what to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ppdiag.reports.words import rank_list, visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, RenderableType

    from ppdiag.hang import Hang, RankAtHang, Root

MOST_STUCK = 4
MOST_RANKS = 32
MOST_ABSENT = 4


def render(hang: Hang, console: Console) -> None:
    """Print what was found."""
    parts: list[list[RenderableType]] = [
        [_text(hang.text, "bold red" if hang.roots else "bold")],
        _roots(hang.roots),
        _stuck(hang),
        _ranks(hang.ranks),
        _list("Called differently", hang.mismatches),
        _list("Read this with care", hang.warnings),
    ]
    for i, body in enumerate(part for part in parts if part):
        if i:
            console.print()
        console.print(Group(*body), markup=False, highlight=False, emoji=False, soft_wrap=False)


def _text(text: str, style: str = "") -> Text:
    return Text(visible(text), style=style, overflow="fold")


def _grid(rows: Iterable[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(_text(label), _text(value))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _roots(roots: Sequence[Root]) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for root in roots:
        wait = f"{root.held_up} other ranks, directly or through others" if root.held_up else "no other rank"
        lines += [_text(root.text, "bold"), _grid([("look at", root.look_at), ("waiting", wait)])]
    return lines


def _stuck(hang: Hang) -> list[RenderableType]:
    """The ops that lack a rank with which the waiting begins: those of all others follow from them."""
    begin = {rank for root in hang.roots for rank in root.ranks}
    shown = [row for row in hang.stuck if begin & {one.rank for one in row.absent}][:MOST_STUCK]
    lines: list[RenderableType] = [_text("Ops that wait for them", "bold")] if shown else []
    for row in shown:
        absent = [f"rank {one.rank} {one.detail}" for one in row.absent[:MOST_ABSENT]]
        more = [f"{len(row.absent) - MOST_ABSENT} more"] if len(row.absent) > MOST_ABSENT else []
        lines.append(_text(f"  {row.operation.short}, group {row.operation.group_words}, {row.operation.sizes}"))
        rows = [("in it", f"ranks {rank_list(row.waiting)}"), ("missing", rank_list(row.missing) or "nobody")]
        rows += [("" if i else "waits for", text) for i, text in enumerate([*absent, *more])]
        lines.append(Padding(_grid(rows), (0, 0, 0, 2), expand=False))
    return lines


def _ranks(ranks: Sequence[RankAtHang]) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rank", justify="right", no_wrap=True)
    for name in ("stands in", "of group", "waits for"):
        table.add_column(name, overflow="fold")
    for row in ranks[:MOST_RANKS]:
        operation = row.first_pending
        group = "" if operation is None else operation.description or operation.group
        called = f", {row.called_at}" if row.called_at else ""
        cells = (f"{row.rank}", _stands_in(row) + called, group, rank_list(row.waits_for))
        table.add_row(*(_text(cell or "-") for cell in cells))
    left_out = len(ranks) - MOST_RANKS
    return [
        _text("Ranks, each with the first op that it has called and not finished", "bold"),
        Padding(table, (0, 0, 0, 2), expand=False),
        *([_text(f"  {left_out} more ranks are left out; --json has all.", "dim")] if left_out > 0 else []),
    ]


def _stands_in(row: RankAtHang) -> str:
    """The op as the rank sees it."""
    operation = row.first_pending
    if operation is None:
        return "nothing" if row.dump else "no dump"
    if operation.source is None:
        return operation.short
    if operation.source == row.rank:
        return f"send {operation.sequence} to rank {operation.destination}"
    return f"receive {operation.sequence} from rank {operation.source}"


def _list(title: str, lines: Sequence[str]) -> list[RenderableType]:
    return [_text(title, "bold"), _grid(("!", line) for line in lines)] if lines else []
