"""Spans timed by events: against a device whose true times are known."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ppdiag.hooks import device
from ppdiag.hooks.device import DeviceClock, HostClock, HostSpan
from ppdiag.hooks.recorder import compute_tail
from ppdiag.model import DEVICE_SPAN_FIELDS, NONE, Flag, Kind
from tests.hooks.fake_device import FakeDevice

MS = 1_000_000
HOOKS = Path(__file__).parents[2] / "hooks"
NAMES = [name for name, _, _ in DEVICE_SPAN_FIELDS]
Truth = list[tuple[int, int]]


def make(fake: FakeDevice) -> tuple[DeviceClock, list[tuple[int, ...]]]:
    spans: list[tuple[int, ...]] = []
    return DeviceClock(fake, spans.append, now_ns=fake.clock, sleep=fake.sleep), spans


def op(clock: DeviceClock, fake: FakeDevice, work_ns: int, *, microbatch: int = 0) -> tuple[int, int]:
    """One forward; gives its true begin and end."""
    start = fake.clock()
    tail = compute_tail(Kind.FORWARD, start, (microbatch, 2, 1), 0)
    begin = clock.mark()
    truth = fake.launch(work_ns)
    fake.pass_time(20_000)  # launching takes the host some time
    end = clock.mark()
    clock.keep(begin, end, HostSpan(start, fake.clock(), (tail,)))
    return truth


def job(clock: DeviceClock, fake: FakeDevice, *, seconds: float, work_ns: int = 8 * MS, batch: int = 4) -> Truth:
    """Batches of ops whose launches run ahead of the device; the writer looks between them."""
    truth: Truth = []
    until = fake.now + seconds * 1e9
    while fake.now < until:
        truth += [op(clock, fake, work_ns) for _ in range(batch)]
        until_done = fake.now + batch * work_ns + 3 * MS
        while fake.now < until_done:
            clock.resolve()
            fake.pass_time(min(1_000 * MS, max(0, until_done - fake.now)) + 1)
    return truth


def named(span: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(NAMES, span, strict=True))


def worst_error_ns(spans: list[tuple[int, ...]], truth: Truth) -> int:
    assert len(spans) == len(truth)
    return max(abs(span[edge] - true[edge]) for span, true in zip(spans, truth, strict=True) for edge in (0, 1))


@pytest.mark.parametrize("drift", [0.0, 50e-6, -50e-6])
def test_spans_have_the_devices_times_within_the_stated_error(drift: float) -> None:
    fake = FakeDevice(drift=drift)
    clock, spans = make(fake)
    truth = job(clock, fake, seconds=60)
    clock.finish()
    assert clock.time.error_ns < 150_000
    half = len(truth) // 2  # by then the drift is known
    assert worst_error_ns(spans[half:], truth[half:]) < clock.time.error_ns + 1_000


def test_durations_are_exact_to_the_events_resolution() -> None:
    fake = FakeDevice()
    clock, spans = make(fake)
    job(clock, fake, seconds=5, work_ns=8 * MS)
    clock.finish()
    # float32 milliseconds of up to a second or two: 0.12 us; two marks of 1 us each lie around the work
    assert all(span[1] - span[0] == pytest.approx(8 * MS, abs=2_500) for span in spans)


def test_an_hour_of_float32_milliseconds_does_not_wear_the_times_out() -> None:
    fake = FakeDevice(drift=20e-6)
    clock, spans = make(fake)
    truth = job(clock, fake, seconds=3600, work_ns=2_900 * MS, batch=2)
    clock.finish()
    assert worst_error_ns(spans[-200:], truth[-200:]) < clock.time.error_ns + 2_000
    assert clock.time.error_ns < 200_000
    assert clock.time.drift == pytest.approx(20e-6, abs=2e-6)


def test_an_hour_without_events_is_bridged() -> None:
    fake = FakeDevice(drift=50e-6)
    clock, spans = make(fake)
    job(clock, fake, seconds=30)
    fake.pass_time(3600 * 1e9)
    truth = job(clock, fake, seconds=30)
    clock.finish()
    assert worst_error_ns(spans[-50:], truth[-50:]) < 200_000


def test_nothing_is_recorded_before_the_device_is_done() -> None:
    fake = FakeDevice()
    clock, spans = make(fake)
    job(clock, fake, seconds=1)
    clock.resolve()
    before = len(spans)
    op(clock, fake, 5_000 * MS)
    for _ in range(5):
        clock.resolve()
        fake.pass_time(100 * MS)
    assert len(spans) == before
    fake.pass_time(5_000 * MS)
    clock.resolve()
    assert len(spans) == before + 1


def test_streams_that_complete_out_of_order_are_resolved_as_they_complete() -> None:
    fake = FakeDevice()
    clock, spans = make(fake)
    job(clock, fake, seconds=1)
    fake.pass_time(100 * MS)
    clock.resolve()
    spans.clear()
    fake.stream = 1
    slow = op(clock, fake, 300 * MS, microbatch=1)
    fake.stream = 0
    quick = op(clock, fake, 2 * MS, microbatch=2)
    fake.pass_time(50 * MS)
    clock.resolve()
    assert [named(span)["microbatch"] for span in spans] == [2]
    fake.pass_time(300 * MS)
    clock.resolve()
    assert [named(span)["microbatch"] for span in spans] == [2, 1]
    assert worst_error_ns(spans, [quick, slow]) < clock.time.error_ns + 1_000


def test_an_op_around_another_is_measured_from_a_reference_older_than_both() -> None:
    fake = FakeDevice()
    clock, spans = make(fake)
    job(clock, fake, seconds=1)
    start, outer = fake.clock(), clock.mark()
    truth = job(clock, fake, seconds=5)
    begin = truth[0][0]
    end = clock.mark()
    clock.keep(outer, end, HostSpan(start, fake.clock(), (compute_tail(Kind.SCHEDULE, start, (NONE, NONE, NONE), 0),)))
    clock.finish()
    (schedule,) = [named(span) for span in spans if named(span)["kind"] == Kind.SCHEDULE]
    assert schedule["start_ns"] == pytest.approx(begin, abs=clock.time.error_ns + 30_000)
    assert schedule["end_ns"] == pytest.approx(truth[-1][1], abs=clock.time.error_ns + 20 * MS)


def test_the_launch_is_kept_beside_the_devices_time() -> None:
    fake = FakeDevice()
    clock, spans = make(fake)
    job(clock, fake, seconds=1)
    fake.pass_time(100 * MS)
    clock.resolve()
    spans.clear()
    launched = fake.now
    op(clock, fake, 40 * MS)
    op(clock, fake, 1 * MS)
    clock.finish()
    second = named(spans[1])
    # the second waits for the 40 ms of the first; the host launched it some 20 us later
    assert second["launch_lead_ms"] == pytest.approx(40, abs=0.1)
    assert second["start_ns"] - MS * second["launch_lead_ms"] == pytest.approx(launched, abs=100_000)
    assert second["flags"] == Flag.DEVICE
    assert second["post_ns"] == second["start_ns"]
    assert (second["stage"], second["chunk"]) == (2, 1)


def test_one_wait_for_several_messages_gives_each_its_span_and_keeps_their_posts() -> None:
    fake = FakeDevice()
    clock, spans = make(fake)
    job(clock, fake, seconds=1)
    fake.pass_time(100 * MS)
    clock.resolve()
    spans.clear()
    posts = (fake.now, fake.now + 10)
    tails = tuple(
        compute_tail(kind, post, (0, 1, 0), 0) for kind, post in zip((Kind.SEND, Kind.RECV), posts, strict=True)
    )
    start, begin = fake.clock(), clock.mark()
    fake.launch(6 * MS)  # the stream stands still for the message
    clock.keep(begin, clock.mark(), HostSpan(start, fake.clock(), tails))
    clock.finish()
    assert [named(span)["kind"] for span in spans] == [Kind.SEND, Kind.RECV]
    assert [named(span)["post_ns"] for span in spans] == list(posts)
    assert all(span[1] - span[0] == pytest.approx(6 * MS, abs=3_000) for span in spans)


def test_a_wait_on_another_stream_than_that_of_the_work_gets_no_event() -> None:
    fake = FakeDevice()
    clock, _ = make(fake)
    assert clock.mark() is not None  # no work has been seen yet
    assert clock.work() is not None
    fake.stream = 7  # FSDP's all-gather
    assert clock.mark() is None
    assert clock.untimed == 0
    assert clock.work() is not None  # work there is work
    assert clock.mark() is not None
    fake.stream = 0
    assert clock.mark() is None


def test_events_are_used_again() -> None:
    fake = FakeDevice()
    clock, _ = make(fake)
    job(clock, fake, seconds=120)
    assert fake.events < 40


def test_in_the_capture_of_a_graph_no_event_is_recorded_and_nothing_is_asked() -> None:
    fake = FakeDevice()
    clock, spans = make(fake)
    job(clock, fake, seconds=1)
    op(clock, fake, MS)
    clock.capture_begins()
    fake.capturing = True
    spans_before = len(spans)
    op(clock, fake, MS)
    fake.pass_time(200 * MS)
    clock.resolve()
    assert len(spans) == spans_before + 1  # that of the capture, on the host's clock
    assert named((*spans[-1], 0))["flags"] == 0
    assert clock.untimed == 2
    fake.capturing = False
    clock.capture_ends()
    clock.resolve()
    assert len(spans) > spans_before + 1


def test_a_device_that_hangs_costs_bounded_memory_and_the_exit_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "MOST_PENDING", 10)
    fake = FakeDevice()
    clock, spans = make(fake)
    fake.launch(10**15)
    for _ in range(30):
        op(clock, fake, MS)
    assert fake.events <= 2 * 12
    before = fake.now
    clock.finish()
    assert fake.now - before < 1.1e9
    assert len(spans) == 30
    assert all(len(span) == len(DEVICE_SPAN_FIELDS) - 1 and not span[13] & Flag.DEVICE for span in spans)


def test_spans_wait_for_good_bounds_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "PATIENCE_SPANS", 20)
    fake = FakeDevice()
    clock, spans = make(fake)
    for _ in range(10):
        op(clock, fake, MS)
    fake.pass_time(20 * MS)
    clock.resolve()
    assert spans == []
    for _ in range(12):
        op(clock, fake, MS)
    fake.pass_time(20 * MS)
    clock.resolve()
    assert len(spans) == 22


def test_a_short_job_gets_its_devices_times_at_the_end() -> None:
    fake = FakeDevice()
    clock, spans = make(fake)
    truth = [op(clock, fake, 2 * MS) for _ in range(3)]
    clock.finish()
    assert all(span[13] & Flag.DEVICE for span in spans)
    assert worst_error_ns(spans, truth) < clock.time.error_ns + 5_000


def test_on_the_host_a_span_is_as_the_host_saw_it() -> None:
    spans: list[tuple[int, ...]] = []
    clock = HostClock(spans.append)
    tail = compute_tail(Kind.FORWARD, 100, (0, 0, 0), 0)
    clock.keep(None, None, HostSpan(100, 200, (tail,)))
    assert spans == [(100, 200, *tail)]


def test_no_hook_synchronises() -> None:
    forbidden = {"synchronize", "wait_stream", "wait_event"}
    for path in HOOKS.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not used & forbidden, path
