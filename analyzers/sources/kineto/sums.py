"""What can be said of a rank whatever it ran: for how long its device computed, communicated and stood idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.sources.kineto.events import Category
from ppdiag.analyzers.sources.kineto.host import step_marks

if TYPE_CHECKING:
    from ppdiag.analyzers.sources.kineto.events import Events


@dataclass(frozen=True, slots=True)
class Sums:
    """Times of one rank in ns, as unions over its streams; on a CPU of the ops of its busiest thread.

    Attributes:
        on_device: whether the trace has kernels.
        window_ns: from the begin of the first event of the device (or op) to the end of the last.
        compute_ns: with a kernel that is no communication; ``copy_ns``: with a copy or a memset.
        communication_ns: with a kernel of NCCL or RCCL, or inside a message of the host.
        exposed_ns: the part of it in which nothing computed.
        idle_ns: with none of these.
        kernels, communication_kernels: how many there are.
        steps: how many the profiler marked.
    """

    on_device: bool
    window_ns: int
    compute_ns: int
    copy_ns: int
    communication_ns: int
    exposed_ns: int
    idle_ns: int
    kernels: int
    communication_kernels: int
    steps: int

    def __str__(self) -> str:
        """In words.

        What is not in the trace is said to be missing, and no 0.

        >>> str(Sums(True, 10**9, 5 * 10**8, 0, 2 * 10**8, 10**8, 4 * 10**8, 3, 1, 0))
        '1000.000 ms: computing 500.000 ms, communicating 200.000 ms (100.000 ms of it alone), idle 400.000 ms'
        >>> str(Sums(True, 10**9, 5 * 10**8, 0, 0, 0, 5 * 10**8, 2, 0, 0))
        '1000.000 ms: computing 500.000 ms, no kernel of NCCL or RCCL, idle 500.000 ms'
        """
        window, compute, copy, communication, exposed, idle = (
            f"{ns / 1e6:.3f} ms"
            for ns in (
                self.window_ns,
                self.compute_ns,
                self.copy_ns,
                self.communication_ns,
                self.exposed_ns,
                self.idle_ns,
            )
        )
        computing = f"computing {compute}" if self.compute_ns else "nothing that computes"
        copying = f", copying {copy}" if self.copy_ns else ""
        communicating = f"communicating {communication} ({exposed} of it alone)"
        if not self.communication_ns:
            communicating = "no kernel of NCCL or RCCL" if self.on_device else "no message of gloo, MPI or UCC"
        return f"{window}: {computing}{copying}, {communicating}, idle {idle}"


def sums_of(events: Events) -> Sums:
    """The sums of a rank's trace."""
    on_device = bool(len(events.of(Category.KERNEL, Category.COPY)))
    communicates = events.is_communication() if on_device else _host_messages(events)
    computes = (events.category == Category.KERNEL) & ~communicates if on_device else _busiest_thread(events)
    copies = events.category == Category.COPY
    compute, communication = _union(events, computes), _union(events, communicates)
    copy, active = _union(events, copies), _union(events, computes | communicates | copies)
    window = int(active[-1, 1] - active[0, 0]) if len(active) else 0
    busy = _length(compute)
    return Sums(
        on_device=on_device,
        window_ns=window,
        compute_ns=busy,
        copy_ns=_length(copy),
        communication_ns=_length(communication),
        exposed_ns=_length(_union(events, computes | communicates)) - busy,
        idle_ns=window - _length(active),
        kernels=int((events.category == Category.KERNEL).sum()),
        communication_kernels=int(communicates.sum()) if on_device else 0,
        steps=len(step_marks(events)),
    )


def _host_messages(events: Events) -> np.ndarray:
    names = np.array([name.startswith(("gloo:", "mpi:", "nccl:", "ucc:")) for name in events.names] or [False])
    return (events.category == Category.LABEL) & names[events.name]


def _busiest_thread(events: Events) -> np.ndarray:
    """Mask of the ops of the thread with the longest sum of them."""
    ops = events.category == Category.CPU_OP
    if not ops.any():
        return ops
    length = (events.end_ns - events.start_ns)[ops].astype(np.float64)
    busiest = int(np.argmax(np.bincount(events.thread[ops], weights=length)))
    return ops & (events.thread == busiest)


def _union(events: Events, chosen: np.ndarray) -> np.ndarray:
    """The union of events as intervals that do not touch (n x 2): durations may overlap on one stream, as on ROCm."""
    intervals = np.stack([events.start_ns[chosen], events.end_ns[chosen]], axis=1)
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    if not len(intervals):
        return intervals
    reach = np.maximum.accumulate(intervals[:, 1])
    first = np.flatnonzero(np.append(True, intervals[1:, 0] > reach[:-1]))
    last = np.append(first[1:], len(intervals)) - 1
    return np.stack([intervals[first, 0], reach[last]], axis=1)


def _length(intervals: np.ndarray) -> int:
    return int((intervals[:, 1] - intervals[:, 0]).sum())
