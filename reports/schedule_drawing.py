"""Drawings of schedules: text for a terminal, SVG, PNG, and a page on which they run.

Several schedules share one time axis, so that their lengths compare by eye. A drawing holds numbers and our own words.
"""

from __future__ import annotations

import io
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
    """

    title: str
    ranks: int
    chunks: int
    boxes: tuple[Box, ...]
    facts: tuple[tuple[str, str], ...]

    @property
    def length(self) -> float:
        """When the last op ends."""
        return max((box.end for box in self.boxes), default=0.0)


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
    width = max((len(label) for label, _ in picture.facts), default=0)
    return [f"  {label:<{width}}  {value}" for label, value in picture.facts]


# -- SVG and page ------------------------------------------------------------------------------------------------------

LANE = 26
"""Height of a lane in pixels."""
GAP = 4
LEFT = 70
RIGHT = 16
HEAD = 34
"""Above the lanes: the title."""
FOOT = 22
LETTER = 6.4
"""Width of a character of the labels in pixels."""
PLAY_S = 12.0
"""Length of the animation."""


def svg(pictures: Sequence[Picture], *, width: int = 1100, animate: bool = False) -> str:
    """All schedules as one SVG; ``animate`` lets the ops appear when they run."""
    length = max(picture.length for picture in pictures) or 1.0
    scale = (width - LEFT - RIGHT) / length
    parts: list[str] = []
    top = 0.0
    for picture in pictures:
        parts += _svg_picture(picture, top, scale, PLAY_S / length if animate else None)
        top += HEAD + picture.ranks * (LANE + GAP) + FOOT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top:g}" width="{width}" height="{top:g}" '
        f'role="img" aria-label="{escape("; ".join(picture.title for picture in pictures))}" '
        f'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12">'
    )
    return "\n".join([head, f"<style>{_style(animate=animate)}</style>", *parts, "</svg>", ""])


def _style(*, animate: bool) -> str:
    rules = f"text{{fill:{LIGHT.ink}}} .t{{font-size:14px;font-weight:600}} .l{{fill:#fff;font-size:11px}} "
    rules += ".w{fill:#10222c} .o{opacity:.72} "
    rules += "".join(f".{kind}{{fill:{colour}}} " for kind, colour in COLOURS.items())
    if animate:
        rules += "@keyframes a{from{opacity:0}} .p{animation:a .25s linear backwards} "
        rules += "@media (prefers-reduced-motion:reduce){.p{animation:none}}"
    return rules


def _svg_picture(picture: Picture, top: float, scale: float, seconds: float | None) -> list[str]:
    lanes = top + HEAD
    parts = [f'<text class="t" x="{LEFT}" y="{top + 22:g}">{escape(picture.title)}</text>']
    for rank in range(picture.ranks):
        y = lanes + rank * (LANE + GAP)
        length = picture.length * scale
        parts.append(f'<rect x="{LEFT}" y="{y:g}" width="{length:.2f}" height="{LANE}" fill="#eef1f4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 17:g}" text-anchor="end">rank {rank}</text>')
    parts += [_svg_box(box, picture, lanes, scale, seconds) for box in picture.boxes]
    return parts


def _svg_box(box: Box, picture: Picture, lanes: float, scale: float, seconds: float | None) -> str:
    x, y = LEFT + box.start * scale, lanes + box.rank * (LANE + GAP)
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
        + "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in picture.facts)
        + "</table>"
        for picture in pictures
    )
    style = (
        f"body{{font:15px/1.5 ui-sans-serif,system-ui,sans-serif;color:{LIGHT.ink};background:#fff;margin:2rem auto;"
        "max-width:1140px;padding:0 1rem} svg{max-width:100%;height:auto} h2{font-size:1rem;margin:1.2rem 0 .2rem} "
        "th{text-align:left;font-weight:400;padding:.1rem 2rem .1rem 0} td{font-variant-numeric:tabular-nums}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Pipeline schedules</title><style>{style}</style></head><body><h1>Pipeline schedules</h1>"
        "<p>F forward, B backward, W weight gradient; the paler boxes are the odd stages of a rank. "
        f'<a href="">Run again</a></p>\n{svg(pictures, animate=True)}{tables}</body></html>\n'
    )


# -- PNG --------------------------------------------------------------------------------------------------------------


def png(pictures: Sequence[Picture]) -> bytes:
    """All schedules as one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (slow to import)
    from matplotlib.figure import Figure  # noqa: PLC0415

    heights = [picture.ranks + 1 for picture in pictures]
    figure = Figure(figsize=(12, 0.34 * sum(heights) + 0.5 * len(pictures)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    length = max(picture.length for picture in pictures) or 1.0
    for picture, row in zip(pictures, figure.subplots(len(pictures), 1, squeeze=False, height_ratios=heights)[:, 0],
                            strict=True):  # fmt: skip
        row.set_title(picture.title, loc="left", fontsize=10, color=LIGHT.ink)
        row.set(xlim=(0, length), ylim=(picture.ranks - 0.5, -0.5), yticks=range(picture.ranks))
        row.set_yticklabels([f"rank {rank}" for rank in range(picture.ranks)], fontsize=8, color=LIGHT.ink)
        row.tick_params(axis="x", labelsize=8, colors=LIGHT.ink)
        row.spines[["top", "right", "left"]].set_visible(False)
        row.barh(range(picture.ranks), [picture.length] * picture.ranks, height=0.86, color="#eef1f4")
        for box in picture.boxes:
            _png_box(row, box, picture, length)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _png_box(axes: Axes, box: Box, picture: Picture, length: float) -> None:
    lasts = box.end - box.start
    shade = 0.72 if box.chunk % 2 else 1.0
    axes.barh(box.rank, lasts, left=box.start, height=0.86, color=COLOURS[box.kind], alpha=shade, edgecolor="white",
              linewidth=0.5)  # fmt: skip
    label = _label(box, picture)
    if lasts / length * 150 >= len(label):  # about 150 characters of this size go into the figure's width
        colour = "#10222c" if box.kind == "W" else "white"
        axes.text(box.start + lasts / 2, box.rank, label, ha="center", va="center", fontsize=7, color=colour)
