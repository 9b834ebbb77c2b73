"""A device that works through its streams in order, on a clock of its own; its events tell float32 milliseconds."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field


def float32(value: float) -> float:
    """Rounded as a C float."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


@dataclass
class FakeDevice:
    """The host's clock, and streams that take work from it.

    Attributes:
        now: the host's clock (ns).
        offset, drift: the device's clock shows ``(host - offset) / (1 + drift)``.
        busy_until: when each stream is done with what was launched so far (host's clock).
        capturing: a graph is being captured: a query would break it.
    """

    now: int = 1_000_000_000_000
    offset: int = 400_000_000_000
    drift: float = 0.0
    busy_until: dict[int, int] = field(default_factory=dict)
    stream: int = 0
    capturing: bool = False
    events: int = 0
    broken: bool = False

    def launch(self, work_ns: int) -> tuple[int, int]:
        """Put work on the current stream; gives when it begins and ends, on the host's clock."""
        begin = max(self.now, self.busy_until.get(self.stream, 0))
        self.busy_until[self.stream] = begin + work_ns
        return begin, begin + work_ns

    def pass_time(self, ns: float) -> None:
        """The host does something else."""
        self.now += round(ns)

    def sleep(self, seconds: float) -> None:
        """``time.sleep``, with what a real one takes longer."""
        self.pass_time(1e9 * seconds + 20_000)

    def clock(self) -> int:
        """The host's clock; reading it takes time too."""
        self.now += 50
        return self.now

    # what the device's clock asks of CUDA

    def new(self) -> FakeEvent:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.events += 1
        return FakeEvent(self)

    def refuses(self) -> bool:
        return self.capturing

    def current_stream(self) -> int:
        return self.stream

    def adopt_thread(self) -> None:
        """There is but one device."""


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._done: int | None = None

    def record(self) -> None:
        assert not self._device.capturing
        self._device.pass_time(1_000)
        self._done = max(self._device.now, self._device.busy_until.get(self._device.stream, 0))

    def query(self) -> bool:
        assert not self._device.capturing, "the query broke the capture"
        self._device.pass_time(1_000)
        assert self._done is not None
        return self._done <= self._device.now

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self._done is not None
        assert end_event._done is not None
        assert max(self._done, end_event._done) <= self._device.now, "an event is not complete"
        difference = (end_event._done - self._done) / (1 + self._device.drift)
        return float32(difference / 1e6)
