"""What the hooks of one process have seen: a list of spans to which the training threads append, and the step counter.

The hot paths touch attributes of :data:`RECORDER` only; files and their thread are the ``writer``'s. Recording begins
by itself at the first event after ``init_process_group``, when the rank is known.

A span is a tuple in the order of ``model.SPAN_FIELDS``: ``(start_ns, end_ns, *tail)``. The tail is known before the op
ends, so it also serves as the description of the op that the rank is inside of.

What the hot paths cost is not what they compute: they run after work that has evicted them from the caches, where each
object and each function of C that is touched costs as much as ten bytecodes. So they touch few, keep the state of the
thread in a context variable (a quarter of the time of a ``threading.local``), append ``(start_ns, end_ns, tail)`` as it
is, and pass arguments on one by one (``*args, **kwargs`` takes as long as all the rest).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import platform
import socket
import sys
import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import guard
from ppdiag.hooks.writer import Writer
from ppdiag.model import NONE, RankStatus
from ppdiag.rundir import MAX_BYTES_VARIABLE, RUN_DIR_VARIABLE, clock_identity

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from ppdiag.hooks.instruments import Instruments

DEFAULT_MAX_BYTES = 2 << 30
"""2 GiB a rank: about 30 million spans."""
PATIENCE_NS = 20_000_000
"""After an optimizer no second flush before this time, since one costs some 100 us of CPU."""
_ENVIRONMENT_PREFIXES = ("NCCL_", "TORCH_NCCL_")
_ENVIRONMENT_NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_SOCKET_IFNAME")
_FLAGS_AT = 11
KIND_AT = 12
"""Positions of the flags and the kind in a tail."""
_NESTED = 3
"""Length of a span whose tail is a tuple of its own."""

Tail = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int]


class ThreadState:
    """What one thread is doing, as far as the probes must know of each other.

    Attributes:
        number: 0 for the thread that recorded first, and for those on which autograd runs its backwards.
        named: depth of the brackets in which a framework adapter names the computation.
        depth: depth of calls of modules.
        flags: flags that all spans of this thread get at the moment (INIT).
        message: (microbatch, stage, chunk, payload, flags) of the messages posted now; None where no adapter knows.
        batch: messages and collectives posted since ``_start_coalescing``; None outside such a batch.
    """

    __slots__ = ("batch", "depth", "flags", "message", "named", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.named = 0
        self.depth = 0
        self.flags = 0
        self.message: tuple[int, int, int, int, int] | None = None
        self.batch: list[Tail] | None = None


class Threads(threading.local):
    """The state of the calling thread: one look-up, then plain attributes."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.state = ThreadState(0 if _is_of_autograd() else next(self._numbers))


def _is_of_autograd() -> bool:
    """Whether autograd runs a backward on this thread of its own, for a thread that waits for it.

    It has one for each device, so that on a GPU what a backward sends and waits for comes from there.
    """
    task_id = getattr(sys.modules.get("torch._C"), "_current_graph_task_id", None)
    if task_id is None or task_id() == -1:
        return False
    return threading.get_ident() not in {thread.ident for thread in threading.enumerate()}


class Recorder:
    """The record of this process, in memory."""

    def __init__(self) -> None:
        # What the hot paths touch comes first: these lie side by side.
        self.active = False
        """Whether events are recorded now: the one thing that a sleeping hook looks at."""
        self.inside: Tail | None = None
        self.inside_start_ns = 0
        self.instruments: Instruments | None = None
        """What is put around ops beside the clock reading; None in a job without a device."""
        self.step_ended = False
        """An optimizer step has ended since the last op: the next op begins a step."""
        self.step = 0
        self.flushed_ns = 0
        """When the writer last wrote."""
        self.pipeline_flushed = False
        """The ops of this step are written, or are going to be."""
        self.asleep = False
        """Not to record before :meth:`wake`."""
        self.stopped = False
        """Never to start (again) in this process."""
        self._spans: list[Any] = []
        self.append: Callable[[tuple[int | Tail, ...]], None] = self._spans.append
        """Takes a span as it is, or as ``(start_ns, end_ns, tail)``: joined on the writer's thread."""
        self.lines: list[dict[str, Any]] = []
        self.threads = Threads()
        self.on_begin: list[Any] = []
        """Called with (rank, world size) when the record has begun."""
        self.on_step: list[Any] = []
        """Called at the beginning of each step after the first."""
        self.on_flush: list[Any] = []
        """Called on the writer's thread before it writes."""
        self.on_finish: list[Any] = []
        """Called at the interpreter's exit, before the last flush."""
        self._writer: Writer | None = None
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {}
        self._previous_excepthook: Any = None
        self._raised = False

    def start(self) -> bool:
        """Begin to record if the rank is known by now; says whether events are recorded.

        Slow only once: before the rank is known it looks up one attribute.
        """
        if self.asleep or self.stopped or self._writer is not None:
            return False
        return self._begin_if_known()

    def begin_asleep(self) -> None:
        """Make the files of a sleeping rank, so that it can be seen; does nothing once they are there."""
        if self._writer is None and not self.stopped:
            self._begin_if_known()

    def _begin_if_known(self) -> bool:
        try:
            distributed = sys.modules.get("torch.distributed.distributed_c10d")
            if distributed is None or distributed.GroupMember.WORLD is None:
                return False
            with self._lock:
                if not self.stopped and self._writer is None:  # else another thread was quicker
                    self._begin(distributed)
        except Exception as error:
            self.stop(f"cannot begin the record: {error}", "nothing is recorded, the job goes on")
        return self.active

    def stop(self, what: str, consequence: str) -> None:
        """End the recording for good and say so once."""
        self.active = False
        self.stopped = True
        self._spans.clear()
        guard.say_once("recorder", what, consequence)

    def sleep(self) -> None:
        """Record nothing until :meth:`wake`."""
        self.asleep, self.active = True, False

    def wake(self) -> None:
        """Record again."""
        self.asleep = False
        self.active = self._writer is not None and not self.stopped

    @property
    def spans(self) -> list[tuple[int, ...]]:
        """Spans that are not written yet, each in the order of ``model.SPAN_FIELDS``."""
        joined = _joined(self._spans)
        self._spans[: len(joined)] = joined  # others may have been appended since
        return self._spans

    def take(self, most: int) -> list[tuple[int, ...]]:
        """Up to so many of these, which are the caller's from now on."""
        taken = self._spans[:most]
        del self._spans[: len(taken)]
        return _joined(taken)

    @property
    def recorded(self) -> int:
        """Spans so far."""
        return len(self._spans) + (self._writer.written if self._writer is not None else 0)

    def begin_step(self) -> None:
        """An op came after an optimizer step: the next step has begun."""
        self.step_ended = self.pipeline_flushed = False
        self.step += 1
        for function in self.on_step:
            function()

    def flush_soon(self) -> None:
        """Have everything so far written, on the writer's thread."""
        if self._writer is not None:
            self._writer.wake()

    def pipeline_ended(self) -> None:
        """A step's pipeline has ended: have its ops written at once, before the job may count the step."""
        self.pipeline_flushed = True
        self.flush_soon()

    def optimizer_begins(self) -> None:
        """The ops before it are written meanwhile; where a framework's pipeline ended, they already are."""
        if not self.pipeline_flushed:
            self.pipeline_ended()

    def optimizer_ended(self, now_ns: int) -> None:
        """Its own span is written with the next step's, unless it took long."""
        if now_ns - self.flushed_ns > PATIENCE_NS:
            self.flush_soon()

    def flush(self) -> None:
        """Write everything so far on this thread (for tests and the exit)."""
        if self._writer is not None:
            self._writer.flush()

    def before_flush(self) -> None:
        """The writer is about to write."""
        _call_all(self.on_flush)

    def fact(self, name: str, value: Any) -> None:
        """Say a fact of the job, once for each value."""
        if self._facts.get(name, self) != value:
            self._facts[name] = value
            self.lines.append({"type": "fact", "name": name, "value": value})

    def forked(self) -> bool:
        """In a forked child: off for good where the parent was recording, whose files stay its own; says whether."""
        self._lock = threading.Lock()
        if self._writer is None:
            return False
        self._writer.forked()
        self._writer = None  # its lock may be held for ever: the parent's thread does not exist here
        self.instruments = None  # CUDA cannot be used in a forked child
        self.active = False
        self.stopped = True
        self._spans.clear()
        return True

    def _begin(self, distributed: Any) -> None:
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        limit = int(os.environ.get(MAX_BYTES_VARIABLE) or DEFAULT_MAX_BYTES)
        folder = os.environ[RUN_DIR_VARIABLE]
        header = _header(rank, world_size)
        self._writer = Writer(self, folder=folder, header=header, max_bytes=limit, stop=self.stop)
        thread_state()  # the thread that starts the record is number 0
        guard.listen(self._fault)
        self._previous_excepthook, sys.excepthook = sys.excepthook, self._excepthook
        atexit.register(self.finish)
        self._writer.start()
        self.active = not self.asleep
        for function in self.on_begin:
            function(rank, world_size)

    def _fault(self, probe: str, error: str) -> None:
        self.lines.append({"type": "fault", "probe": probe, "error": error})

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):
            self._raised = True
            self.fact("raised", f"{kind.__name__}: {error}"[:500])
            self.flush()
        self._previous_excepthook(kind, error, trace)

    def finish(self) -> None:
        """At the interpreter's exit: write what is left and the status."""
        if self._writer is None:
            return
        # The user may have replaced our excepthook: the interpreter leaves the last uncaught error in sys.last_value.
        raised = self._raised or getattr(sys, "last_value", None) is not None
        _call_all(self.on_finish)
        with contextlib.suppress(Exception):
            self._writer.close(RankStatus.RAISED if raised else RankStatus.FINISHED)
        self.active = False
        self.stopped = True


def _call_all(functions: list[Any]) -> None:
    """Call each; one that raises is called no more."""
    for function in list(functions):
        try:
            function()
        except Exception as error:
            functions.remove(function)
            guard.failed(getattr(function, "__qualname__", "listener"), error)


def _joined(spans: list[Any]) -> list[tuple[int, ...]]:
    return [span[:2] + span[2] if len(span) == _NESTED else span for span in spans]


def compute_tail(kind: int, start_ns: int, label: tuple[int, int, int], flags: int) -> Tail:
    """Tail of a span that is not a message; ``label`` is (microbatch, stage, chunk)."""
    return (start_ns, 0, RECORDER.step, NONE, NONE, 0, *label, NONE, thread_state().number, flags, kind, 0)


def with_flag(tail: Tail, flag: int) -> Tail:
    """The tail with one more flag."""
    return (*tail[:_FLAGS_AT], tail[_FLAGS_AT] | int(flag), *tail[_FLAGS_AT + 1 :])  # type: ignore[return-value]


def _header(rank: int, world_size: int) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    return {
        "rank": rank,
        "world_size": world_size,
        "local_rank": int(os.environ.get("LOCAL_RANK") or 0),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "argv": sys.argv,
        "python": platform.python_version(),
        "torch": str(getattr(torch, "__version__", "")),
        "cuda": _device_version(torch),
        "clock": clock_identity(),
        "started_unix_ns": time.time_ns(),
        "started_local_ns": time.perf_counter_ns(),
        "env": {name: value for name, value in os.environ.items() if _is_recorded(name)},
    }


def _device_version(torch: Any) -> str:
    """The version of CUDA or ROCm that torch was built for; empty for a CPU build. Initialises nothing."""
    version = getattr(torch, "version", None)
    return str(getattr(version, "cuda", None) or getattr(version, "hip", None) or "")


def _is_recorded(name: str) -> bool:
    return name.startswith(_ENVIRONMENT_PREFIXES) or name in _ENVIRONMENT_NAMES


RECORDER = Recorder()
"""The recorder of this process."""

_thread: ContextVar[ThreadState | None] = ContextVar("ppdiag_thread", default=None)
known_thread = _thread.get
"""State of the calling thread, None where :func:`thread_state` must find it first. A thread that runs in a copy of
another's context (``asyncio.to_thread``) counts as that one."""
if getattr(sys.flags, "thread_inherit_context", 0):  # then every thread would, as in free-threaded builds

    def known_thread() -> None:  # type: ignore[misc]  # noqa: D103
        return None


def thread_state() -> ThreadState:
    """State of the calling thread."""
    state = known_thread()
    if state is None:
        state = RECORDER.threads.state
        _thread.set(state)
    return state
