"""Collectives: which methods of ``ProcessGroup`` they are, what is known of one, and its moments on a device.

Their wrapper is with those of the messages, in ``process_group.py``.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppdiag.hooks.device import HostSpan
from ppdiag.hooks.recorder import RECORDER, Tail, thread_state, with_flag
from ppdiag.model import NONE, Collective, Flag, Kind

if TYPE_CHECKING:
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
    "gather_into_tensor": Collective.GATHER,
    "gather_single": Collective.GATHER,
    "scatter": Collective.SCATTER,
    "barrier": Collective.BARRIER,
    "monitored_barrier": Collective.BARRIER,
}
"""Names over all versions from 2.6 to 2.15; those that exist are patched."""

_KIND = int(Kind.COLLECTIVE)


def describe(group: Group, op: Collective, args: tuple[Any, ...]) -> Tail:
    """The tail of a collective that is about to be issued with these arguments (the group itself first)."""
    roots = [arg.rootRank for arg in args[2:] if hasattr(arg, "rootRank")]
    return new_tail(group, op, _size_bytes(args[1]) if len(args) > 1 else 0, roots[0] if roots else NONE)


def new_tail(group: Group, op: Collective, size_bytes: int, root: int) -> Tail:
    """The tail of the group's next collective, posted now; ``root`` is a rank of the group, or below 0."""
    recorder, state = RECORDER, thread_state()
    seq, index, thread = next(group.collectives), group.index, state.number
    where = (NONE if root < 0 else group.global_rank(root), 0, NONE, NONE, NONE, index, thread)
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


class Wait:
    """A wait for collectives, from now on and on this thread, that is no call of ``Work.wait``."""

    __slots__ = ("_instruments", "_mark", "_start_ns", "_tails")

    def __init__(self, tails: tuple[Tail, ...]) -> None:
        self._tails, self._instruments = tails, RECORDER.instruments
        RECORDER.inside = tails[0]
        RECORDER.inside_start_ns = self._start_ns = perf_counter_ns()
        self._mark = None if self._instruments is None else self._instruments.begin(tails[0])

    def end(self) -> int:
        """It has ended, and is recorded; gives the time (ns)."""
        end_ns, RECORDER.inside = perf_counter_ns(), None
        if self._instruments is not None:
            self._instruments.end(self._mark, HostSpan(self._start_ns, end_ns, self._tails))
        else:
            self._append(end_ns, self._tails)
        return end_ns

    def fail(self) -> None:
        """It raised."""
        end_ns, RECORDER.inside = perf_counter_ns(), None
        if self._instruments is not None:
            self._instruments.drop(self._mark)
            self._instruments.drop(self._instruments.leave(self._tails[0]))
        self._append(end_ns, tuple(with_flag(tail, Flag.FAILED) for tail in self._tails))

    def _append(self, end_ns: int, tails: tuple[Tail, ...]) -> None:
        for tail in tails:
            RECORDER.append((self._start_ns, end_ns, tail))
