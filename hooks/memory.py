"""Memory of the device at the end of forwards and backwards: how an F's activations grow it, and a B releases them.

One reading takes some 20 us (torch builds its whole table of statistics), so that steps are sampled: the first ones,
then one in sixteen. The user's own peak is never reset.
"""

from __future__ import annotations

import functools
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppdiag.hooks.recorder import Tail

KINDS = frozenset(map(int, (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)))
FIRST_STEPS = 4
PERIOD_STEPS = 16


class Memory:
    """Samples the memory of a device.

    Args:
        read: gives (bytes allocated now, most bytes ever allocated).
        say: takes one word of the record.
    """

    def __init__(self, read: Callable[[], tuple[int, int]], say: Callable[[dict[str, Any]], None]) -> None:
        self._read = read
        self._say = say

    @classmethod
    def of_cuda(cls, cuda: Any, say: Callable[[dict[str, Any]], None]) -> Memory:
        """Of torch's allocator on the current device."""
        return cls(functools.partial(_read_cuda, cuda), say)

    def sample(self, tail: Tail) -> None:
        """Say what is allocated at the end of this op, where its step is one of those that are sampled."""
        _, _, step, _, _, _, microbatch, stage, _, _, _, _, kind, _ = tail
        if step >= FIRST_STEPS and step % PERIOD_STEPS:
            return
        current_bytes, peak_bytes = self._read()
        self._say(
            {
                "type": "memory",
                "local_ns": perf_counter_ns(),
                "step": step,
                "kind": kind,
                "stage": stage,
                "microbatch": microbatch,
                "current_bytes": current_bytes,
                "peak_bytes": peak_bytes,
            }
        )


def _read_cuda(cuda: Any) -> tuple[int, int]:
    """What ``torch.cuda.memory_allocated`` and ``max_memory_allocated`` give, in one call."""
    allocated = cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
    return allocated["current"], allocated["peak"]
