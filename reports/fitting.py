"""Text that fits the terminal: paragraphs are wrapped, and tables give up columns instead of breaking."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NARROWEST = 40
"""Columns: text in a narrower terminal is left to break."""
ANY = 10_000
"""Columns of what is no terminal: a table that goes into a file or a pipe is whole."""


def columns(widest: int = ANY) -> int:
    """Columns that text may take: those of the terminal, or of the variable COLUMNS, and ``widest`` at most."""
    return min(widest, max(NARROWEST, shutil.get_terminal_size((widest, 0)).columns))


def paragraph(text: str, widest: int, *, first: str = "", rest: str = "") -> str:
    """The text, wrapped.

    Args:
        text: one paragraph.
        widest: columns that a line takes at most, in however wide a terminal.
        first: what stands before the first line.
        rest: what stands before the others.
    """
    return textwrap.fill(text, columns(widest), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def table(rows: Sequence[Sequence[str]], *, gives_up: Sequence[str] = (), left: int = 0) -> list[str]:
    """Rows as lines, columns two blanks apart.

    Args:
        rows: the first has the names of the columns.
        gives_up: names of columns that a terminal too narrow for all does without, in this order.
        left: so many columns are aligned to the left, the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = that_fit(rows, columns(), gives_up)
    return ["  ".join(_cell(row[i], widths[i], left=i < left) for i in shown).rstrip() for row in rows]


def that_fit(rows: Sequence[Sequence[str]], width: int, gives_up: Sequence[str]) -> list[int]:
    """Numbers of the columns of a table that fit into ``width``: those of ``gives_up`` go first, in its order."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = list(range(len(widths)))
    for name in gives_up:
        if sum(widths[i] for i in shown) + 2 * (len(shown) - 1) <= width:
            break
        shown = [i for i in shown if rows[0][i] != name]
    return shown


def _cell(text: str, width: int, *, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)
