"""What is put around an op beside the reading of the host's clock: events of the device, NVTX ranges, device memory.

``RECORDER.instruments`` is None until the job uses CUDA, or a profiler that takes NVTX ranges is attached: that is all
that the hooks of other jobs look at. Looked for when the record begins and at the beginning of each step.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import guard, host_causes, memory, nvml, nvtx
from ppdiag.hooks.device import WAITS, Clock, CudaEvents, DeviceClock, HostClock, HostSpan
from ppdiag.hooks.patching import Patches
from ppdiag.hooks.recorder import KIND_AT, RECORDER

if TYPE_CHECKING:
    from ppdiag.hooks.recorder import Tail

PROBE = "device"
ERROR_STEP_NS = 20_000
NVTX_TOOL_VARIABLE = "NVTX_INJECTION64_PATH"
"""Set by nsys and other tools for the process that they trace (NVTX 3, "tool injection")."""

_patches = Patches()
_said: dict[str, int] = {}
_tool: list[str] = []
"""The tool that takes NVTX ranges, if any: looked up once, not in each step, since ``os.environ`` takes some us."""
_clocks: list[DeviceClock] = []
"""The device's clock, kept while the probes are off: what is known of the device's time stays true."""


class Instruments:
    """The instruments of this process. No method raises."""

    def __init__(self, clock: Clock, ranges: nvtx.Ranges | None, memories: memory.Memory | None) -> None:
        self._clock = clock
        self._ranges = ranges
        self._memory = memories

    def begin(self, tail: Tail) -> Any:
        """An op begins on this thread; gives its mark."""
        try:
            if self._ranges is not None:
                self._ranges.push(tail)
            return self._clock.mark() if tail[KIND_AT] in WAITS else self._clock.work()
        except Exception as error:
            guard.failed(PROBE, error)
            return None

    def leave(self, tail: Tail) -> Any:
        """The op that began last on this thread has been issued; gives its mark."""
        try:
            mark = self._clock.mark()
            if self._ranges is not None:
                self._ranges.pop()
            if self._memory is not None and tail[KIND_AT] in memory.KINDS:
                self._memory.sample(tail)
        except Exception as error:
            guard.failed(PROBE, error)
            return None
        return mark

    def mark(self) -> Any:
        """A moment of the current stream."""
        try:
            return self._clock.mark()
        except Exception as error:
            guard.failed(PROBE, error)
            return None

    def drop(self, mark: Any) -> None:
        """A mark is not needed after all."""
        self._clock.drop(mark)

    def keep(self, begin: Any, end: Any, span: HostSpan) -> None:
        """Record an op that lies between two marks."""
        self._clock.keep(begin, end, span)

    def end(self, begin: Any, span: HostSpan) -> None:
        """The op that began last on this thread has ended: record it."""
        self._clock.keep(begin, self.leave(span.tails[0]), span)

    def next_step(self) -> None:
        """A step begins."""
        if self._ranges is not None:
            self._ranges.next_step(RECORDER.step)


def install() -> None:
    """Look for a device from now on."""
    if look in RECORDER.on_step:
        return
    guard.register(PROBE, uninstall)
    _tool[:] = filter(None, [os.environ.get(NVTX_TOOL_VARIABLE)])
    RECORDER.on_begin.append(_look_at_begin)
    RECORDER.on_step.append(look)
    RECORDER.on_flush.append(_resolve)
    RECORDER.on_finish.append(_finish)
    look()


def uninstall() -> None:
    """Put no instruments around ops any more; what is pending is recorded as the host saw it."""
    RECORDER.instruments = None
    listeners: tuple[tuple[list[Any], Any], ...] = (
        (RECORDER.on_begin, _look_at_begin),
        (RECORDER.on_step, look),
        (RECORDER.on_flush, _resolve),
        (RECORDER.on_finish, _finish),
    )
    for functions, function in listeners:
        if function in functions:
            functions.remove(function)
    _patches.restore()
    nvml.stop()
    for clock in _clocks:
        clock.give_up()


def look() -> None:
    """On a training thread: put instruments around ops where there is something to see."""
    try:
        if RECORDER.instruments is not None:
            RECORDER.instruments.next_step()
        elif RECORDER.active and (_tool or _uses_cuda()):
            RECORDER.instruments = _instruments()
    except Exception as error:
        guard.failed(PROBE, error)


def _look_at_begin(_rank: int, _world_size: int) -> None:
    look()


def _uses_cuda() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _instruments() -> Instruments | None:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        ranges = nvtx.open_ranges() if os.environ.get(NVTX_TOOL_VARIABLE) else None
        return Instruments(HostClock(RECORDER.append), ranges, None) if ranges is not None else None
    if not _clocks:
        _clocks.append(DeviceClock(CudaEvents(cuda), RECORDER.append))
        RECORDER.fact("device", cuda.get_device_name())
        total_bytes = getattr(cuda.get_device_properties(cuda.current_device()), "total_memory", None)
        if total_bytes is not None:
            RECORDER.fact("device_memory_bytes", total_bytes)
        nvml.start(_say_awake, cuda)
    _hold_queries_in_captures(cuda, _clocks[0])
    if not guard.has_failed(host_causes.PROBE):
        host_causes.install_synchronising()
    return Instruments(_clocks[0], nvtx.open_ranges(), memory.Memory.of_cuda(cuda, RECORDER.lines.append))


def _say_awake(line: dict[str, Any]) -> None:
    """A sample of NVML: written only while steps are recorded."""
    if RECORDER.active:
        RECORDER.lines.append(line)


def _hold_queries_in_captures(cuda: Any, clock: DeviceClock) -> None:
    """Ask CUDA nothing while any thread captures a graph: in the usual mode, a query from another thread breaks it."""
    owner = getattr(cuda, "CUDAGraph", None)
    if owner is None or _patches:
        return
    begin, end = owner.capture_begin, owner.capture_end

    def capture_begin(*args: Any, **kwargs: Any) -> Any:
        clock.capture_begins()
        try:
            return begin(*args, **kwargs)
        except BaseException:
            clock.capture_ends()
            raise

    def capture_end(*args: Any, **kwargs: Any) -> Any:
        try:
            return end(*args, **kwargs)
        finally:
            clock.capture_ends()

    _patches.replace(owner, "capture_begin", capture_begin)
    _patches.replace(owner, "capture_end", capture_end)


def _resolve() -> None:
    """On the writer's thread."""
    for clock in _clocks:
        try:
            clock.resolve()
            _say_facts(clock)
        except Exception as error:
            guard.failed(PROBE, error)


def _finish() -> None:
    for clock in _clocks:
        try:
            clock.finish()
            _say_facts(clock, last=True)
        except Exception as error:
            guard.failed(PROBE, error)


def _say_facts(clock: DeviceClock, *, last: bool = False) -> None:
    if clock.time.is_known:
        # in steps, so that not every epoch is a line of the record
        RECORDER.fact("device_clock_error_ns", -(-clock.time.error_ns // ERROR_STEP_NS) * ERROR_STEP_NS)
        RECORDER.fact("device_drift_ppm", round(1e6 * clock.time.drift))
    if clock.untimed and (last or clock.untimed.bit_length() > _said.get("bits", 0)):  # each time that it has doubled
        _said["bits"] = clock.untimed.bit_length()
        RECORDER.fact("untimed_on_device", clock.untimed)
