"""A formula's answer for a terminal: the numbers, then why they are so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ppdiag.diagnosis import percent
from ppdiag.reports.fitting import paragraph
from ppdiag.reports.words import duration, size, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDEST = 100
INDENT = 14


class Quantity(Protocol):
    """One number."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def value(self) -> float: ...  # noqa: D102
    @property
    def unit(self) -> str: ...  # noqa: D102


class Answer(Protocol):
    """What is shown."""

    @property
    def title(self) -> str: ...  # noqa: D102
    @property
    def quantities(self) -> Sequence[Quantity]: ...  # noqa: D102
    @property
    def formula(self) -> str: ...  # noqa: D102
    @property
    def derivation(self) -> str: ...  # noqa: D102
    @property
    def source(self) -> str: ...  # noqa: D102
    @property
    def notes(self) -> Sequence[str]: ...  # noqa: D102


def render(answer: Answer) -> str:
    """The answer as lines of text."""
    width = max(len(quantity.name) for quantity in answer.quantities)
    lines = [answer.title, ""]
    lines += [f"  {quantity.name:<{width}}  {shown(quantity)}" for quantity in answer.quantities]
    rows = [("formula", answer.formula), ("why", answer.derivation), ("source", answer.source)]
    rows += [("note", note) for note in answer.notes]
    return "\n".join([*lines, "", *(_paragraph(label, text) for label, text in rows)])


def shown(quantity: Quantity) -> str:
    """A number in the words of all reports."""
    if quantity.unit == "fraction":
        return percent(quantity.value)
    if quantity.unit == "bytes":
        return size(quantity.value)
    if quantity.unit == "bytes/s":
        return f"{size(quantity.value)}/s"
    if quantity.unit == "s":
        return duration(quantity.value)
    return f"{quantity.value:,.0f}" if quantity.value == round(quantity.value) else f"{quantity.value:,.2f}"


def _paragraph(label: str, text: str) -> str:
    first, rest = f"  {label:<{INDENT - 2}}", " " * INDENT
    return paragraph(visible(text), WIDEST, first=first, rest=rest)
