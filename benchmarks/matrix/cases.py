"""The matrix of planted faults: fault x place x schedule x strength, from a seed, each with the right verdicts.

What is right is written here by hand from what was planted. The strengths are such that the planted fault outweighs
the schedule's own bubble: P = 4 ranks and M = 8 or 12 microbatches leave a bubble of (P - 1) / (M + P - 1), 27 or 20 %,
half of it with two chunks a rank, and less of a step that the fault has made longer.
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
RANKS, CHUNKS, STEPS = 4, 2, 7
ROWS, MESSAGE_BITS = 2048, 2048 * 32 * 8
"""Messages of 64 KiB, for links of a low rate."""
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


Fault = Callable[[random.Random, str, int], Planted]


def slow_stage(draw: random.Random, schedule: str, number: int) -> Planted:
    """All that one rank holds takes longer: with one stage a rank the stage is at fault, with several the rank."""
    factor, rank = (1.5, 2.0, 3.0, 2.0)[number], draw.randrange(RANKS)
    right = Answer("imbalance", stage=rank) if schedule in SINGLE else Answer("imbalance", rank=rank)
    return Planted(f"{base(draw)} --rank-factor {rank}:{factor}", f"rank {rank} x {factor}", (right,))


def slow_chunk(draw: random.Random, _schedule: str, number: int) -> Planted:
    factor, stage = (2.0, 3.0, 4.0, 3.0)[number], draw.randrange(CHUNKS * RANKS)
    right = (Answer("imbalance", stage=stage),)
    return Planted(f"{base(draw)} --stage-factor {stage}:{factor}", f"stage {stage} x {factor}", right)


def slow_twin(draw: random.Random, _schedule: str, number: int) -> Planted:
    """Of two pipelines, one rank is slower than the one with the same stage."""
    factor, pp = (1.5, 2.0, 3.0, 2.0)[number], (2, 2, 2, 3)[number]
    rank = draw.randrange(2 * pp)
    options = f"{base(draw, 2 * pp)} --replicas 2 --rank-factor {rank}:{factor}"
    return Planted(options, f"rank {rank} x {factor}", (Answer("imbalance", rank=rank),), ranks=2 * pp)


def slow_link(draw: random.Random, schedule: str, number: int) -> Planted:
    delay_ms = (10.0, 15.0, 30.0, 20.0)[number]
    a, b = cable(draw, schedule)
    right = (Answer("communication", link=frozenset((a, b))),)
    link = f"{a}-{b}:{delay_ms}:{UNLIMITED_MBIT}"
    return Planted(base(draw), f"link {a}-{b} {delay_ms} ms", right, links=(link,))


def low_rate_link(draw: random.Random, schedule: str, number: int) -> Planted:
    message_ms = (25.0, 40.0, 80.0, 60.0)[number]
    a, b = cable(draw, schedule)
    right = (Answer("communication", link=frozenset((a, b))),)
    mbit = MESSAGE_BITS / message_ms / 1e3
    options = f"{base(draw)} --rows {ROWS}"
    return Planted(options, f"link {a}-{b} {mbit:.1f} Mbit/s", right, links=(f"{a}-{b}:0:{mbit:.3f}",))


def host_stall(draw: random.Random, _schedule: str, number: int) -> Planted:
    """Between steps and before the optimizer once a step; before an op once a microbatch."""
    place, milliseconds = (("between", 250), ("optimizer", 350), ("op", 12), ("op", 25))[number]
    return stall(draw, place, milliseconds)


def data_stall(draw: random.Random, _schedule: str, number: int) -> Planted:
    return stall(draw, "data", (180, 250, 400, 300)[number])


def gc_pause(draw: random.Random, _schedule: str, number: int) -> Planted:
    return stall(draw, "gc", (150, 250, 400, 300)[number])


def few_microbatches(_draw: random.Random, schedule: str, number: int) -> Planted:
    """1F1B and the interleaved schedule want as many microbatches as ranks; GPipe runs with fewer."""
    ranks = (2, 3, 4, 4)[number]
    microbatches = ranks if schedule != "GPipe" else (2, 2, 2, 4)[number]
    options = f"--forward-ms 14 --backward-ms 28 --microbatches {microbatches}"
    return Planted(options, f"{microbatches} over {ranks} ranks", (Answer("bubble"),), ranks=ranks)


def uneven_microbatches(draw: random.Random, _schedule: str, number: int) -> Planted:
    """One long microbatch: it passes the stages one after the other, while the others wait for it."""
    factor, microbatch = (5.0, 7.0, 9.0, 6.0)[number], draw.randrange(8)
    options = f"{base(draw, microbatches=8)} --microbatch-factor {microbatch}:{factor}"
    return Planted(options, f"microbatch {microbatch} x {factor}", (Answer("imbalance", part="microbatch"),))


def two_faults(draw: random.Random, schedule: str, number: int) -> Planted:
    """A large fault and a small one; in the last case two large ones, of which either may be named."""
    a, b = draw.sample(range(RANKS), 2)
    if number == 0:
        large, small = slow_stage(draw, schedule, 2), f"--host-sleep {b}:40:between"
        return large._replace(options=f"{large.options} {small}", text=f"{large.text}, rank {b} stalls 40 ms")
    if number == 1:
        large = stall(draw, "between", 350)
        return large._replace(options=f"{large.options} --stage-factor {a}:1.2", text=f"{large.text}, stage {a} x 1.2")
    if number == 2:
        large = slow_link(draw, schedule, 2)
        return large._replace(options=f"{large.options} --stage-factor {a}:1.2", text=f"{large.text}, stage {a} x 1.2")
    if number == 3:
        large, small = uneven_microbatches(draw, schedule, 2), f"--host-sleep {b}:40:gc"
        return large._replace(options=f"{large.options} {small}", text=f"{large.text}, rank {b} collects 40 ms")
    stage, link = slow_stage(draw, schedule, 2), slow_link(draw, schedule, 2)
    text = f"{stage.text}, {link.text}"
    return stage._replace(text=text, right=(*stage.right, *link.right), links=link.links)


def no_fault(_draw: random.Random, _schedule: str, _number: int) -> Planted:
    """Two ranks and 32 microbatches: a bubble of 1 / 33, of which nothing is to be said."""
    return Planted("--forward-ms 14 --backward-ms 28 --microbatches 32", "nothing", (Answer(None),), ranks=2)


FAULTS: dict[str, tuple[Fault, tuple[str, ...], int]] = {
    "slow stage": (slow_stage, SCHEDULES, 4),
    "slow chunk": (slow_chunk, OF_CHUNKS, 4),
    "slow twin": (slow_twin, SCHEDULES, 4),
    "slow link": (slow_link, SCHEDULES, 4),
    "low-rate link": (low_rate_link, SCHEDULES, 4),
    "host stall": (host_stall, SCHEDULES, 4),
    "data stall": (data_stall, SCHEDULES, 4),
    "GC pause": (gc_pause, SCHEDULES, 4),
    "few microbatches": (few_microbatches, SCHEDULES, 4),
    "uneven microbatches": (uneven_microbatches, SCHEDULES, 4),
    "two faults": (two_faults, SCHEDULES, 5),
    "no fault": (no_fault, SCHEDULES, 1),
}
"""Each fault, the schedules it is planted in, and how often in each."""


def base(draw: random.Random, ranks: int = RANKS, microbatches: int = 0) -> str:
    """A pipeline of equal stages; steps of 250 ms and more, so that the job's own overhead is small."""
    forward_ms = draw.choice((10, 12, 14))
    microbatches = microbatches or draw.choice((8, 12))
    if ranks > RANKS:
        microbatches = 12  # the interleaved schedule wants a multiple of the 3 ranks of a pipeline
    return f"--forward-ms {forward_ms} --backward-ms {2 * forward_ms} --microbatches {microbatches}"


def stall(draw: random.Random, place: str, milliseconds: int) -> Planted:
    """Short ops and 12 microbatches: at most (P - 1) * 18 = 54 ms of a late rank hide behind the bubble."""
    rank = draw.randrange(RANKS)
    options = f"--forward-ms 6 --backward-ms 12 --microbatches 12 --host-sleep {rank}:{milliseconds}:{place}"
    return Planted(options, f"rank {rank} {milliseconds} ms ({place})", (Answer("host", rank=rank),))


def cable(draw: random.Random, schedule: str) -> tuple[int, int]:
    """Two ranks that send to each other: with several chunks the last also to the first."""
    a = draw.randrange(RANKS - 1 if schedule in SINGLE else RANKS)
    return a, (a + 1) % RANKS


def cases(seed: int) -> Iterator[Case]:
    """All cases of a seed."""
    for fault, (plant, schedules, count) in FAULTS.items():
        for schedule in schedules:
            for number in range(count):
                planted = plant(random.Random(f"{seed} {fault} {schedule} {number}"), schedule, number)
                chunks = "" if schedule in SINGLE else f" --virtual-stages {CHUNKS}"
                options = f"--schedule {schedule}{chunks} --steps {STEPS} {planted.options}"
                job = Job(planted.ranks, options, planted.links)
                yield Case(fault, schedule, number, job, planted.text, planted.right)
