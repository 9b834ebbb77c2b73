"""What an export shows: the spans of a job, which message belongs to which, and why each rank stood idle when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.diagnosis import Cause, Place

if TYPE_CHECKING:
    from ppdiag.trace import Trace

PLACES = tuple(Place)
CAUSES = tuple(Cause)
IDLE_SPAN_DTYPE = np.dtype(
    [("rank", "<i4"), ("place", "u1"), ("cause", "u1"), ("start_ns", "<i8"), ("end_ns", "<i8")],
)
"""``place`` is an index in ``PLACES``, ``cause`` one in ``CAUSES``."""
STEP_DTYPE = np.dtype([("step", "<i8"), ("start_ns", "<i8"), ("end_ns", "<i8")])


@dataclass(frozen=True, slots=True)
class Exported:
    """A trace and what the analysis says of each moment.

    Attributes:
        trace: as it was read: an export is read back as this.
        spans: the same spans with stage, chunk and microbatch filled in.
        partner: index of the other end of each message; -1 where there is none.
        idle: why each rank stood idle, of ``IDLE_SPAN_DTYPE``, by rank and start; empty where that is not known.
        steps: the analysed steps, of ``STEP_DTYPE``.
        note: why there is no idle time in it; empty where there is.
    """

    trace: Trace
    spans: np.ndarray
    partner: np.ndarray
    idle: np.ndarray
    steps: np.ndarray
    note: str = ""
