"""Changes of a run and what they would do, as a table and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.diagnosis import percent
from ppdiag.reports.fitting import paragraph
from ppdiag.reports.fitting import table as fitted
from ppdiag.reports.words import duration, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = "ppdiag.whatif/1"
GIB = 1 << 30
NOT_RELIABLE = 0.05
"""A way of replaying that is further than this from the unchanged run predicts little."""
WIDEST = 110
GIVES_UP = ("kept", "range")
"""Columns that a narrow terminal does without, in this order."""
LEGEND = (
    "change: of the time for the same samples; range: 10th to 90th percentile over the steps. kept: activations that "
    "the fullest rank keeps, in microbatches through all of its layers. repaired: takes no longer than the others."
)

LAYERS = {
    "measured": "Layers take what was measured of each (ppdiag run --layer-times).",
    "equal shares": (
        "Layers take an equal share of their stage each. What the first and the last stage take beyond a usual layer "
        "is held to be embedding, and head and loss, which stay there: ppdiag run --layer-times measures it."
    ),
}
"""What a split of the layers is reckoned from, by ``Prediction.layer_times``."""


def table(run: Any, answer: Any) -> str:  # noqa: ANN401  (parts of an analysis; reports do not import it)
    """The run in a line, the predictions, and what cannot be."""
    lines = [_run_line(run), ""]
    if answer.predictions:
        lines += [*_rows(answer.predictions), "", paragraph(LEGEND, WIDEST)]
        told = dict.fromkeys(LAYERS[found.layer_times] for found in answer.predictions if found.layer_times)
        lines += [paragraph(text, WIDEST) for text in told]
    doubtful = [found.error_fraction for found in answer.predictions if found.error_fraction > NOT_RELIABLE]
    if doubtful:
        text = f"Rows with a ? replay even the unchanged run {percent(max(doubtful))} off its measured steps: they are "
        lines.append(paragraph(text + "a rough guide.", WIDEST))
    if answer.refused:
        refused = [f"{one.change.words}: {visible(one.reason)}" for one in answer.refused]
        lines += ["", "Cannot be:", *(paragraph(text, WIDEST, first="  ", rest="    ") for text in refused)]
    return "\n".join(lines)


def _run_line(run: Any) -> str:  # noqa: ANN401
    job, measured = run.job, run.graph.duration_K
    steps = f"{len(measured)} steps of {duration(float(np.median(measured)))} (median)"
    return f"{visible(job.schedule_name)} with P={job.pp}, V={job.vpp}, M={job.microbatches}: {steps}"


def _rows(predictions: Sequence[Any]) -> list[str]:
    memory = any(found.memory.bytes_R is not None for found in predictions)
    cells = [["what if", "step", "change", "range", "kept", *(["memory"] if memory else [])]]
    for found in predictions:
        doubt = " ?" if found.error_fraction > NOT_RELIABLE else ""
        row = [found.change.words + doubt, duration(found.step_s), signed(-found.gain), _range(found)]
        row.append(f"{max(found.memory.activations_R, default=0):g}")
        cells.append([*row, *([_memory(found)] if memory else [])])
    return fitted(cells, gives_up=GIVES_UP, left=1)


def signed(fraction: float) -> str:
    """A change as a percentage with its sign.

    >>> signed(-0.126), signed(0.0)
    ('-12.6 %', '0.0 %')
    """
    text = f"{100 * fraction:+.1f}"
    return f"{'0.0' if float(text) == 0 else text} %"


def _range(found: Any) -> str:  # noqa: ANN401
    low, high = found.gain_range
    return f"{signed(-high)} to {signed(-low)}"


def _memory(found: Any) -> str:  # noqa: ANN401
    held = found.memory.bytes_R
    return "-" if held is None else f"{max(held) / GIB:.1f} GiB"


def plain(run: Any, answer: Any) -> dict[str, Any]:  # noqa: ANN401
    """The same as JSON-serialisable data."""
    job, measured = run.job, run.graph.duration_K
    return {
        "schema": SCHEMA,
        "source": run.trace.job.source,
        "run": {
            "schedule": job.schedule_name,
            "pp": job.pp,
            "vpp": job.vpp,
            "microbatches": job.microbatches,
            "steps": len(measured),
            "step_s": float(np.median(measured)),
        },
        "predictions": [_plain_prediction(found) for found in answer.predictions],
        "refused": [{"change": one.change.words, "reason": one.reason} for one in answer.refused],
    }


def _plain_prediction(found: Any) -> dict[str, Any]:  # noqa: ANN401
    (step_low_s, step_high_s), (gain_low, gain_high) = found.step_range_s, found.gain_range
    return {
        "change": found.change.words,
        "step_s": found.step_s,
        "step_low_s": step_low_s,
        "step_high_s": step_high_s,
        "samples_ratio": found.work_ratio,
        "gain_fraction": found.gain,
        "gain_low_fraction": gain_low,
        "gain_high_fraction": gain_high,
        "replay_error_fraction": found.error_fraction,
        "activations": list(found.memory.activations_R),
        "memory_bytes": None if found.memory.bytes_R is None else [int(size) for size in found.memory.bytes_R],
        "layers": None if found.change.layers is None else list(found.change.layers),
        "layer_times": found.layer_times or None,
    }
