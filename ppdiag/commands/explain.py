"""``ppdiag explain``: what a symptom or a message means, and what to do about it."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import shutil
import textwrap
from typing import TYPE_CHECKING, NamedTuple

import click

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ppdiag.errors import PpdiagError

SYMPTOMS, MESSAGES, NCCL = "Symptoms", "Messages", "Messages of NCCL, as ppdiag nccl names them"
WIDEST = 100
"""Columns of a text, however wide the terminal."""
_MARKUP = re.compile(r"\[([^\]]+)\]\([^)]+\)|\*\*(.+?)\*\*")
"""Links and stress of the docs page: a terminal shows their text."""


class Topic(NamedTuple):
    """Something to explain."""

    group: str
    name: str
    title: str
    parts: tuple[tuple[str, str], ...]
    """Headings (may be empty) and their texts; paragraphs are parted by empty lines."""


@click.command()
@click.argument("name", required=False)
def explain(name: str | None) -> None:
    """Say what NAME means and what to do: a symptom, a message of ppdiag, or one of NCCL's.

    Reports give the names of symptoms in brackets, errors end with theirs. Without NAME all are listed.
    """
    topics = list(_topics())
    if name is None:
        click.echo("\n".join(_lists(topics)), nl=False)
        return
    wanted = name.strip("[]# ").lower().replace("_", "-")
    found = [topic for topic in topics if topic.name == wanted]
    if not found:
        near = difflib.get_close_matches(wanted, [topic.name for topic in topics], n=3, cutoff=0.6)
        guess = f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
        raise click.UsageError(f"no symptom or message is called {name!r}; {guess}ppdiag explain lists all")
    click.echo("\n".join(map(_text, found)), nl=False)


def _topics() -> Iterator[Topic]:
    from ppdiag import errors  # noqa: PLC0415  (as below: only this command needs them)
    from ppdiag.analyzers import symptoms  # noqa: PLC0415
    from ppdiag.analyzers.nccl.known_messages import KNOWN  # noqa: PLC0415

    table = symptoms.SYMPTOMS
    yield from (_symptom(name, table.load(name).__module__) for name in table.names())
    yield from (
        _message(kind)
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.PpdiagError)
    )
    for known in KNOWN:
        yield Topic(NCCL, known.slug, "a message of NCCL", (("What to do", known.advice), ("Source", known.source)))


def _lists(topics: Sequence[Topic]) -> Iterator[str]:
    for group in (SYMPTOMS, MESSAGES):
        yield f"{group}:\n" + _table({topic.name: topic.title for topic in topics if topic.group == group})
    names = ", ".join(dict.fromkeys(topic.name for topic in topics if topic.group == NCCL))
    yield f"{NCCL}:\n" + _fill(names, "  ", "  ") + "\n"


def _symptom(name: str, module_name: str) -> Topic:
    """A symptom: the docstring of its module, and what the module says by framework."""
    module = importlib.import_module(module_name)
    title, *paragraphs = inspect.cleandoc(module.__doc__ or name).split("\n\n")
    parts = []
    for paragraph in paragraphs:
        heading, _, text = paragraph.partition(": ")
        if heading == "Source":
            parts += [("How", _by_framework(getattr(module, "HOW", {})))]
            parts += [("What to measure after", getattr(module, "MEASURE_AFTER", ""))]
        parts.append((heading, text))
    return Topic(SYMPTOMS, name, _one_line(title), tuple(part for part in parts if part[1]))


def _by_framework(how: Mapping[str, str]) -> str:
    """What to do, a paragraph for each framework; one without a name where it is the same for all."""
    if len(how) < 2:
        return "".join(how.values())
    named: dict[str, str] = {}
    for framework, text in how.items():
        if text not in named.values():  # Megatron has two names in records
            named[framework] = text
    return "\n\n".join(f"{framework}: {text}" for framework, text in named.items())


def _message(kind: type[PpdiagError]) -> Topic:
    title, *paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    parts = [("", _MARKUP.sub(lambda match: match[1] or match[2], text)) for text in paragraphs]
    return Topic(MESSAGES, kind.slug, _one_line(title), (*parts, ("", f"Exit code {kind.exit_code}.")))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _width() -> int:
    return max(40, min(WIDEST, shutil.get_terminal_size().columns))


def _table(rows: Mapping[str, str]) -> str:
    column = max(map(len, rows)) + 4
    lines = [_fill(text, f"  {name:<{column - 2}}", " " * column) for name, text in rows.items()]
    return "\n".join(lines) + "\n"


def _fill(text: str, first: str, others: str) -> str:
    return textwrap.fill(
        _one_line(text),
        _width(),
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _text(topic: Topic) -> str:
    lines = [_fill(f"{topic.name}: {topic.title}", "", "")]
    for heading, text in topic.parts:
        lines += ["", *([heading] if heading else []), *_paragraphs(text, "  " if heading else "")]
    return "\n".join(lines) + "\n"


def _paragraphs(text: str, indent: str) -> Iterator[str]:
    """The text in lines; items of a list stay items."""
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ""
        for item in re.split(r"\n(?=- )", paragraph):
            yield _fill(item, indent, indent + ("  " if item.startswith("- ") else ""))
