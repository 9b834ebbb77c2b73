"""Says which ranks of a job left no trace among the files that were named: what others wait for on them is unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Collection

NAMED = 8


def missing_ranks(present: Collection[int], world_size: int = 0, spans: np.ndarray | None = None) -> list[str]:
    """A warning where ranks are missing, else nothing.

    Args:
        present: ranks of which there is a trace.
        world_size: of the job, as the recording has it; 0 where it does not.
        spans: of those present; ranks with which they exchange messages belong to the job too.

    >>> missing_ranks([0, 1, 3], 4)
    ['1 of 4 ranks left no trace here (rank 2)']
    """
    known = set(range(world_size)) | set(present)
    if spans is not None:
        messages = np.isin(spans["kind"], (Kind.SEND, Kind.RECV)) & (spans["peer"] >= 0)
        known |= set(np.unique(spans["peer"][messages]).tolist())
    missing = sorted(known - set(present))
    if not missing:
        return []
    names = ", ".join(map(str, missing[:NAMED]))
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return [f"{len(missing)} of {len(known)} ranks left no trace here (rank {names}{more})"]
