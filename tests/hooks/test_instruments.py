"""When there are instruments around ops, and that they cost the job nothing where they fail."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.hooks import guard, host_causes, instruments, memory, nvml, nvtx
from ppdiag.hooks.device import DeviceClock, HostClock, HostSpan
from ppdiag.hooks.instruments import Instruments
from ppdiag.hooks.recorder import RECORDER, compute_tail
from ppdiag.model import Flag, Kind
from tests.hooks.fake_device import FakeDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

SPAN = HostSpan(100, 200, (compute_tail(Kind.FORWARD, 100, (3, 2, 1), 0),))


class Graph:
    """``torch.cuda.CUDAGraph``."""

    broken = False

    def capture_begin(self) -> str:
        if self.broken:
            raise RuntimeError("of the user")
        return "begun"

    def capture_end(self) -> str:
        return "ended"


class FakeCuda(SimpleNamespace):
    """The functions of ``torch.cuda`` that are used, on a fake device."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.set_by: list[int] = []
        statistics = {"allocated_bytes": {"all": {"current": 1, "peak": 2}}}
        super().__init__(
            is_initialized=lambda: True,
            Event=lambda enable_timing: self.device.new(),  # noqa: ARG005
            is_current_stream_capturing=lambda: self.device.capturing,
            current_device=lambda: 0,
            current_stream=lambda: SimpleNamespace(cuda_stream=self.device.stream),
            set_device=lambda _device: self.set_by.append(threading.get_ident()),
            get_device_name=lambda: "fake",
            get_device_properties=lambda _device: SimpleNamespace(total_memory=80 << 30),
            memory_stats_as_nested_dict=lambda: statistics,
            CUDAGraph=type("CUDAGraph", (Graph,), {}),
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A job that uses CUDA, its recorder awake; all put back afterwards."""
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake, _C=SimpleNamespace()))
    monkeypatch.setitem(sys.modules, "torch._C", SimpleNamespace(_cuda_synchronize=lambda: None))
    monkeypatch.setitem(sys.modules, "torch.cuda.streams", SimpleNamespace())
    monkeypatch.setattr(nvml, "start", lambda say, cuda: None)  # noqa: ARG005
    monkeypatch.setattr(instruments, "_clocks", [])
    monkeypatch.setattr(instruments, "_said", {})
    monkeypatch.setattr(RECORDER, "active", True)
    listeners = (RECORDER.on_begin, RECORDER.on_step, RECORDER.on_flush, RECORDER.on_finish)
    before = [[*functions] for functions in listeners]
    RECORDER.spans.clear()
    yield fake
    instruments.uninstall()
    host_causes.uninstall()
    assert [[*functions] for functions in listeners] == before
    RECORDER.spans.clear()
    RECORDER.lines.clear()
    RECORDER._facts.clear()


def test_a_job_without_a_device_has_no_instruments(cuda: FakeCuda) -> None:
    cuda.is_initialized = lambda: False
    owner = sys.modules["torch._C"]
    before = owner._cuda_synchronize
    instruments.install()
    assert RECORDER.instruments is None
    assert owner._cuda_synchronize is before
    cuda.is_initialized = lambda: True
    instruments.look()  # the next step
    assert RECORDER.instruments is not None
    assert owner._cuda_synchronize is not before


def test_asleep_nothing_is_looked_for(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RECORDER, "active", False)
    instruments.install()
    assert RECORDER.instruments is None
    assert cuda.device.events == 0


@pytest.mark.usefixtures("cuda")
def test_an_op_is_timed_and_its_memory_taken() -> None:
    instruments.install()
    found = RECORDER.instruments
    assert found is not None
    found.end(found.begin(SPAN.tails[0]), SPAN)
    assert RECORDER.spans == []
    instruments._finish()
    (span,) = RECORDER.spans
    assert span[13] == Flag.DEVICE
    assert [word["peak_bytes"] for word in RECORDER.lines if word["type"] == "memory"] == [2]
    assert {"type": "fact", "name": "device", "value": "fake"} in RECORDER.lines


def test_a_device_that_fails_costs_its_times_alone(cuda: FakeCuda) -> None:
    instruments.install()
    found = RECORDER.instruments
    assert found is not None
    cuda.device.broken = True
    mark = found.begin(SPAN.tails[0])
    found.end(mark, SPAN)
    assert RECORDER.instruments is None
    assert RECORDER.spans == [(100, 200, *SPAN.tails[0])]
    assert [probe for probe, _ in guard._faults] == ["device"]


def test_what_is_pending_when_the_probes_go_off_is_recorded_as_the_host_saw_it(cuda: FakeCuda) -> None:
    instruments.install()
    found = RECORDER.instruments
    assert found is not None
    cuda.device.launch(10**12)
    found.end(found.begin(SPAN.tails[0]), SPAN)
    instruments.uninstall()
    assert RECORDER.spans == [(100, 200, *SPAN.tails[0])]


def test_while_a_graph_is_captured_cuda_is_asked_nothing(cuda: FakeCuda) -> None:
    instruments.install()
    (clock,) = instruments._clocks
    found = RECORDER.instruments
    assert found is not None
    found.end(found.begin(SPAN.tails[0]), SPAN)
    graph: Any = cuda.CUDAGraph()
    assert graph.capture_begin() == "begun"
    cuda.device.capturing = True  # a query would fail an assertion in the fake
    instruments._resolve()
    assert found.mark() is None
    cuda.device.capturing = False
    assert graph.capture_end() == "ended"
    assert found.mark() is not None
    assert clock.untimed == 1


def test_a_capture_that_fails_to_begin_is_none(cuda: FakeCuda) -> None:
    instruments.install()
    graph: Any = cuda.CUDAGraph()
    graph.broken = True
    with pytest.raises(RuntimeError, match="of the user"):
        graph.capture_begin()
    assert RECORDER.instruments is not None
    assert RECORDER.instruments.mark() is not None


def test_uninstalling_leaves_the_graphs_class_as_it_was(cuda: FakeCuda) -> None:
    before = {**vars(cuda.CUDAGraph)}
    instruments.install()
    assert "capture_begin" in vars(cuda.CUDAGraph)
    instruments.uninstall()
    assert {**vars(cuda.CUDAGraph)} == before


def test_the_writers_thread_takes_the_jobs_device_and_no_other_thread_is_touched(cuda: FakeCuda) -> None:
    instruments.install()
    instruments._resolve()  # on this thread, which began
    assert cuda.set_by == []
    writer = threading.Thread(target=instruments._resolve)
    writer.start()
    writer.join()
    assert len(cuda.set_by) == 1


@pytest.mark.usefixtures("cuda")
def test_a_fault_of_the_resolution_does_not_reach_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    instruments.install()

    def broken(_clock: DeviceClock) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(DeviceClock, "resolve", broken)
    instruments._resolve()
    assert RECORDER.instruments is None
    assert [probe for probe, _ in guard._faults] == ["device"]


def test_ranges_alone_leave_the_times_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    domain = SimpleNamespace(
        get_event_attributes=lambda message, **_: message,
        push_range=told.append,
        pop_range=lambda: told.append("pop"),
        start_range=lambda attributes: attributes,
        end_range=lambda _range: None,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.setitem(os.environ, instruments.NVTX_TOOL_VARIABLE, "/a/tool.so")
    monkeypatch.setattr(nvtx, "open_ranges", lambda: nvtx.Ranges(domain))
    found = instruments._instruments()
    assert found is not None
    spans: list[tuple[int, ...]] = []
    found._clock = HostClock(spans.append)
    found.end(found.begin(SPAN.tails[0]), SPAN)
    assert told == ["F stage 2 mb 3", "pop"]
    assert spans == [(100, 200, *SPAN.tails[0])]


def test_a_failing_memory_reading_is_a_fault_of_ours_alone() -> None:
    def broken() -> tuple[int, int]:
        raise RuntimeError("no statistics")

    spans: list[tuple[int, ...]] = []
    found = Instruments(HostClock(spans.append), None, memory.Memory(broken, lambda word: None))  # noqa: ARG005
    found.end(found.begin(SPAN.tails[0]), SPAN)
    assert spans == [(100, 200, *SPAN.tails[0])]
    assert [probe for probe, _ in guard._faults] == ["device"]


def test_how_many_moments_were_not_timed_is_said_each_time_it_doubled_and_at_the_end(cuda: FakeCuda) -> None:
    instruments.install()
    found = RECORDER.instruments
    assert found is not None
    cuda.device.capturing = True
    for _ in range(21):
        found.mark()
        instruments._resolve()
    instruments._finish()
    said = [word["value"] for word in RECORDER.lines if word.get("name") == "untimed_on_device"]
    assert said == [1, 2, 4, 8, 16, 21]
