"""Small charts made with matplotlib, as SVG text.

Figures are made without pyplot, so no display, window or global state is involved. They show numbers and our own words
only: text of the record would need fonts that may not be there.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ppdiag.reports.words import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ppdiag.diagnosis import Diagnosis

MAX_POINTS = 1000
"""More steps than this are drawn as a band from the fastest to the slowest of each bin."""


class Theme(NamedTuple):
    """Colours of a chart."""

    ink: str
    faint: str
    forward: str
    backward: str
    weight: str


LIGHT = Theme(ink="#1c2430", faint="#c9d0d8", forward="#0072b2", backward="#009e73", weight="#56b4e9")
DARK = Theme(ink="#e6eaf0", faint="#414b58", forward="#2f8fd0", backward="#19b88a", weight="#8fd0f5")
"""Blue, bluish green and sky blue of Okabe and Ito's palette, safe for colour-blind readers; lighter on a dark page."""


def compute_times(diagnosis: Diagnosis, theme: Theme = LIGHT) -> str:
    """Median F, B and W of each stage for one microbatch, stacked, with the mean over the stages as a line."""
    stages = [stage.stage for stage in diagnosis.stages]
    parts = (
        ("F", theme.forward, [stage.forward_s for stage in diagnosis.stages]),
        ("B", theme.backward, [stage.backward_s for stage in diagnosis.stages]),
        ("W", theme.weight, [stage.weight_s for stage in diagnosis.stages]),
    )
    figure, axes = _figure(theme)
    bottom_s = np.zeros(len(stages))
    for name, colour, values in parts:
        heights_s = np.nan_to_num(np.asarray(values, dtype=float))
        if heights_s.any():
            axes.bar(stages, heights_s, bottom=bottom_s, color=colour, width=0.72, label=name)
            bottom_s = bottom_s + heights_s
    if len(stages) > 1:
        axes.axhline(float(bottom_s.mean()), color=theme.ink, linewidth=1.2, linestyle=(0, (4, 3)), label="mean")
    if len(stages) <= 16:
        for stage, height_s in zip(stages, bottom_s, strict=True):
            axes.annotate(duration(height_s), (stage, height_s), (0, 3), textcoords="offset points", ha="center",
                          color=theme.ink, fontsize=8)  # fmt: skip
    axes.set_xlabel("stage", color=theme.ink)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.margins(y=0.12)
    axes.set_xlim(min(stages, default=0) - 0.7, max(stages, default=0) + 0.7)
    _legend(axes, theme)
    return _svg(figure)


def step_times(diagnosis: Diagnosis, theme: Theme = LIGHT) -> str:
    """Time of each analysed step in order, with the median as a line."""
    times_s = np.asarray(diagnosis.step_times_s, dtype=float)
    figure, axes = _figure(theme)
    if len(times_s) > MAX_POINTS:
        bins = np.array_split(times_s, MAX_POINTS)
        first = np.cumsum([0, *(len(part) for part in bins[:-1])])
        slowest, fastest = [part.max() for part in bins], [part.min() for part in bins]
        axes.fill_between(first, fastest, slowest, color=theme.forward, linewidth=0.5, label="fastest to slowest")
    else:
        axes.plot(times_s, color=theme.forward, linewidth=1.2, marker="o", markersize=3, label="step")
    axes.axhline(diagnosis.steps.median_s, color=theme.ink, linewidth=1.2, linestyle=(0, (4, 3)), label="median")
    axes.set_xlabel("analysed step", color=theme.ink)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    axes.set_ylim(0, max(float(np.nanmax(times_s, initial=0.0)), diagnosis.steps.median_s) * 1.15 or 1.0)
    _legend(axes, theme)
    return _svg(figure)


def _figure(theme: Theme) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.2, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(theme.faint)
    axes.tick_params(colors=theme.ink, labelsize=8.5, length=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axes.grid(axis="y", color=theme.faint, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(axes: Axes, theme: Theme) -> None:
    # The reference line last: matplotlib lists lines before bars.
    rows = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda row: row[1] in {"mean", "median"})
    axes.legend(
        *zip(*rows, strict=True),
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=4,
        frameon=False,
        labelcolor=theme.ink,
        fontsize=8.5,
        borderpad=0,
    )


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()
