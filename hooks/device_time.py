"""The device's time on the host's clock: an offset and a drift, from bounds, so that nothing ever waits for the device.

An event's time on the device is known only as milliseconds since another event. What the host knows of it are bounds:
it was not complete before it was recorded, nor while a query said no; it was complete when a query said yes. Each such
bound limits ``host - device``. Bounds are collected by epochs; each epoch is a measured offset with a certified error,
and a line through the epochs gives offset and drift.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

FIRST_EPOCH_NS = 250_000_000
EPOCH_NS = 2_000_000_000
"""At first the drift may move the offset in an epoch by ``MOST_DRIFT`` of its length: so the first ones are short."""
MOST_EPOCHS = 64
GOOD_NS = 300_000
MOST_LINES = 16
"""A span is mapped soon after it ends: one that began so many epochs ago lies before the first that is kept."""
LOOSE = 4.0
"""Epochs with bounds this many times as far apart as the tightest are not used."""
USUAL_DRIFT = 50e-6
"""Spread of the drift before anything is measured: an epoch or two must not make up a drift from their errors."""
MOST_DRIFT = 2 * USUAL_DRIFT
"""By which bounds are widened for their distance from the epoch's beginning, until the drift is known better."""
RESOLUTION_NS = 500.0
"""Of a CUDA event (cudaEventElapsedTime: around 0.5 us)."""


@dataclass(slots=True)
class _Epoch:
    """Bounds on ``host - device`` (ns) around one moment of the device."""

    at_ns: float
    low_ns: float = -math.inf
    high_ns: float = math.inf

    @property
    def middle_ns(self) -> float:
        return (self.low_ns + self.high_ns) / 2

    @property
    def half_ns(self) -> float:
        """Half the distance of the bounds; where they cross (a clock was set), as far as they cross."""
        return abs(self.high_ns - self.low_ns) / 2

    @property
    def is_bounded(self) -> bool:
        return self.low_ns > -math.inf and self.high_ns < math.inf


@dataclass(frozen=True, slots=True)
class _Line:
    """The map from the device time ``from_ns`` on, not before ``floor_ns``: so all lines together never go back."""

    from_ns: float
    floor_ns: int
    origin_ns: float
    offset_ns: float
    drift: float

    def host_ns(self, device_ns: float) -> int:
        return max(self.floor_ns, round(device_ns + self.offset_ns + self.drift * (device_ns - self.origin_ns)))


class DeviceTime:
    """Maps times of the device (ns since its first event) to the host's clock (ns).

    >>> time = DeviceTime()
    >>> time.not_before(0.0, 1_000_000)
    >>> time.not_after(0.0, 1_000_020)
    >>> time.settle()
    >>> time.host_ns(500.0), time.error_ns
    (1000510, 10)
    """

    def __init__(self) -> None:
        self._epochs: deque[_Epoch] = deque(maxlen=MOST_EPOCHS)
        self._open: _Epoch | None = None
        self._lines: deque[_Line] = deque(maxlen=MOST_LINES)
        self._mapped_to_ns = -math.inf
        """The latest time that was mapped."""
        self.drift = 0.0
        """Seconds that the host's clock gains a second on the device's."""
        self._drift_error = MOST_DRIFT
        self.error_ns = 0
        """Bound on the error at the epochs in use."""

    @property
    def is_known(self) -> bool:
        """Whether there is an epoch to go by."""
        return bool(self._epochs)

    @property
    def is_good(self) -> bool:
        """Whether the first times that are mapped would be good: a far better line would come too late for them."""
        return self.is_known and self.error_ns <= GOOD_NS

    def wants_bounds(self, tight_ns: float) -> bool:
        """Whether the open epoch lacks bounds nearer to each other than this."""
        opened = self._open
        return opened is None or not opened.is_bounded or 2 * opened.half_ns > tight_ns

    def not_before(self, device_ns: float, host_ns: int) -> None:
        """The device reached this time when the host's clock showed ``host_ns``, or later."""
        epoch = self._epoch(device_ns)
        epoch.low_ns = max(epoch.low_ns, self._difference(epoch, device_ns, host_ns, -self._drift_error))

    def not_after(self, device_ns: float, host_ns: int) -> None:
        """The device reached this time when the host's clock showed ``host_ns``, or earlier."""
        epoch = self._epoch(device_ns)
        epoch.high_ns = min(epoch.high_ns, self._difference(epoch, device_ns, host_ns, self._drift_error))

    def host_ns(self, device_ns: float) -> int:
        """The host's clock at this time of the device; the later of two times never comes out earlier."""
        self._mapped_to_ns = max(self._mapped_to_ns, device_ns)
        for line in reversed(self._lines):
            if device_ns >= line.from_ns:
                return line.host_ns(device_ns)
        return self._lines[0].host_ns(device_ns)

    def settle(self) -> None:
        """Close the open epoch, whatever it has (at the end, or where spans cannot wait any longer)."""
        opened, self._open = self._open, None
        if opened is not None and opened.is_bounded:
            self._epochs.append(opened)
            self._fit()

    def _epoch(self, device_ns: float) -> _Epoch:
        length_ns = EPOCH_NS if len(self._epochs) >= EPOCH_NS // FIRST_EPOCH_NS else FIRST_EPOCH_NS
        if self._open is not None and device_ns - self._open.at_ns > length_ns:
            self.settle()
        if self._open is None:
            self._open = _Epoch(device_ns)
        return self._open

    def _difference(self, epoch: _Epoch, device_ns: float, host_ns: int, slack: float) -> float:
        """``host - device`` at the epoch's beginning, by the drift as far as it is known."""
        away_ns = device_ns - epoch.at_ns
        return host_ns - device_ns - self.drift * away_ns + slack * abs(away_ns)

    def _fit(self) -> None:
        """A line through the middles, weighted by the bounds, its slope held back by ``USUAL_DRIFT``."""
        tightest = min(epoch.half_ns for epoch in self._epochs)
        used = [epoch for epoch in self._epochs if epoch.half_ns <= LOOSE * tightest + RESOLUTION_NS]
        weights = [1 / (epoch.half_ns + RESOLUTION_NS) ** 2 for epoch in used]
        total = sum(weights)
        origin = sum(weight * epoch.at_ns for weight, epoch in zip(weights, used, strict=True)) / total
        # Offsets are as large as the clock's reading, beside which ns would drown: take one of them off first.
        base = used[0].middle_ns
        level = sum(weight * (epoch.middle_ns - base) for weight, epoch in zip(weights, used, strict=True)) / total
        across = along = 0.0
        for weight, epoch in zip(weights, used, strict=True):
            across += weight * (epoch.at_ns - origin) * (epoch.middle_ns - base - level)
            along += weight * (epoch.at_ns - origin) ** 2
        self.drift = across / (along + 1 / USUAL_DRIFT**2)
        self._drift_error = 2 / math.sqrt(along + 1 / USUAL_DRIFT**2)
        since_ns = self._mapped_to_ns
        floor_ns = self.host_ns(since_ns) if since_ns > -math.inf else 0
        self._lines.append(_Line(since_ns, floor_ns, origin, base + level, self.drift))
        residuals = (abs(epoch.middle_ns - base - level - self.drift * (epoch.at_ns - origin)) for epoch in used)
        self.error_ns = math.ceil(max(epoch.half_ns + far for epoch, far in zip(used, residuals, strict=True)))
