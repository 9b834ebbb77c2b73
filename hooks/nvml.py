"""What NVML says of the rank's device, in a thread of its own: utilisation, clocks, power, heat, throttling.

Each quantity has its own period: PCIe counters take 20 ms a reading inside the driver, the others some 10 us. The
package pynvml may be missing in the training environment, or the library on the machine: then there are no samples.
A sample is a word of the record, ``{"type": "sample", "local_ns": ..., NAME: VALUE}``.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import guard

if TYPE_CHECKING:
    from collections.abc import Callable

    Read = Callable[[Any, Any], dict[str, int]]
    Say = Callable[[dict[str, Any]], None]

PROBE = "nvml"
_FIRST_LINKS = 18
"""No device has more NVLinks (H100, H200: 18)."""


@dataclass(slots=True)
class Quantity:
    """Something that is read every ``period_s``; off once the device has said that it cannot tell."""

    period_s: float
    read: Read
    due_s: float = 0.0


def _utilisation(nvml: Any, device: Any) -> dict[str, int]:
    rates = nvml.nvmlDeviceGetUtilizationRates(device)
    return {"gpu_percent": rates.gpu, "memory_percent": rates.memory}


def _clocks(nvml: Any, device: Any) -> dict[str, int]:
    return {
        "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM),
    }


def _power(nvml: Any, device: Any) -> dict[str, int]:
    return {"power_mw": nvml.nvmlDeviceGetPowerUsage(device)}


def _throttling(nvml: Any, device: Any) -> dict[str, int]:
    """Bits of ``nvmlClocksEventReason*``."""
    return {"throttle_reasons": nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)}


def _temperature(nvml: Any, device: Any) -> dict[str, int]:
    return {"temperature_c": nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)}


def _pcie(nvml: Any, device: Any) -> dict[str, int]:
    """NVML counts over the last 20 ms, in KB/s."""
    sent = nvml.nvmlDeviceGetPcieThroughput(device, nvml.NVML_PCIE_UTIL_TX_BYTES)
    received = nvml.nvmlDeviceGetPcieThroughput(device, nvml.NVML_PCIE_UTIL_RX_BYTES)
    return {"pcie_sent_bytes_per_s": 1024 * sent, "pcie_received_bytes_per_s": 1024 * received}


def _nvlink(nvml: Any, device: Any) -> dict[str, int]:
    """Data bytes over all links since the driver was loaded (the field counts KiB)."""
    fields = [nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX]
    totals = []
    for field in fields:
        values = nvml.nvmlDeviceGetFieldValues(device, [(field, link) for link in range(_FIRST_LINKS)])
        good = [value.value.ullVal for value in values if value.nvmlReturn == nvml.NVML_SUCCESS]
        if not good:
            return {}
        totals.append(1024 * sum(good))
    return {"nvlink_sent_bytes": totals[0], "nvlink_received_bytes": totals[1]}


def quantities() -> list[Quantity]:
    """All that is read, each with its period."""
    return [
        Quantity(1.0, _utilisation),
        Quantity(1.0, _clocks),
        Quantity(1.0, _power),
        Quantity(1.0, _throttling),
        Quantity(5.0, _temperature),
        Quantity(5.0, _nvlink),
        Quantity(10.0, _pcie),
    ]


class Sampler:
    """Reads what is due and says it."""

    def __init__(self, nvml: Any, device: Any, say: Say) -> None:
        self._nvml = nvml
        self._device = device
        self._say = say
        self._quantities = quantities()

    def sample(self, now_s: float) -> None:
        """Say all that is due at this time (any clock that runs evenly)."""
        values: dict[str, int] = {}
        for quantity in [quantity for quantity in self._quantities if quantity.due_s <= now_s]:
            quantity.due_s = now_s + quantity.period_s
            try:
                values |= quantity.read(self._nvml, self._device)
            except (self._nvml.NVMLError, AttributeError):  # this device, driver or pynvml does not have it
                self._quantities.remove(quantity)
        if values:
            self._say({"type": "sample", "local_ns": perf_counter_ns(), **values})

    def pause_s(self, now_s: float) -> float | None:
        """How long nothing is due; None where nothing ever is again."""
        return max(0.0, min(q.due_s for q in self._quantities) - now_s) if self._quantities else None


_running: list[threading.Event] = []
"""The stop signal of the thread that runs."""


def start(say: Say, cuda: Any) -> None:
    """Sample the current device of torch from now on, where NVML is to be had."""
    try:
        import pynvml
    except Exception:  # not there, or broken
        return
    if _running:
        return
    try:
        pynvml.nvmlInit()
        device = _device(pynvml, cuda)
    except Exception as error:  # no library or no rights here: no samples, and no fault of the job or of ours
        say({"type": "fact", "name": "nvml", "value": f"off: {error}"})
        return
    stop_signal = threading.Event()
    _running.append(stop_signal)
    sampler = Sampler(pynvml, device, say)
    threading.Thread(target=_run, args=(sampler, stop_signal), name="ppdiag-nvml", daemon=True).start()


def stop() -> None:
    """End the thread, at its next look."""
    while _running:
        _running.pop().set()


def _run(sampler: Sampler, stop_signal: threading.Event) -> None:
    try:
        pause_s: float | None = 0.0
        while pause_s is not None and not stop_signal.wait(pause_s):
            now_s = perf_counter_ns() / 1e9
            sampler.sample(now_s)
            pause_s = sampler.pause_s(now_s)
    except Exception as error:
        guard.failed(PROBE, error)


def _device(nvml: Any, cuda: Any) -> Any:
    """NVML's handle of torch's current device: by its UUID, since NVML knows nothing of ``CUDA_VISIBLE_DEVICES``."""
    properties = cuda.get_device_properties(cuda.current_device())
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    if nvml.nvmlDeviceGetCount() == 1:
        return nvml.nvmlDeviceGetHandleByIndex(0)
    raise LookupError("no device of NVML has the UUID of torch's device")
