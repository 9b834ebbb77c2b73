"""Samples of NVML: what is read when, and what is left alone."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ppdiag.hooks import guard, nvml

pynvml = pytest.importorskip("pynvml")
UUID = "5c0e1f8a-0000-0000-0000-000000000001"


class FakeNvml:
    """A device without NVLink, whose readings count up."""

    NVMLError = pynvml.NVMLError
    NVML_SUCCESS = pynvml.NVML_SUCCESS
    NVML_CLOCK_SM, NVML_CLOCK_MEM = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = pynvml.NVML_PCIE_UTIL_TX_BYTES, pynvml.NVML_PCIE_UTIL_RX_BYTES
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX

    def __init__(self) -> None:
        self.calls: list[str] = []

    def nvmlDeviceGetUtilizationRates(self, _device: object) -> Any:
        return SimpleNamespace(gpu=97, memory=41)

    def nvmlDeviceGetClockInfo(self, _device: object, kind: int) -> int:
        return 1980 if kind == pynvml.NVML_CLOCK_SM else 2619

    def nvmlDeviceGetPowerUsage(self, _device: object) -> int:
        return 512_345

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _device: object) -> int:
        return int(pynvml.nvmlClocksThrottleReasonSwPowerCap)

    def nvmlDeviceGetTemperature(self, _device: object, _sensor: int) -> int:
        return 61

    def nvmlDeviceGetPcieThroughput(self, _device: object, counter: int) -> int:
        self.calls.append("pcie")
        return 3 if counter == pynvml.NVML_PCIE_UTIL_TX_BYTES else 5

    def nvmlDeviceGetFieldValues(self, _device: object, fields: list[Any]) -> list[Any]:
        self.calls.append("nvlink")
        return [SimpleNamespace(nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED) for _ in fields]


def sampler() -> tuple[nvml.Sampler, FakeNvml, list[dict[str, Any]]]:
    fake, said = FakeNvml(), []  # type: ignore[var-annotated]
    return nvml.Sampler(fake, object(), said.append), fake, said


def test_a_sample_has_each_quantity_with_its_unit() -> None:
    found, _, said = sampler()
    found.sample(100.0)
    (sample,) = said
    assert sample.pop("local_ns") > 0
    assert sample == {
        "type": "sample",
        "gpu_percent": 97,
        "memory_percent": 41,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "power_mw": 512_345,
        "throttle_reasons": 4,
        "temperature_c": 61,
        "pcie_sent_bytes_per_s": 3 * 1024,
        "pcie_received_bytes_per_s": 5 * 1024,
    }


def test_each_quantity_has_its_own_period() -> None:
    found, fake, said = sampler()
    now = 100.0
    for _ in range(20):
        found.sample(now)
        pause = found.pause_s(now)
        assert pause is not None
        assert pause == pytest.approx(1.0)
        now += pause
    assert sum("gpu_percent" in sample for sample in said) == 20
    assert sum("temperature_c" in sample for sample in said) == 4
    assert sum("pcie_sent_bytes_per_s" in sample for sample in said) == 2
    assert fake.calls.count("pcie") == 4  # one counter each for sent and received


def test_what_a_device_cannot_tell_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, fake, said = sampler()

    def unsupported(*_: object) -> int:
        fake.calls.append("power")
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(fake, "nvmlDeviceGetPowerUsage", unsupported)
    for second in range(5):
        found.sample(float(second))
    assert fake.calls.count("power") == 1
    assert all("power_mw" not in sample and "gpu_percent" in sample for sample in said)


def test_the_device_is_found_by_its_uuid_whatever_is_visible() -> None:
    asked: list[str] = []

    class Handles(FakeNvml):
        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
            asked.append(uuid)
            return "handle"

    cuda = SimpleNamespace(current_device=lambda: 3, get_device_properties=lambda _: SimpleNamespace(uuid=UUID))
    assert nvml._device(Handles(), cuda) == "handle"
    assert asked == [f"GPU-{UUID}"]


def test_without_the_library_there_are_no_samples_and_no_fault() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pass
    else:
        pytest.skip("NVML is on this machine")
    said: list[dict[str, Any]] = []
    nvml.start(said.append, SimpleNamespace())
    assert [word["name"] for word in said] == ["nvml"]
    assert str(said[0]["value"]).startswith("off: ")
    assert guard._faults == []
    assert not [thread for thread in threading.enumerate() if thread.name == "ppdiag-nvml"]


def test_without_the_package_there_are_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    said: list[dict[str, Any]] = []
    nvml.start(said.append, SimpleNamespace())
    assert said == []


def test_the_thread_ends_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, said = FakeNvml(), []  # type: ignore[var-annotated]
    fake.nvmlInit = lambda: None  # type: ignore[attr-defined]
    fake.nvmlDeviceGetCount = lambda: 1  # type: ignore[attr-defined]
    fake.nvmlDeviceGetHandleByIndex = lambda _: object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    cuda = SimpleNamespace(current_device=lambda: 0, get_device_properties=lambda _: SimpleNamespace())
    nvml.start(said.append, cuda)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "ppdiag-nvml"]
    nvml.start(said.append, cuda)  # a second start is none
    nvml.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert len(said) <= 1
