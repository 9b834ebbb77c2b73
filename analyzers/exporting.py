"""From a trace to what an export shows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.diagnose import analyse
from ppdiag.analyzers.idle_causes import idle_spans
from ppdiag.analyzers.messages import match
from ppdiag.errors import BadRecord, NoPipelineFound
from ppdiag.exported import IDLE_SPAN_DTYPE, STEP_DTYPE, Exported

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppdiag.trace import Trace


def export(trace: Trace, progress: Callable[[str, int, int], None] | None = None) -> Exported:
    """The trace with its causes of idle time; without them, and with a note, where it has no pipeline."""
    try:
        run = analyse(trace, progress)
    except (NoPipelineFound, BadRecord) as error:
        nothing = np.zeros(0, IDLE_SPAN_DTYPE), np.zeros(0, STEP_DTYPE)
        return Exported(trace, trace.spans, match(trace).partner[: len(trace)], *nothing, note=str(error))
    steps = np.zeros(len(run.steps.kept), STEP_DTYPE)
    steps["step"] = run.steps.recorded[run.steps.kept]
    steps["start_ns"], steps["end_ns"] = run.steps.start_ns, run.steps.end_ns
    return Exported(trace, run.trace.spans, run.program.messages.partner[: len(trace)], idle_spans(run), steps)
