"""Host time with a known cause: real collections and a real DataLoader."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

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
    monkeypatch.setattr(host_causes, "SHORTEST_GC_NS", 10**12)
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


def test_asleep_nothing_is_recorded(spans: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import DataLoader

    monkeypatch.setattr(RECORDER, "active", False)
    monkeypatch.setattr(host_causes, "SHORTEST_GC_NS", 0)
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
