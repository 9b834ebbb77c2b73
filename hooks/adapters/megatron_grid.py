"""The grid of a job of Megatron-Core: which ranks along which axis, from its process groups or its global state."""

from __future__ import annotations

import sys
from typing import Any

from ppdiag.hooks.recorder import RECORDER

AXES = {"pp": "pipeline_model_parallel", "tp": "tensor_model_parallel", "dp": "data_parallel"}
"""Axis -> its words in the names of ``parallel_state``."""


class Grid:
    """The ranks of the job, from the process groups that the call was given, else from ``parallel_state``."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self._given = kwargs.get("pg_collection")
        self._pipeline = getattr(kwargs.get("p2p_communicator"), "pp_group", None)
        self._state = sys.modules["megatron.core.parallel_state"]

    def place(self, axis: str) -> tuple[int, int]:
        """This process's rank along an axis, and the number of ranks along it."""
        group = self._group(axis)
        if group is not None:
            return group.rank(), group.size()
        words = AXES[axis]
        return getattr(self._state, f"get_{words}_rank")(), getattr(self._state, f"get_{words}_world_size")()

    def pipeline(self) -> list[int]:
        """Global ranks along the pipeline."""
        group = self._group("pp") or self._state.get_pipeline_model_parallel_group()
        group = group[0] if isinstance(group, list) else group  # 0.9 to 0.12: one for each encoder that feeds it
        return list(sys.modules["torch.distributed.distributed_c10d"].get_process_group_ranks(group))

    def _group(self, axis: str) -> Any:
        if axis == "pp" and self._pipeline is not None:
            return self._pipeline
        group = getattr(self._given, axis, None)
        return group if hasattr(group, "size") else None


def say_facts(grid: Grid, *, schedule: str, microbatches: int, chunks: int) -> None:
    """Say what is known of the job when one of its schedules is called."""
    say = RECORDER.fact
    places = {axis: grid.place(axis) for axis in ("pp", "tp", "dp")}
    (rank, ranks), members = places["pp"], grid.pipeline()
    say("framework", "megatron-core")
    say("framework_version", str(getattr(sys.modules["megatron.core"], "__version__", "")))
    say("schedule", schedule)
    say("microbatches", microbatches)
    say("vpp", chunks)
    say("coordinates", {axis: place for axis, (place, _) in places.items()})
    for axis, (_, size) in places.items():
        say(axis, size)
    say("stages", [chunk * ranks + rank for chunk in range(chunks)])
    say("stage_ranks", members * chunks)
