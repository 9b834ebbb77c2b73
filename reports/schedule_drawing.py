"""Drawings of schedules: text for a terminal, SVG, PNG, and a page on which they run.

Several schedules share one time axis, so that their lengths compare by eye. A drawing holds numbers and our own words.
"""

from __future__ import annotations

import io
import textwrap
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from ppdiag.reports.figures import LIGHT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

COLOURS = {"F": LIGHT.forward, "B": LIGHT.backward, "W": LIGHT.weight}
MOST_BOXES = 40_000
"""More than this is no drawing any more: a browser would stall on it."""
NARROWEST = 40
"""Columns below which no lane is drawn."""


class Box(NamedTuple):
    """One op on its rank's lane."""

    rank: int
    kind: str
    """F, B or W."""
    chunk: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Picture:
    """One schedule to draw.

    Attributes:
        title: its name and shape.
        ranks: lanes.
        chunks: stages a rank.
        boxes: the ops.
        facts: what is known about it, as (label, value).
        layers: which layers of the model each rank holds; empty where that was not asked.
    """

    title: str
    ranks: int
    chunks: int
    boxes: tuple[Box, ...]
    facts: tuple[tuple[str, str], ...]
    layers: tuple[str, ...] = ()

    @property
    def length(self) -> float:
        """When the last op ends."""
        return max((box.end for box in self.boxes), default=0.0)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """All that is known about it, a row each."""
        return [*self.facts, *((f"layers of rank {rank}", layers) for rank, layers in enumerate(self.layers))]

    def lane(self, rank: int) -> str:
        """What stands beside the lane of a rank."""
        return f"rank {rank}" + (f": layers {self.layers[rank]}" if self.layers else "")

    def summary(self, width: int) -> list[str]:
        """The facts as lines of so many characters."""
        return textwrap.wrap("; ".join(f"{label} {value}" for label, value in self.facts), width)


# -- text -------------------------------------------------------------------------------------------------------------


def text(pictures: Sequence[Picture], *, width: int) -> str:
    """All schedules, one under the other, no wider than ``width`` columns.

    Where there is room each op is its letter and microbatch (with a letter for the chunk: ``F0b``), ``-`` while it
    lasts; else one letter a column, lower case in the odd chunks. Idle is ``.`` in both.
    """
    length = max(picture.length for picture in pictures)
    ranks = max(picture.ranks for picture in pictures)
    margin = len(f"rank {ranks - 1}  ")
    columns = max(NARROWEST, width - margin)
    shortest = min(box.end - box.start for picture in pictures for box in picture.boxes if box.end > box.start)
    labelled = max(len(_label(box, picture)) for picture in pictures for box in picture.boxes) + 1
    scale = labelled / shortest
    spell_out = scale * length <= columns
    if not spell_out:
        scale = columns / length
    blocks = ["\n".join([picture.title, *_lanes(picture, scale, margin, spell_out=spell_out), "",
                         *_facts(picture)]) for picture in pictures]  # fmt: skip
    return "\n\n".join(blocks)


def _lanes(picture: Picture, scale: float, margin: int, *, spell_out: bool) -> list[str]:
    lanes = [["."] * round(picture.length * scale) for _ in range(picture.ranks)]
    for box in picture.boxes:
        first, last = round(box.start * scale), round(box.end * scale)
        if spell_out and last > first:
            mark = _label(box, picture).ljust(last - first - 1, "-") + " "
        else:
            mark = (box.kind.lower() if box.chunk % 2 else box.kind) * (last - first)
        lanes[box.rank][first:last] = mark
    return [f"{f'rank {rank}':<{margin}}{''.join(lane)}".rstrip() for rank, lane in enumerate(lanes)]


def _label(box: Box, picture: Picture) -> str:
    return f"{box.kind}{box.microbatch}" + (chr(ord("a") + box.chunk % 26) if picture.chunks > 1 else "")


def _facts(picture: Picture) -> list[str]:
    width = max((len(label) for label, _ in picture.rows), default=0)
    return [f"  {label:<{width}}  {value}" for label, value in picture.rows]


# -- SVG and page ------------------------------------------------------------------------------------------------------

LANE = 26
"""Height of a lane in pixels."""
GAP = 4
RIGHT = 16
TITLE = 26
LINE = 15
"""Height of a line of facts."""
FOOT = 22
LEGEND = 24
LETTER = 6.4
"""Width of a character of the labels in pixels."""
SUMMARY = 165
"""Characters of a line of facts, in SVG and PNG."""
PLAY_S = 12.0
"""Length of the animation."""
MEANING = (("F", "forward"), ("B", "backward"), ("W", "weight gradient"))
PALER = "paler: the odd stages of a rank"


def svg(pictures: Sequence[Picture], *, width: int = 1100, animate: bool = False) -> str:
    """All schedules as one SVG; ``animate`` lets the ops appear when they run."""
    length = max(picture.length for picture in pictures) or 1.0
    left = 16 + LETTER * max(len(picture.lane(rank)) for picture in pictures for rank in range(picture.ranks))
    scale = max(width - left - RIGHT, width / 2) / length
    width = round(left + length * scale + RIGHT)
    parts: list[str] = _svg_legend(left)
    top = float(LEGEND)
    for picture in pictures:
        parts += _svg_picture(picture, (left, top), scale, PLAY_S / length if animate else None)
        top += _head(picture) + picture.ranks * (LANE + GAP) + FOOT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top:g}" width="{width}" height="{top:g}" '
        f'role="img" aria-label="{escape("; ".join(picture.title for picture in pictures))}" '
        f'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12">'
    )
    return "\n".join([head, f"<style>{_style(animate=animate)}</style>", *parts, "</svg>", ""])


def _head(picture: Picture) -> int:
    """Height of what stands above the lanes: the title and the facts."""
    return TITLE + LINE * len(picture.summary(SUMMARY)) + 4


def _svg_legend(left: float) -> list[str]:
    parts, x = [], left
    for kind, meaning in MEANING:
        parts.append(f'<rect class="{kind}" x="{x:g}" y="6" width="12" height="12"/>')
        parts.append(f'<text x="{x + 17:g}" y="16">{kind} {meaning}</text>')
        x += 40 + LETTER * len(meaning)
    return [*parts, f'<text x="{x:g}" y="16">{PALER}</text>']


def _style(*, animate: bool) -> str:
    rules = f"text{{fill:{LIGHT.ink}}} .t{{font-size:14px;font-weight:600}} .l{{fill:#fff;font-size:11px}} "
    rules += ".w{fill:#10222c} .o{opacity:.72} "
    rules += "".join(f".{kind}{{fill:{colour}}} " for kind, colour in COLOURS.items())
    if animate:
        rules += "@keyframes a{from{opacity:0}} .p{animation:a .25s linear backwards} "
        rules += "@media (prefers-reduced-motion:reduce){.p{animation:none}}"
    return rules


def _svg_picture(picture: Picture, corner: tuple[float, float], scale: float, seconds: float | None) -> list[str]:
    left, top = corner
    lanes = top + _head(picture)
    parts = [f'<text class="t" x="{left:g}" y="{top + 20:g}">{escape(picture.title)}</text>']
    for number, line in enumerate(picture.summary(SUMMARY), 1):
        parts.append(f'<text x="{left:g}" y="{top + 20 + number * LINE:g}">{escape(line)}</text>')
    for rank in range(picture.ranks):
        y = lanes + rank * (LANE + GAP)
        length = picture.length * scale
        parts.append(f'<rect x="{left:g}" y="{y:g}" width="{length:.2f}" height="{LANE}" fill="#eef1f4"/>')
        parts.append(f'<text x="{left - 8:g}" y="{y + 17:g}" text-anchor="end">{escape(picture.lane(rank))}</text>')
    parts += [_svg_box(box, picture, (left, lanes), scale, seconds) for box in picture.boxes]
    return parts


def _svg_box(box: Box, picture: Picture, corner: tuple[float, float], scale: float, seconds: float | None) -> str:
    x, y = corner[0] + box.start * scale, corner[1] + box.rank * (LANE + GAP)
    width = (box.end - box.start) * scale
    label = _label(box, picture)
    delay = "" if seconds is None else f' class="p" style="animation-delay:{box.start * seconds:.2f}s"'
    shade = " o" if box.chunk % 2 else ""
    place = f'x="{x:.2f}" y="{y:g}" width="{max(width - 0.6, 0.2):.2f}" height="{LANE}"'
    shape = f'<rect class="{box.kind}{shade}" {place}/>'
    words = ""
    if width >= LETTER * len(label) + 2:
        dark = " w" if box.kind == "W" else ""
        words = f'<text class="l{dark}" x="{x + width / 2:.2f}" y="{y + 17:g}" text-anchor="middle">{label}</text>'
    return f"<g{delay}><title>{label}: {box.start:g} to {box.end:g}</title>{shape}{words}</g>"


def page(pictures: Sequence[Picture]) -> str:
    """A page that needs no network, on which the schedules run once; the link runs them again."""
    tables = "".join(
        f"<h2>{escape(picture.title)}</h2><table>"
        + "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in picture.rows)
        + "</table>"
        for picture in pictures
    )
    style = (
        f"body{{font:15px/1.5 ui-sans-serif,system-ui,sans-serif;color:{LIGHT.ink};background:#fff;margin:2rem auto;"
        "max-width:1140px;padding:0 1rem} div{overflow-x:auto} svg{max-width:100%;min-width:48rem;height:auto} "
        "h2{font-size:1rem;margin:1.2rem 0 .2rem} "
        "th{text-align:left;font-weight:400;padding:.1rem 2rem .1rem 0} td{font-variant-numeric:tabular-nums}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Pipeline schedules</title><style>{style}</style></head><body><h1>Pipeline schedules</h1>"
        f'<p><a href="">Run again</a></p>\n<div>{svg(pictures, animate=True)}</div>{tables}</body></html>\n'
    )


# -- PNG --------------------------------------------------------------------------------------------------------------

LANE_INCHES = 0.34
MOST_INCHES = 160.0
"""Of all lanes together; above it they get thinner."""
LETTERS = 150
"""About so many characters of the labels go into the figure's width."""


def png(pictures: Sequence[Picture]) -> bytes:
    """All schedules as one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (slow to import)
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    heights = [picture.ranks + 1 for picture in pictures]
    lines = sum(1 + len(picture.summary(SUMMARY)) for picture in pictures)
    height = min(LANE_INCHES * sum(heights), MOST_INCHES) + 0.3 + 0.2 * lines + 0.3 * len(pictures)
    figure = Figure(figsize=(12, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    length = max(picture.length for picture in pictures) or 1.0
    rows = figure.subplots(len(pictures), 1, squeeze=False, height_ratios=heights)[:, 0]
    for picture, row in zip(pictures, rows, strict=True):
        _png_picture(row, picture, length)
    patches = [Patch(color=COLOURS[kind], label=f"{kind} {meaning}") for kind, meaning in MEANING]
    patches.append(Patch(alpha=0, label=PALER))
    figure.legend(handles=patches, loc="outside upper left", ncols=4, frameon=False, fontsize=8, labelcolor=LIGHT.ink)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _png_picture(row: Axes, picture: Picture, length: float) -> None:
    row.set_title("\n".join(picture.summary(SUMMARY)), loc="left", fontsize=8, color=LIGHT.ink)
    row.annotate(picture.title, (0, 1), (0, 8 + 11 * len(picture.summary(SUMMARY))), xycoords="axes fraction",
                 textcoords="offset points", fontsize=10, fontweight="bold", color=LIGHT.ink)  # fmt: skip
    row.set(xlim=(0, length), ylim=(picture.ranks - 0.5, -0.5), yticks=range(picture.ranks))
    row.set_yticklabels([picture.lane(rank) for rank in range(picture.ranks)], fontsize=8, color=LIGHT.ink)
    row.tick_params(axis="x", labelsize=8, colors=LIGHT.ink)
    row.spines[["top", "right", "left"]].set_visible(False)
    row.barh(range(picture.ranks), [picture.length] * picture.ranks, height=0.86, color="#eef1f4")
    _png_boxes(row, picture)
    for box in picture.boxes:
        label, lasts = _label(box, picture), box.end - box.start
        if lasts / length * LETTERS >= len(label):
            colour = "#10222c" if box.kind == "W" else "white"
            row.text(box.start + lasts / 2, box.rank, label, ha="center", va="center", fontsize=7, color=colour)


def _png_boxes(row: Axes, picture: Picture) -> None:
    """The ops as one collection: thousands of single bars would take minutes."""
    from matplotlib.collections import PolyCollection  # noqa: PLC0415
    from matplotlib.colors import to_rgba  # noqa: PLC0415

    corners = [
        [(box.start, box.rank + y) for y in (-0.43, 0.43)] + [(box.end, box.rank + y) for y in (0.43, -0.43)]
        for box in picture.boxes
    ]
    colours = [to_rgba(COLOURS[box.kind], 0.72 if box.chunk % 2 else 1.0) for box in picture.boxes]
    row.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.5))
