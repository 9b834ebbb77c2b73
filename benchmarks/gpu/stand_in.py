"""A stand-in for the device, for the dry run: a thread that works through what is launched, in order.

``install`` puts it in the place of the few functions of ``torch.cuda`` that the recorder uses. Its events tell float32
milliseconds on a clock of its own, and are complete when the thread has come to them.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

CLOCK_OFFSET_NS = 123_456_789_000


class Stream:
    """The stand-in's only stream."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="stand-in device", daemon=True).start()

    def launch(self, work: Callable[[], None]) -> None:
        """Have it done after all that was launched before."""
        self._work.put(work)

    def drain(self) -> None:
        """Wait until all is done."""
        done = threading.Event()
        self.launch(done.set)
        done.wait()

    def _run(self) -> None:
        while True:
            self._work.get()()


STREAM = Stream()


class Event:
    """``torch.cuda.Event``, as far as it is used."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self._done_ns: int | None = None
        self._records = 0

    def record(self) -> None:
        self._done_ns = None
        self._records += 1
        number = self._records
        STREAM.launch(lambda: self._reach(number))

    def _reach(self, number: int) -> None:
        if number == self._records:  # recorded again since: the last time counts
            self._done_ns = time.perf_counter_ns() - CLOCK_OFFSET_NS

    def query(self) -> bool:
        return self._done_ns is not None

    def elapsed_time(self, end_event: Event) -> float:
        assert self._done_ns is not None
        assert end_event._done_ns is not None
        return float(struct.unpack("f", struct.pack("f", (end_event._done_ns - self._done_ns) / 1e6))[0])


def install(torch: Any) -> None:
    """Put the stand-in in the place of the device, in a torch that says it was built for one."""

    def synchronize() -> None:
        torch._C._cuda_synchronize()  # looked up in each call, as torch does

    torch.version.cuda = "0.0"
    stand_in = {
        "Event": Event,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: 0,
        "current_stream": lambda: SimpleNamespace(cuda_stream=0),
        "set_device": lambda _device: None,
        "get_device_name": lambda: "stand-in",
        "get_device_properties": lambda _device: SimpleNamespace(),
        "memory_stats_as_nested_dict": lambda: {"allocated_bytes": {"all": {"current": 1, "peak": 2}}},
        "synchronize": synchronize,
    }
    torch._C._cuda_synchronize = STREAM.drain
    for name, value in stand_in.items():
        setattr(torch.cuda, name, value)
