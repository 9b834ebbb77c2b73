"""The matrix of planted faults: fault x place x schedule x strength, from a seed, each with the right verdicts.

What is right is written here by hand from what was planted. The strengths are such that the planted fault outweighs
the schedule's own bubble: P = 4 ranks and M = 8 or 12 microbatches leave a bubble of (P - 1) / (M + P - 1), 27 or 20 %,
half of it with two chunks a rank, and less of a step that the fault has made longer.

Each fault is also planted weakly, twice: alone in a job whose bubble is 4 % or less, where it is to be named, and
beside a bubble of 20 % or more, where the bubble is.

The seed draws where the cases of a fault begin; from there they take the places in turn, each of a strength of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.matrix.jobs import Job

SINGLE = ("1F1B", "GPipe")
INTERLEAVED = "Interleaved1F1B"
SCHEDULES = (*SINGLE, INTERLEAVED)
OF_CHUNKS = (INTERLEAVED, "LoopedBFS", "ZBVZeroBubble")
RANKS, CHUNKS, STEPS = 4, 2, 6
ALONE, BESIDE = 4, 5
"""Numbers of the two weak cases of a fault."""
ROWS, MESSAGE_BITS = 512, 512 * 32 * 8
"""Messages of 16 KiB, for links of a low rate."""
UNLIMITED_MBIT = 10_000.0


class Answer(NamedTuple):
    """A verdict that is right: its cause, and the place or the part of the imbalance that it must name."""

    cause: str | None
    stage: int | None = None
    rank: int | None = None
    link: frozenset[int] | None = None
    """The two ranks."""
    part: str | None = None
    """The largest part of the imbalance: stage, microbatch or rank."""
    symptom: str | None = None
    """A symptom that must be found besides: what the host was at."""


@dataclass(frozen=True, slots=True)
class Case:
    """One job and what is to be found in it.

    Attributes:
        fault, schedule, number: together its name.
        planted: what was planted, for people.
        right: the verdicts that are right; several where two faults weigh alike.
        chunks: V.
    """

    fault: str
    schedule: str
    number: int
    job: Job
    planted: str
    right: tuple[Answer, ...]

    @property
    def name(self) -> str:
        """Unique, and good as a folder's name."""
        return f"{self.fault.replace(' ', '-')}-{self.schedule}-{self.number}"


class Planted(NamedTuple):
    """What a fault adds to a job."""

    options: str
    text: str
    right: tuple[Answer, ...]
    links: tuple[str, ...] = ()
    ranks: int = RANKS


class Turn(NamedTuple):
    """Which case of a fault and a schedule is to be planted.

    Attributes:
        schedule: the schedule.
        number: 0, 1, 2, …
        begin: drawn by the seed: where the places begin.
    """

    schedule: str
    number: int
    begin: int

    @property
    def ranks(self) -> int:
        """P: two ranks and many microbatches have next to no bubble."""
        return 2 if self.number == ALONE else RANKS

    def of(self, count: int) -> int:
        """The place, of so many."""
        return (self.begin + self.number) % count


Fault = Callable[[Turn], Planted]


def slow_stage(turn: Turn) -> Planted:
    """All that one rank holds takes longer: with one stage a rank the stage is at fault, with several the rank."""
    factor, rank = (1.5, 2.0, 3.0, 2.0, 1.25, 1.15)[turn.number], turn.of(turn.ranks)
    right = Answer("imbalance", stage=rank) if turn.schedule in SINGLE else Answer("imbalance", rank=rank)
    return Planted(f"{base(turn)} --rank-factor {rank}:{factor}", f"rank {rank} x {factor}", (right,), ranks=turn.ranks)


def slow_chunk(turn: Turn) -> Planted:
    factor, stage = (2.0, 3.0, 4.0, 3.0, 1.5, 1.2)[turn.number], turn.of(CHUNKS * turn.ranks)
    right = (Answer("imbalance", stage=stage),)
    options = f"{base(turn)} --stage-factor {stage}:{factor}"
    return Planted(options, f"stage {stage} x {factor}", right, ranks=turn.ranks)


def slow_twin(turn: Turn) -> Planted:
    """Of two pipelines, one rank is slower than the one with the same stage."""
    factor, pp = (1.5, 2.0, 3.0, 2.0, 1.25, 1.15)[turn.number], (2, 2, 2, 3, 2, 2)[turn.number]
    rank = turn.of(2 * pp)
    microbatches = (8, 8, 8, 12, 24, 2)[turn.number]  # the interleaved schedule wants a multiple of the ranks
    options = f"{base(turn, microbatches)} --replicas 2 --rank-factor {rank}:{factor}"
    return Planted(options, f"rank {rank} x {factor}", (Answer("imbalance", rank=rank),), ranks=2 * pp)


def slow_link(turn: Turn) -> Planted:
    """The last rank sends to the first once in P microbatches, and chunks are received ahead: such links cost less."""
    delay_ms = (10.0, 15.0, 30.0, 20.0, 4.0, 1.0)[turn.number]
    a, b = cable(turn)
    if turn.schedule not in SINGLE and turn.number != BESIDE:
        delay_ms *= 6 if b < a else 3 if turn.number == ALONE else 1
    right = (Answer("communication", link=frozenset((a, b))),)
    link = f"{a}-{b}:{delay_ms}:{UNLIMITED_MBIT}"
    return Planted(base(turn), f"link {a}-{b} {delay_ms} ms", right, (link,), turn.ranks)


def low_rate_link(turn: Turn) -> Planted:
    message_ms = (25.0, 40.0, 80.0, 60.0, 10.0, 3.0)[turn.number]
    a, b = cable(turn)
    if b < a and turn.number != BESIDE:
        message_ms *= 2
    right = (Answer("communication", link=frozenset((a, b))),)
    mbit = MESSAGE_BITS / message_ms / 1e3
    options = f"{base(turn)} --rows {ROWS}"
    return Planted(options, f"link {a}-{b} {mbit:.1f} Mbit/s", right, (f"{a}-{b}:0:{mbit:.3f}",), turn.ranks)


def host_stall(turn: Turn) -> Planted:
    """Between steps and before the optimizer once a step; before an op once a microbatch."""
    stalls = (("between", 250), ("optimizer", 350), ("op", 12), ("op", 25), ("between", 250), ("optimizer", 30))
    place, milliseconds = stalls[turn.number]
    return stall(turn, place, milliseconds)


def data_stall(turn: Turn) -> Planted:
    return stall(turn, "data", (180, 250, 400, 300, 250, 30)[turn.number], symptom="data-wait")


def gc_pause(turn: Turn) -> Planted:
    return stall(turn, "gc", (180, 250, 400, 300, 250, 30)[turn.number], symptom="garbage-collection")


def few_microbatches(turn: Turn) -> Planted:
    """1F1B and the interleaved schedule want as many microbatches as ranks; GPipe runs with fewer."""
    ranks = (2, 3, 4, 4, 2)[turn.number]
    microbatches = (2, 3, 4, 4, 4)[turn.number] if turn.schedule != "GPipe" else (2, 2, 2, 4, 8)[turn.number]
    options = f"--forward-ms 14 --backward-ms 28 --microbatches {microbatches}"
    return Planted(options, f"{microbatches} over {ranks} ranks", (Answer("bubble"),), ranks=ranks)


def uneven_microbatches(turn: Turn) -> Planted:
    """One long microbatch: it passes the stages one after the other, while the others wait for it."""
    factor, microbatches = (5.0, 7.0, 9.0, 6.0, 6.0, 1.3)[turn.number], (8, 8, 8, 8, 24, 4)[turn.number]
    microbatch = turn.of(microbatches)
    options = f"{base(turn, microbatches)} --microbatch-factor {microbatch}:{factor}"
    right = (Answer("imbalance", part="microbatch"),)
    return Planted(options, f"microbatch {microbatch} x {factor}", right, ranks=turn.ranks)


def two_faults(turn: Turn) -> Planted:
    """A large fault and a small one; in the last case two large ones, of which either may be named."""
    stage, other = turn.of(RANKS), (turn.of(RANKS) + 1) % RANKS
    heavy = turn._replace(number=2)
    if turn.number == 0:
        large, small, text = slow_stage(heavy), f"--host-sleep {other}:40:between", f"rank {other} stalls 40 ms"
    elif turn.number == 1:
        large, small, text = stall(turn, "between", 350), f"--stage-factor {other}:1.2", f"stage {other} x 1.2"
    elif turn.number == 2:
        large, small, text = slow_link(heavy), f"--stage-factor {stage}:1.2", f"stage {stage} x 1.2"
    elif turn.number == 3:
        large, small, text = uneven_microbatches(heavy), f"--host-sleep {other}:40:gc", f"rank {other} collects 40 ms"
    else:
        large, link = slow_stage(heavy), slow_link(heavy)
        large = large._replace(links=link.links, right=(*large.right, *link.right))
        small, text = "", link.text
    return large._replace(options=f"{large.options} {small}", text=f"{large.text}, {text}")


def no_fault(_turn: Turn) -> Planted:
    """Two ranks and 32 microbatches: a bubble of 1 / 33, of which nothing is to be said."""
    return Planted("--forward-ms 14 --backward-ms 28 --microbatches 32", "nothing", (Answer(None),), ranks=2)


FAULTS: dict[str, tuple[Fault, tuple[str, ...], int]] = {
    "slow stage": (slow_stage, SCHEDULES, 6),
    "slow chunk": (slow_chunk, OF_CHUNKS, 6),
    "slow twin": (slow_twin, SCHEDULES, 6),
    "slow link": (slow_link, SCHEDULES, 6),
    "low-rate link": (low_rate_link, SCHEDULES, 6),
    "host stall": (host_stall, SCHEDULES, 6),
    "data stall": (data_stall, SCHEDULES, 6),
    "GC pause": (gc_pause, SCHEDULES, 6),
    "few microbatches": (few_microbatches, SCHEDULES, 5),
    "uneven microbatches": (uneven_microbatches, SCHEDULES, 6),
    "two faults": (two_faults, SCHEDULES, 5),
    "no fault": (no_fault, SCHEDULES, 1),
}
"""Each fault, the schedules it is planted in, and how often in each."""


def base(turn: Turn, microbatches: int = 0) -> str:
    """A pipeline of equal stages; steps of 300 ms and more, so that the job's own overhead is small."""
    forward_ms = (10, 12, 14, 12, 14, 14)[turn.number]
    usual = (8, 12, 8, 12, 24, 4) if turn.schedule in SINGLE else (8, 8, 8, 8, 24, 4)
    microbatches = microbatches or usual[turn.number]
    return f"--forward-ms {forward_ms} --backward-ms {2 * forward_ms} --microbatches {microbatches}"


def stall(turn: Turn, place: str, milliseconds: int, symptom: str | None = None) -> Planted:
    """Short ops and 12 microbatches: at most (P - 1) * 18 = 54 ms of a late rank hide behind the bubble."""
    rank = turn.of(turn.ranks)
    ops = base(turn) if turn.number in (ALONE, BESIDE) else "--forward-ms 6 --backward-ms 12 --microbatches 12"
    right = (Answer("host", rank=rank, symptom=symptom),)
    options = f"{ops} --host-sleep {rank}:{milliseconds}:{place}"
    return Planted(options, f"rank {rank} {milliseconds} ms ({place})", right, ranks=turn.ranks)


def cable(turn: Turn) -> tuple[int, int]:
    """Two ranks that send to each other: with several chunks the last also to the first."""
    open_ended = turn.schedule in SINGLE or turn.ranks == 2
    a = turn.of(turn.ranks - 1 if open_ended else turn.ranks)
    return a, (a + 1) % turn.ranks


def cases(seed: int) -> Iterator[Case]:
    """All cases of a seed."""
    for fault, (plant, schedules, count) in FAULTS.items():
        for schedule in schedules:
            begin = random.Random(f"{seed} {fault} {schedule}").randrange(100)
            for number in range(count):
                planted = plant(Turn(schedule, number, begin))
                chunks = "" if schedule in SINGLE else f" --virtual-stages {CHUNKS}"
                options = f"--schedule {schedule}{chunks} --steps {STEPS} {planted.options}"
                job = Job(planted.ranks, options, planted.links)
                yield Case(fault, schedule, number, job, planted.text, _right(planted, number))


def _right(planted: Planted, number: int) -> tuple[Answer, ...]:
    return (Answer("bubble"),) if number == BESIDE else planted.right
