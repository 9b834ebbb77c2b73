"""One step for drawing: when each op ran, as measured and with equal work, and where ranks stood idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

TIMELINE_DTYPE = (
    ("rank", "<i4"),
    ("kind", "u1"),
    ("stage", "<i2"),
    ("microbatch", "<i4"),
    ("start_s", "<f8"),
    ("end_s", "<f8"),
)
IDLE_DTYPE = (("rank", "<i4"), ("place", "u1"), ("start_s", "<f8"), ("end_s", "<f8"))


@dataclass(frozen=True, slots=True)
class Timeline:
    """The median step for drawing; not part of the JSON. Times in seconds from the step's start.

    ``measured``, ``equal_work``: structured arrays (rank, kind, stage, microbatch, start_s, end_s) of compute spans;
    ``equal_work`` is the same order with equal work, free transfers and no host time.
    ``idle``: structured array (rank, place, start_s, end_s), ``place`` an index in ``list(Place)``.
    """

    step: int
    step_s: float
    equal_work_step_s: float
    measured: np.ndarray
    equal_work: np.ndarray
    idle: np.ndarray
