"""The trade-off of the plans: memory of the fullest rank against step time."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ppdiag.reports.figures import LIGHT
from ppdiag.reports.words import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

GIB = 1 << 30
NAMED = 5
"""So many of the fastest plans are numbered."""
MARKS = "osD^v*Xph<>"


def draw(plans: Sequence[Any], *, usable_bytes: float) -> str:
    """The plans as SVG: one mark a plan, its shape the pipeline's length; the line is the memory that there is."""
    figure = Figure(figsize=(8.2, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    lengths = sorted({plan.pipeline for plan in plans})
    for length in lengths:
        own = [plan for plan in plans if plan.pipeline == length]
        mark = MARKS[lengths.index(length) % len(MARKS)]
        axes.scatter([max(plan.memory_bytes) / GIB for plan in own], [plan.step_s for plan in own], marker=mark, s=44,
                     color=LIGHT.forward, alpha=0.8, label=f"PP = {length}")  # fmt: skip
    axes.axvline(
        usable_bytes / GIB, color=LIGHT.ink, linewidth=1.1, linestyle=(0, (4, 3)), label="memory that there is"
    )
    for place, plan in enumerate(plans[:NAMED], 1):
        spot = (max(plan.memory_bytes) / GIB, plan.step_s)
        axes.annotate(f"{place}", spot, (0, -13), textcoords="offset points", ha="center", fontsize=8, color=LIGHT.ink)
    axes.text(1.02, 0.0, _key(plans), transform=axes.transAxes, va="bottom", fontsize=8, color=LIGHT.ink)
    axes.set_xlabel("memory of the fullest rank, GiB", color=LIGHT.ink)
    axes.set_ylabel("step time", color=LIGHT.ink)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))  # no quarters: they print rounded
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=LIGHT.faint, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.margins(0.12)
    axes.legend(frameon=False, fontsize=8, labelcolor=LIGHT.ink, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def _key(plans: Sequence[Any]) -> str:
    """What the numbers stand for."""
    return "\n".join(
        f"{place}: TP {plan.tensor}, PP {plan.pipeline}, V {plan.chunks}, micro {plan.micro_batch}"
        for place, plan in enumerate(plans[:NAMED], 1)
    )
