"""Work on the device: a span is timed by two events on its stream, which are resolved off the training thread.

Training threads call ``begin`` and ``leave`` around an op, which record an event each on the current stream: around
forward, backward, weight gradient and optimizer the time of the work; around ``Work.wait`` how long the stream stood
still for the message. None is recorded on another stream than that of the work (FSDP issues and awaits its collectives
on streams of their own): with ``CUDA_DEVICE_MAX_CONNECTIONS=1`` a timing event there would end the overlap. Nothing
synchronises: the writer's thread asks by ``query`` which events are complete.

A job without CUDA has none of this: its hooks only see that the recorder has no ``instruments``.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ppdiag.hooks.device_time import DeviceTime
from ppdiag.hooks.recorder import KIND_AT, Tail, with_flag
from ppdiag.model import MOST_LAUNCH_LEAD_MS, WAIT_KINDS, Flag

if TYPE_CHECKING:
    from collections.abc import Callable

REFERENCE_NS = 1_000_000_000
"""Milliseconds as float32 resolve 0.06 us a second after their reference, and 4 us a minute after it."""
KEPT_REFERENCES = 4
MOST_PENDING = 1 << 16
"""Spans whose events are not complete: beyond it (the device hangs) spans are timed by the host."""
MOST_MISSES = 8
"""Events complete in order on a stream; so many incomplete ones mean that the rest is incomplete too."""
TIGHT_NS = 200_000
"""Bounds of an epoch that are nearer to each other than this need no closer look."""
LOOK_NS = 20_000_000
LOOK_PAUSE_S = 50e-6
"""A closer look: so long the next event is queried, with this pause in between (a query takes some us of the GIL)."""
STALE_NS = 20_000_000_000
LONG_LOOK_NS = 1_000_000_000
"""Where ops are long, short looks may miss every end so long: then one look lasts until there is one, or so long."""
LAST_LOOK_NS = 1_000_000_000
"""At exit, how long to wait for events that are not complete; their spans are then timed by the host."""
PATIENCE_SPANS = 1 << 12
"""Resolved spans that may wait for the first good bounds."""
WAITS = frozenset(map(int, WAIT_KINDS))


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def record(self) -> None:
        """Put the event on the current stream."""

    def query(self) -> bool:
        """Whether the stream has reached it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to the other, both complete, as float32."""


class Events(Protocol):
    """Where events come from: CUDA, or a test."""

    def new(self) -> Event:
        """An event that can tell the time."""

    def refuses(self) -> bool:
        """Whether an event recorded on this thread now would do harm or be wrong: in the capture of a graph."""

    def current_stream(self) -> int:
        """Which stream the calling thread issues to."""

    def adopt_thread(self) -> None:
        """Have the calling thread, if it is another, use the device of the thread that began."""


class Clock(Protocol):
    """Times spans: on the host (:class:`HostClock`) or on the device (:class:`DeviceClock`)."""

    def work(self) -> Any:
        """A moment at which work begins on the current stream."""

    def mark(self) -> Any:
        """A moment of the current stream, if that is the one of the work; None where there is none to be had."""

    def drop(self, mark: Any) -> None:
        """A mark is not needed after all."""

    def keep(self, begin: Any, end: Any, span: HostSpan) -> None:
        """A span is over: it lies between two marks."""


class HostSpan(NamedTuple):
    """One op as the host saw it; several tails where one wait was for several messages."""

    start_ns: int
    end_ns: int
    tails: tuple[Tail, ...]


class HostClock:
    """Where there is no device (a profiler's ranges are wanted on a CPU job): spans are as the host saw them."""

    def __init__(self, append: Callable[[tuple[Any, ...]], None]) -> None:
        self._append = append

    def work(self) -> None:
        """No mark is needed."""

    def mark(self) -> None:
        """No mark is needed."""

    def drop(self, mark: Any) -> None:
        """Nothing to give back."""

    def keep(self, begin: Any, end: Any, span: HostSpan) -> None:  # noqa: ARG002
        """Record it as it is."""
        for tail in span.tails:
            self._append((span.start_ns, span.end_ns, *tail))


class _Pending(NamedTuple):
    """A span whose events may not be complete."""

    begin: Event
    end: Event
    span: HostSpan


class _Timed(NamedTuple):
    """A span on the device's own time, ns since the first event."""

    begin_ns: float
    end_ns: float
    span: HostSpan


class _Reference(NamedTuple):
    """An event from which others are measured."""

    event: Event
    at_ns: float
    launched_ns: int


class DeviceClock:
    """Times spans by events; all but :meth:`mark`, :meth:`drop` and :meth:`keep` runs on the writer's thread."""

    def __init__(
        self,
        events: Events,
        append: Callable[[tuple[Any, ...]], None],
        *,
        now_ns: Callable[[], int] = perf_counter_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._events = events
        self._append = append
        self._now_ns = now_ns
        self._sleep = sleep
        self._pool: list[Event] = []
        self._pending: deque[_Pending] = deque()
        self._timed: list[_Timed] = []
        self._references: deque[_Reference] = deque()
        self._queries = threading.Lock()
        """Held while CUDA is asked about events: in the capture of a graph, that would end the capture."""
        self._captures = 0
        self._stream: int | None = None
        """That of the work that began last."""
        self._adopted: set[int] = set()
        """Threads that have resolved before."""
        self._looked_ns = now_ns()
        """When an event was last seen to complete."""
        self.time = DeviceTime()
        self.untimed = 0
        """Marks that were not to be had: in the capture of a graph, on another device, or with too many pending."""

    def work(self) -> Event | None:
        """Record an event on the current stream, which is that of the work from now on."""
        self._stream = self._events.current_stream()
        return self.mark()

    def mark(self) -> Event | None:
        """Record an event on the current stream, if that is the one of the work."""
        if self._stream is not None and self._events.current_stream() != self._stream:
            return None
        if self._captures or len(self._pending) > MOST_PENDING or self._events.refuses():
            self.untimed += 1
            return None
        try:
            event = self._pool.pop()
        except IndexError:
            event = self._events.new()
        event.record()
        return event

    def drop(self, mark: Event | None) -> None:
        """Give an event back to the pool."""
        if mark is not None:
            self._pool.append(mark)

    def keep(self, begin: Event | None, end: Event | None, span: HostSpan) -> None:
        """Resolve the span later; one that lacks an event stays on the host's clock."""
        if begin is None or end is None:
            self.drop(begin)
            self.drop(end)
            self._append_as_host_saw(span)
        else:
            self._pending.append(_Pending(begin, end, span))

    def capture_begins(self) -> None:
        """A graph is about to be captured (any thread): ask CUDA nothing until it ends."""
        with self._queries:
            self._captures += 1

    def capture_ends(self) -> None:
        """The capture is over."""
        with self._queries:
            self._captures = max(0, self._captures - 1)

    def resolve(self) -> None:
        """Time what is complete, and record it."""
        if (thread := threading.get_ident()) not in self._adopted:
            self._events.adopt_thread()
            self._adopted.add(thread)
        self._time_complete()
        if self.time.wants_bounds(TIGHT_NS):
            self._look_closer()
        if self.time.is_good:
            self._record_timed()
        elif len(self._timed) > PATIENCE_SPANS:
            self._record_in_any_case()

    def finish(self) -> None:
        """Time all there is, waiting a little for it; what is left over is recorded as the host saw it."""
        until_ns = self._now_ns() + LAST_LOOK_NS
        self._time_complete()
        while self._pending and not self._captures and self._now_ns() < until_ns:
            self._sleep(LOOK_PAUSE_S)
            self._time_complete()
        self._record_in_any_case()
        self.give_up()

    def give_up(self) -> None:
        """Record what is not resolved as the host saw it."""
        left = [timed.span for timed in self._timed] + [pending.span for pending in self._pending]
        self._timed.clear()
        self._pending.clear()
        for span in left:
            self._append_as_host_saw(span)

    def _append_as_host_saw(self, span: HostSpan) -> None:
        for tail in span.tails:
            self._append((span.start_ns, span.end_ns, *tail))

    def _is_complete(self, event: Event) -> bool:
        with self._queries:
            return not self._captures and event.query()

    def _elapsed_ns(self, since: _Reference, event: Event) -> float:
        with self._queries:
            return since.at_ns + 1e6 * since.event.elapsed_time(event)

    def _time_complete(self) -> None:
        incomplete: list[_Pending] = []
        for _ in range(len(self._pending)):
            if len(incomplete) == MOST_MISSES or self._captures:
                break
            pending = self._pending.popleft()
            if self._is_complete(pending.end) and self._is_complete(pending.begin):
                self._time(pending, self._now_ns())
            else:
                incomplete.append(pending)
        self._pending.extendleft(reversed(incomplete))

    def _time(self, pending: _Pending, seen_ns: int) -> None:
        """Measure a complete span from a reference that is older than it; it may become a reference itself."""
        begin, end, span = pending
        if not self._references:
            self._references.append(_Reference(begin, 0.0, span.start_ns))
        reference = self._reference(span.start_ns)
        begin_ns = reference.at_ns if reference.event is begin else self._elapsed_ns(reference, begin)
        end_ns = self._elapsed_ns(reference, end)
        self.time.not_before(begin_ns, span.start_ns)
        self.time.not_after(end_ns, seen_ns)
        self._timed.append(_Timed(begin_ns, end_ns, span))
        self._pool.append(end)
        newest = self._references[-1]
        if begin_ns - newest.at_ns > REFERENCE_NS:
            self._references.append(_Reference(begin, begin_ns, span.start_ns))
            if len(self._references) > KEPT_REFERENCES:
                self._pool.append(self._references.popleft().event)
        elif newest.event is not begin:
            self._pool.append(begin)

    def _reference(self, launched_ns: int) -> _Reference:
        """The latest that was launched before: ops nest, and an outer one is complete after the inner ones."""
        for reference in reversed(self._references):
            if reference.launched_ns <= launched_ns:
                return reference
        return self._references[0]

    def _look_closer(self) -> None:
        """Query the next event often, so that the moment of its completion is known well from both sides."""
        event = self._next_event()
        if event is None:
            return
        start_ns, incomplete_ns = self._now_ns(), None
        until_ns = start_ns + (LOOK_NS if start_ns - self._looked_ns < STALE_NS else LONG_LOOK_NS)
        while (before_ns := self._now_ns()) < until_ns and not self._captures:
            if self._is_complete(event):
                seen_ns = self._now_ns()
                if incomplete_ns is not None and self._references:
                    self._looked_ns = seen_ns
                    device_ns = self._elapsed_ns(self._references[-1], event)
                    self.time.not_before(device_ns, incomplete_ns)
                    self.time.not_after(device_ns, seen_ns)
                return
            incomplete_ns = before_ns
            self._sleep(LOOK_PAUSE_S)

    def _next_event(self) -> Event | None:
        for pending in itertools.islice(self._pending, 1):
            return pending.end if self._is_complete(pending.begin) else pending.begin
        return None

    def _record_in_any_case(self) -> None:
        if not self.time.is_good:
            self.time.settle()
        if self.time.is_known:
            self._record_timed()

    def _record_timed(self) -> None:
        timed, self._timed = self._timed, []
        for begin_ns, end_ns, span in timed:
            start_ns = self.time.host_ns(begin_ns)
            finish_ns = max(start_ns, self.time.host_ns(end_ns))
            lead_ms = max(-MOST_LAUNCH_LEAD_MS, min(MOST_LAUNCH_LEAD_MS, (start_ns - span.start_ns) / 1e6))
            for tail in span.tails:
                post_ns = min(tail[0], finish_ns) if tail[KIND_AT] in WAITS else start_ns
                self._append((start_ns, finish_ns, post_ns, *with_flag(tail, Flag.DEVICE)[1:], lead_ms))


class CudaEvents:
    """Events of ``torch.cuda`` on the device that the constructing thread uses."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self.device = cuda.current_device()
        self._raw_stream = getattr(sys.modules["torch"]._C, "_cuda_getCurrentRawStream", None)
        self._thread = threading.get_ident()

    def new(self) -> Event:
        """A timing event."""
        event: Event = self._cuda.Event(enable_timing=True)
        return event

    def refuses(self) -> bool:
        """Whether the current stream is being captured, or is of another device, where our events cannot go."""
        return bool(self._cuda.is_current_stream_capturing()) or self._cuda.current_device() != self.device

    def current_stream(self) -> int:
        """The stream's handle; the private function takes a tenth of the time of the public one."""
        if self._raw_stream is not None:
            return int(self._raw_stream(self.device))
        return int(self._cuda.current_stream().cuda_stream)

    def adopt_thread(self) -> None:
        """A new thread has device 0, and the first call there would make a context that holds memory."""
        if threading.get_ident() != self._thread:
            self._cuda.set_device(self.device)
