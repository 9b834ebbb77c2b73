"""The device's time on the host's clock, from bounds."""

from __future__ import annotations

import random

import pytest

from ppdiag.hooks.device_time import EPOCH_NS, FIRST_EPOCH_NS, DeviceTime

OFFSET = 7_000_000_000_000


def bounded(time: DeviceTime, *, seconds: float, drift: float, width_ns: int, seed: int = 0) -> None:
    """Bounds every 50 ms whose distance is ``width_ns``, the truth anywhere between them."""
    chance = random.Random(seed)
    for count in range(round(seconds / 0.05)):
        device = count * 50_000_000
        host = device + OFFSET + round(drift * device)
        below = chance.randrange(width_ns)
        time.not_before(device, host - below)
        time.not_after(device, host + width_ns - below)
    time.settle()


@pytest.mark.parametrize("drift", [0.0, 50e-6, -50e-6])
def test_offset_and_drift_come_out_within_the_stated_error(drift: float) -> None:
    time = DeviceTime()
    bounded(time, seconds=60, drift=drift, width_ns=100_000)
    for device in (30_000_000_000, 59_000_000_000):
        assert abs(time.host_ns(device) - (device + OFFSET + drift * device)) <= time.error_ns
    assert time.error_ns < 60_000
    assert time.drift == pytest.approx(drift, abs=3e-6)


def test_a_single_epoch_makes_no_drift_up() -> None:
    time = DeviceTime()
    time.not_before(0, OFFSET - 50_000)
    time.not_after(0, OFFSET)
    time.settle()
    assert time.drift == 0.0
    assert time.host_ns(1000) == OFFSET - 25_000 + 1000
    assert time.error_ns == 25_000


def test_two_short_epochs_hardly_move_the_drift() -> None:
    time = DeviceTime()
    for device, wrong in ((0, 0), (FIRST_EPOCH_NS + 1, 40_000)):
        time.not_before(device, device + OFFSET + wrong)
        time.not_after(device, device + OFFSET + wrong + 100_000)
        time.settle()
    # 40 us in 0.25 s would be 160 ppm, which no clock drifts
    assert abs(time.drift) < 30e-6


def test_an_epoch_with_one_bound_alone_is_not_used() -> None:
    time = DeviceTime()
    time.not_before(0, OFFSET)
    time.settle()
    assert not time.is_known


def test_a_loose_epoch_changes_nothing_beside_tight_ones() -> None:
    tight, both = DeviceTime(), DeviceTime()
    for time in (tight, both):
        bounded(time, seconds=10, drift=0.0, width_ns=50_000)
    before = both.error_ns
    device = 10_000_000_000 + EPOCH_NS
    both.not_before(device, device + OFFSET - 80_000_000)
    both.not_after(device, device + OFFSET)
    both.settle()
    assert both.error_ns <= before
    assert both.host_ns(device) == tight.host_ns(device)


def test_a_closer_look_is_wanted_until_the_bounds_are_tight() -> None:
    time = DeviceTime()
    assert time.wants_bounds(200_000)
    time.not_before(0, OFFSET - 1_000_000)
    assert time.wants_bounds(200_000)
    time.not_after(0, OFFSET)
    assert time.wants_bounds(200_000)
    time.not_before(0, OFFSET - 100_000)
    assert not time.wants_bounds(200_000)
    time.not_before(EPOCH_NS, EPOCH_NS + OFFSET)
    assert time.wants_bounds(200_000)


def test_a_better_line_never_puts_later_times_before_earlier_ones() -> None:
    time = DeviceTime()
    chance = random.Random(1)
    mapped: list[tuple[int, int]] = []
    for count in range(400):
        device = count * 50_000_000
        below = chance.randrange(300_000)
        time.not_before(device, device + OFFSET - below)
        time.not_after(device, device + OFFSET + 300_000 - below)
        if time.is_good:
            mapped += [(at, time.host_ns(at)) for at in (device - 30_000_000, device - 10_000, device)]
    hosts = [host for _, host in sorted(mapped)]
    assert hosts == sorted(hosts)


def test_loose_bounds_are_known_and_not_good() -> None:
    time = DeviceTime()
    time.not_before(0, OFFSET - 40_000_000)
    time.not_after(0, OFFSET)
    time.settle()
    assert time.is_known
    assert not time.is_good
    bounded(time, seconds=2, drift=0.0, width_ns=100_000)
    assert time.is_good
