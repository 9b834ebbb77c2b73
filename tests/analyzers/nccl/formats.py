"""NCCL's own format strings, and lines made by filling them."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ppdiag.analyzers.nccl.lines import read_lines
from ppdiag.analyzers.nccl.parser import Parser
from ppdiag.analyzers.nccl.transports import pairs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ppdiag.analyzers.nccl.model import NcclReport

DATA = Path(__file__).resolve().parents[2] / "data" / "nccl"
HEADER = "gpu1:31:40 [0] NCCL INFO "
_SPECIFIER = re.compile(r"%(0?)(\d*)(?:\.\d+)?(?:ll|l|z|t)?([dsxXpuifm])")


class NcclFormat(NamedTuple):
    """A row of the table of format strings."""

    level: str
    first: str
    last: str
    text: str


def all_formats() -> list[NcclFormat]:
    with (DATA / "format_strings_by_version.tsv").open(encoding="utf-8", newline="") as stream:
        rows = csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [NcclFormat(level, first, last, text) for level, first, last, _, text in list(rows)[1:]]


FORMATS = all_formats()


def fill(text: str, *values: object, glued: str = "") -> str:
    """The line that printf makes; ``glued`` are the choices of a ?: that stand behind the format string."""
    assert text.endswith(glued)
    left = iter(values)

    def one(match: re.Match[str]) -> str:
        value = str(next(left))
        return value.zfill(int(match[2])) if match[1] and match[2] else value

    filled = _SPECIFIER.sub(one, text.removesuffix(glued))
    assert next(left, None) is None, f"too many values for {text}"
    return filled


def fill_somehow(text: str) -> str:
    """The line with any values of the right kinds."""
    kinds = {"s": "word", "p": "0x7f00", "x": "1a", "X": "1A", "f": "1.5", "m": "Success"}
    return _SPECIFIER.sub(lambda match: kinds.get(match[3], "3"), text)


def read(
    text: str | bytes, ranks: Mapping[tuple[str, int], int] | None = None, world_size: int | None = None
) -> NcclReport:
    """The report of one log."""
    parser = Parser()
    parser.source("log")
    for line in read_lines(io.BytesIO(text if isinstance(text, bytes) else text.encode())):
        parser.feed(line)
    return parser.report(ranks, world_size)


def read_line(text: str) -> NcclReport:
    """The report of one INFO entry of thread 40 in process 31 on gpu1, GPU 0."""
    return read(f"{HEADER}{text}\n")


def between(report: NcclReport, source: int, destination: int) -> str | None:
    """What connects two ranks of the job; those of several, the one of the most channels first."""
    found = [pair for pair in pairs(report) if (pair.source, pair.destination) == (source, destination)]
    return " + ".join(pair.transport for pair in sorted(found, key=lambda pair: -pair.channels)) or None
