"""Clocks: the fit against known offsets, the ladder's rungs, and what cannot be used."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ppdiag.analyzers.clock import (
    MOST_DRIFT,
    UNKNOWN_ERROR_S,
    WALL_CLOCK_ERROR_S,
    align,
    checked,
    fit_probes,
    message_bounds,
)
from ppdiag.analyzers.messages import match
from ppdiag.model import Kind
from ppdiag.trace import RankFacts
from tests.analyzers.factory import MS, spans_of, trace_of

if TYPE_CHECKING:
    from ppdiag.trace import Trace

SECOND = 1_000_000_000
OFFSET_NS = 30 * SECOND


def probes(*, drift: float, seed: int, queue_ns: float = 300_000.0, bursts: int = 20) -> list[dict[str, int]]:
    """Ping-pongs once a minute: 25 us each way, and queues of exponential length on either way."""
    random = np.random.default_rng(seed)
    found = []
    for burst in range(bursts):
        for i in range(16):
            sent = 500 * SECOND + burst * 60 * SECOND + i * MS
            there, back = (25_000 + random.exponential(queue_ns * random.choice([0.02, 1.0])) for _ in range(2))
            arrived = reference(sent, drift) + there
            answered = arrived + 5_000
            received = sent + (there + 5_000 + back) / (1 + drift)
            found.append({"t0": sent, "t1": int(arrived), "t2": int(answered), "t3": int(received), "burst": burst})
    return found


def reference(local_ns: float, drift: float) -> float:
    """The reference's clock when the rank's shows ``local_ns``."""
    return local_ns + OFFSET_NS + drift * (local_ns - 500 * SECOND)


@pytest.mark.parametrize("drift", [-50e-6, 0.0, 50e-6])
@pytest.mark.parametrize("seed", range(5))
def test_offset_and_drift_are_found_within_20_us_and_within_the_stated_bound(drift: float, seed: int) -> None:
    line = fit_probes(probes(drift=drift, seed=seed))
    assert line is not None
    for local in np.linspace(500 * SECOND, 1_640 * SECOND, 9).tolist():
        found = local + line.offset_ns + line.drift * (local - line.origin_ns)
        error = abs(found - reference(local, drift))
        assert error < 20_000
        assert error <= line.error_ns


def ping(burst: int, *, there: int, back: int = 0, ahead: float = 0.0) -> dict[str, int]:
    """A ping-pong a second, of a reference that is ``ahead``."""
    sent = burst * SECOND
    arrived = int(sent + there + ahead)
    return {"t0": sent, "t1": arrived, "t2": arrived, "t3": sent + there + back, "burst": burst}


def test_a_single_probe_gives_an_offset_within_half_its_round_trip() -> None:
    # sent at 0, arrived 1000 + 40, answered at once, received at 100: the offset is between 940 and 1040
    line = fit_probes([{"t0": 0, "t1": 1_040, "t2": 1_040, "t3": 100}])
    assert line is not None
    assert (line.offset_ns, line.drift) == (990.0, 0.0)
    assert line.error_ns == 50.0


def test_bursts_through_a_queue_are_left_out() -> None:
    good = [ping(burst, there=50, back=50) for burst in range(3)]
    late = ping(3, there=900_000, back=100)
    line = fit_probes([*good, late])
    assert line is not None
    assert line.offset_ns == pytest.approx(0.0, abs=1e-6)
    assert line.error_ns == pytest.approx(50.0)


@pytest.mark.parametrize(
    "useless",
    [
        [],
        [{"t0": 100, "t1": 0, "t2": 0, "t3": 0}],  # received before it was sent
        [{"t0": 0, "t1": 50, "t2": 0, "t3": 100}],  # answered before it arrived
        [{"t0": 0, "t1": 0, "t2": 90, "t3": 10}],  # answering took longer than the round trip
        [ping(burst, there=10, ahead=2 * MOST_DRIFT * burst * SECOND) for burst in range(3)],  # no clock drifts so
    ],
)
def test_probes_that_cannot_be_true_give_no_line(useless: list[dict[str, int]]) -> None:
    assert fit_probes(useless) is None


def facts(rank: int, clock: str, **others) -> RankFacts:
    return RankFacts(rank, host=f"host{rank}", clock=clock, **others)


def test_ranks_on_one_clock_are_left_as_they_are() -> None:
    clocks = align({0: facts(0, "a"), 1: facts(1, "a")})
    spans = spans_of([{"kind": 1, "rank": 1, "start_ns": 5, "end_ns": 9}])
    clocks.apply(spans, 1)
    assert (spans["start_ns"][0], spans["end_ns"][0]) == (5, 9)
    assert (clocks.error_s, clocks.warnings) == (0.0, [])


def test_probes_move_a_rank_onto_the_lowest_ranks_axis() -> None:
    clocks = align({0: facts(0, "a"), 1: facts(1, "b", clock_probes=tuple(probes(drift=50e-6, seed=1)))})
    local = 800 * SECOND
    spans = spans_of([{"kind": 1, "rank": 1, "start_ns": local, "end_ns": local + MS}])
    clocks.apply(spans, 1)
    assert abs(int(spans["start_ns"][0]) - reference(local, 50e-6)) < 20_000
    assert int(spans["end_ns"][0] - spans["start_ns"][0]) == pytest.approx(MS, abs=100)
    assert 0 < clocks.error_s < 1e-3
    assert clocks.warnings == []


def test_without_probes_the_time_of_day_is_used_and_said() -> None:
    own = {"started_unix_ns": 2_000 * SECOND, "started_local_ns": 100 * SECOND}
    other = {"started_unix_ns": 2_000 * SECOND, "started_local_ns": 700 * SECOND}
    clocks = align({0: facts(0, "a", facts=own), 1: facts(1, "b", facts=other)})
    spans = spans_of([{"kind": 1, "rank": 1, "start_ns": 750 * SECOND, "end_ns": 751 * SECOND}])
    clocks.apply(spans, 1)
    assert spans["start_ns"][0] == 150 * SECOND
    assert clocks.error_s == WALL_CLOCK_ERROR_S
    assert clocks.warnings == ["no clock probes between the hosts (host1): aligned by their wall clocks only"]


def test_a_rank_that_noted_no_time_at_all_makes_every_verdict_undecided() -> None:
    assert align({0: facts(0, "a"), 1: facts(1, "b")}).error_s == UNKNOWN_ERROR_S


def test_a_receive_before_its_send_measures_the_clocks_error() -> None:
    sent, received = np.array([10_000, 20_000]), np.array([7_000, 25_000])
    assert message_bounds(sent, received) == 3e-6
    assert message_bounds(received, sent + 10_000) == 0.0


def test_the_error_between_two_hosts_that_were_both_compared_with_a_third_is_the_sum_of_theirs() -> None:
    # one probe each: a round trip of 40 and of 100 us bounds the offset to 20 and to 50 us
    def asked(round_trip_ns: int) -> tuple[dict[str, int], ...]:
        return ({"t0": 0, "t1": 500, "t2": 500, "t3": round_trip_ns, "burst": 0},)

    far, near = facts(1, "b", clock_probes=asked(100_000)), facts(2, "c", clock_probes=asked(40_000))
    beside = facts(3, "c")
    assert align({0: facts(0, "a"), 1: far}).error_s == pytest.approx(50e-6)
    assert align({0: facts(0, "a"), 1: far, 2: near, 3: beside}).error_s == pytest.approx(70e-6)


def two_hosts(ahead_ns: int, error_s: float) -> Trace:
    """Rank 0 sends at 10 ms, rank 1 has it at 12 ms; rank 1's clock is ahead by this."""
    ends = {"group": 0, "seq": 0, "stage": 0}
    rows = [
        {"kind": Kind.SEND, "rank": 0, "peer": 1, "start_ns": 10 * MS, "end_ns": 10 * MS, **ends},
        {"kind": Kind.RECV, "rank": 1, "peer": 0, "start_ns": 9 * MS + ahead_ns, "end_ns": 12 * MS + ahead_ns, **ends},
    ]
    ranks = {0: facts(0, "a"), 1: facts(1, "b")}
    return replace(trace_of(spans_of(rows)), ranks=ranks, clock_error_s=error_s)


def test_a_message_that_ends_before_it_was_sent_proves_an_error_of_the_clocks() -> None:
    late = two_hosts(-7 * MS, 0.001)
    found = checked(late, match(late))
    assert found.clock_error_s == pytest.approx(0.005)
    assert found.warnings == ("messages end up to 5.00 ms before they were sent: the clocks are off by that at least",)


def test_messages_that_the_stated_error_allows_or_that_share_a_clock_prove_nothing() -> None:
    for trace in (two_hosts(0, 0.0), two_hosts(-7 * MS, 0.006)):
        assert checked(trace, match(trace)) is trace
    one_clock = replace(two_hosts(-7 * MS, 0.0), ranks={0: facts(0, "a"), 1: facts(1, "a")})
    assert checked(one_clock, match(one_clock)) is one_clock
