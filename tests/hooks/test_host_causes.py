"""Host time with a known cause: real collections and a real DataLoader."""

from __future__ import annotations

import gc
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.hooks import guard, host_causes
from ppdiag.hooks.recorder import RECORDER
from ppdiag.model import HostCause, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

MS = 1_000_000
KIND, OP, STEP = 14, 15, 4
"""Positions in a span."""


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The spans of the process's recorder, awake with the probe on; all of it put back."""
    pytest.importorskip("torch.utils.data.dataloader")
    callbacks = [*gc.callbacks]
    RECORDER.spans.clear()
    monkeypatch.setattr(RECORDER, "active", True)
    gc.collect()
    host_causes.install()
    yield RECORDER.spans
    host_causes.uninstall()
    RECORDER.spans.clear()
    assert gc.callbacks == callbacks


def of(spans: list[tuple[int, ...]], cause: HostCause) -> list[tuple[int, ...]]:
    return [span for span in spans if (span[KIND], span[OP]) == (Kind.HOST, cause)]


def test_a_long_collection_is_a_span_and_short_ones_are_not(
    spans: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cyclic: list[list[object]] = []
    for _ in range(200_000):
        pair: list[object] = []
        pair.append(pair)
        cyclic.append(pair)
    spans.clear()  # making them has set the collector off too
    begin = time.perf_counter_ns()
    gc.collect()
    end = time.perf_counter_ns()
    found = of(spans, HostCause.GC)
    longest = max(found, key=lambda span: span[1] - span[0])
    assert begin <= longest[0] < longest[1] <= end
    assert longest[1] - longest[0] > 0.5 * (end - begin)
    monkeypatch.setattr(host_causes, "SHORTEST_NS", 10**12)
    spans.clear()
    gc.collect()
    assert of(spans, HostCause.GC) == []


def test_each_batch_that_a_loader_is_waited_for_is_a_span(spans: list[tuple[int, ...]]) -> None:
    from torch.utils.data import DataLoader

    class Slow:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            time.sleep(0.02)
            return index

    assert [int(batch) for batch in DataLoader(Slow(), batch_size=1)] == [0, 1, 2]
    found = of(spans, HostCause.DATA)
    assert len(found) == 4  # the last one ends the epoch
    assert all(span[1] - span[0] >= 20 * MS for span in found[:3])


def test_a_loader_that_fails_fails_as_without_us(spans: list[tuple[int, ...]]) -> None:
    from torch.utils.data import DataLoader

    def broken(_batch: object) -> object:
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        next(iter(DataLoader([1, 2], collate_fn=broken)))
    assert len(of(spans, HostCause.DATA)) == 1
    assert guard._faults == []


class FakeEvent:
    """``torch.cuda.Event``: one method that is Python's."""

    def synchronize(self) -> str:
        time.sleep(0.005)
        return "done"


@pytest.fixture
def device(spans: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ARG001  (it must come first)
    """The modules of a torch that has a device, with the calls that wait for it patched."""

    def cuda_synchronize(seconds: float = 0.0) -> float:
        if seconds:
            time.sleep(seconds)
        if seconds > 1:
            raise RuntimeError("of the device")
        return seconds

    torch_c, streams = SimpleNamespace(_cuda_synchronize=cuda_synchronize), SimpleNamespace(Event=FakeEvent)
    monkeypatch.setitem(sys.modules, "torch._C", torch_c)
    monkeypatch.setitem(sys.modules, "torch.cuda.streams", streams)
    host_causes.install_synchronising()
    return torch_c


def test_a_call_that_waits_for_the_device_is_a_span_and_one_that_does_not_is_none(
    spans: list[tuple[int, ...]], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_causes, "SHORTEST_NS", 4 * MS)  # a busy machine may stop us for longer than 0.1 ms
    assert device._cuda_synchronize(seconds=0.02) == 0.02
    assert FakeEvent().synchronize() == "done"
    device._cuda_synchronize()
    first, second = of(spans, HostCause.SYNCHRONISING)
    assert first[1] - first[0] >= 20 * MS
    assert second[1] - second[0] >= 5 * MS


def test_a_call_that_fails_on_the_device_fails_as_without_us(
    spans: list[tuple[int, ...]], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(host_causes, "SHORTEST_NS", 0)
    with pytest.raises(RuntimeError, match="of the device"):
        device._cuda_synchronize(2.0)
    assert len(of(spans, HostCause.SYNCHRONISING)) == 1
    assert guard._faults == []


def test_calls_that_wait_for_the_device_are_put_back_as_they_were(device: Any) -> None:
    patched, own = device._cuda_synchronize, vars(FakeEvent)["synchronize"]
    host_causes.uninstall()
    assert device._cuda_synchronize is patched.__wrapped__
    assert FakeEvent.synchronize is own.__wrapped__


def test_asleep_nothing_is_recorded(spans: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import DataLoader

    monkeypatch.setattr(RECORDER, "active", False)
    monkeypatch.setattr(host_causes, "SHORTEST_NS", 0)
    gc.collect()
    assert [int(batch) for batch in DataLoader([5], batch_size=1)] == [5]
    assert spans == []


def test_uninstalling_leaves_the_iterator_as_it_was() -> None:
    dataloader = pytest.importorskip("torch.utils.data.dataloader")
    before = vars(dataloader._BaseDataLoaderIter)["__next__"]
    host_causes.install()
    assert vars(dataloader._BaseDataLoaderIter)["__next__"] is not before
    host_causes.uninstall()
    assert vars(dataloader._BaseDataLoaderIter)["__next__"] is before
