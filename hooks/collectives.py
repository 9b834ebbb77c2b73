"""Collectives: which methods of ``ProcessGroup`` they are, what is known of one, and its moments on a device.

Their wrapper is with those of the messages, in ``process_group.py``.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppdiag.hooks.recorder import RECORDER, Tail, thread_state
from ppdiag.model import NONE, Collective, Kind

if TYPE_CHECKING:
    from ppdiag.hooks.device import HostSpan
    from ppdiag.hooks.groups import Group
    from ppdiag.hooks.instruments import Instruments

COLLECTIVES = {
    "allreduce": Collective.ALL_REDUCE,
    "allreduce_coalesced": Collective.ALL_REDUCE,
    "allgather": Collective.ALL_GATHER,
    "allgather_coalesced": Collective.ALL_GATHER,
    "allgather_into_tensor_coalesced": Collective.ALL_GATHER,
    "_allgather_base": Collective.ALL_GATHER,
    "all_gather_single": Collective.ALL_GATHER,
    "all_gather_single_coalesced": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": Collective.REDUCE_SCATTER,
    "_reduce_scatter_base": Collective.REDUCE_SCATTER,
    "reduce_scatter_single": Collective.REDUCE_SCATTER,
    "reduce_scatter_single_coalesced": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "alltoall_base": Collective.ALL_TO_ALL,
    "all_to_all_single": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "reduce": Collective.REDUCE,
    "gather": Collective.GATHER,
    "scatter": Collective.SCATTER,
    "barrier": Collective.BARRIER,
    "monitored_barrier": Collective.BARRIER,
}
"""Names over all versions from 2.6 to 2.14; those that exist are patched."""

_KIND = int(Kind.COLLECTIVE)


def describe(group: Group, op: Collective, args: tuple[Any, ...]) -> Tail:
    """The tail of a collective that is about to be issued with these arguments (the group itself first)."""
    recorder, state = RECORDER, thread_state()
    size_bytes = _size_bytes(args[1]) if len(args) > 1 else 0
    roots = [arg.rootRank for arg in args[2:] if hasattr(arg, "rootRank")]
    root = group.global_rank(roots[0]) if roots else NONE
    seq, index, thread = next(group.collectives), group.index, state.number
    where = (root, 0, NONE, NONE, NONE, index, thread)
    return (perf_counter_ns(), size_bytes, recorder.step, seq, *where, state.flags, _KIND, op)


def _size_bytes(tensors: Any) -> int:
    """Bytes of the first argument of a collective: the output where it has one of its own, else the buffer."""
    if isinstance(tensors, (list, tuple)):
        return sum(map(_size_bytes, tensors))
    return int(getattr(tensors, "nbytes", 0))


class Marks:
    """The device's moments around a post, which is the whole op where no Work comes of it."""

    __slots__ = ("_begin", "_end", "_instruments", "_tail")

    def __init__(self, instruments: Instruments, tail: Tail) -> None:
        self._instruments = instruments
        self._tail = tail
        self._begin = instruments.begin(tail)
        self._end: Any = None

    def leave(self) -> None:
        """The post has returned, or raised."""
        self._end = self._instruments.leave(self._tail)

    def drop(self) -> None:
        """The op does not end here."""
        self._instruments.drop(self._begin)
        self._instruments.drop(self._end)

    def keep(self, span: HostSpan) -> None:
        """Record the op."""
        self._instruments.keep(self._begin, self._end, span)
