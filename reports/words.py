"""The words and number formats that all reports share."""

from __future__ import annotations

import math
import unicodedata
from typing import TYPE_CHECKING, NamedTuple

from ppdiag.diagnosis import Cause, Place, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.diagnosis import Advice, Diagnosis, Steps, Verdict
    from ppdiag.origins import Origin


class Word(NamedTuple):
    """How a cause or a place is shown."""

    label: str
    symbol: str
    """One ASCII character, so that a bar of them reads without colour."""
    definition: str


CAUSES = {
    Cause.BUBBLE: Word(
        "bubble",
        "o",
        "Idle that the schedule itself causes: it stays when every stage is equal, every transfer free and the host "
        "never late.",
    ),
    Cause.IMBALANCE: Word(
        "imbalance",
        "#",
        "Idle that comes from unequal work: between stages, between microbatches, or one slow rank doing the same "
        "work as the others.",
    ),
    Cause.COMMUNICATION: Word("communication", "~", "Idle that goes away when transfers and collectives cost nothing."),
    Cause.HOST: Word(
        "host",
        "h",
        "Idle although all inputs were there: Python, data loading, kernel launch, garbage collection, synchronising "
        "calls.",
    ),
    Cause.UNEXPLAINED: Word(
        "unexplained",
        "?",
        "What a replay of the measured run fails to reproduce. It is never added to another cause.",
    ),
}
PLACES = {
    Place.LATE_SENDER: Word("late sender", "l", "Waiting in a receive while the peer had not sent yet."),
    Place.TRANSFER: Word("transfer", "t", "Waiting in a receive while the bytes were on their way."),
    Place.SEND_WAIT: Word("send wait", "s", "Waiting for a send to be taken by the peer."),
    Place.COLLECTIVE: Word("collective", "c", "Waiting in a collective, such as the gradient all-reduce."),
    Place.HOST: Word("host", "h", "In no wait and no compute: the host had not started the next op."),
    Place.UNEXPLAINED: Word("unexplained", "?", "Idle for which the record holds no evidence."),
}
GLOSSARY = (
    (
        "stage",
        "Position in the pipeline, counted over all virtual stages. A rank is one process; it holds one stage or more.",
    ),
    (
        "P, V, M",
        "Ranks along the pipeline; virtual stages per rank; microbatches per step.",
    ),
    (
        "F, B, W",
        "Forward; backward (of the input only, where W is split off); weight gradient.",
    ),
    (
        "step",
        (
            "From the first pipeline op of a step on any rank to the first of the next one. Three phases: pipeline, "
            "tail (gradient synchronisation, clipping, optimizer) and between (data, logging, anything else)."
        ),
    ),
    ("busy, idle", "The part of a step in which a rank computes; the rest of the step."),
    (
        "equal-work schedule",
        (
            "The same order of ops, replayed with equal work in every stage, free transfers and no host time. What is "
            "still idle in it is the bubble."
        ),
    ),
    (
        "critical path",
        (
            "The chain of ops, messages and host gaps for which a step took as long as it did: to shorten anything "
            "else gains nothing."
        ),
    ),
    (
        "replay error",
        (
            "How far each step, replayed with the medians over all steps of host time and transfers, is from the step "
            "as measured (the median over steps). It bounds what a predicted gain is worth."
        ),
    ),
    ("clock error", "Bound on the difference between any two ranks' clocks after alignment; 0 on one clock."),
)
CONFIDENCE = {
    "measured": "How sure: measured.",
    "inferred": "How sure: inferred.",
    "undecided": "The evidence does not single out one cause.",
}
CHANGE_DIRECTION = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Bidirectional controls: they can make a name read as another one (CVE-2021-42574)."""


def visible(text: str) -> str:
    r"""Text from a record, safe to show: what could steer a terminal or change the reading order is spelt out.

    >>> visible("gpu\x1b[31m-1\n")
    'gpu\\x1b[31m-1\\n'
    """
    return "".join(_spelt_out(c) if c in CHANGE_DIRECTION or _is_control(c) else c for c in text)


def _is_control(char: str) -> bool:
    return unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"}


def _spelt_out(char: str) -> str:
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")


def duration(seconds: float) -> str:
    """Seconds in the unit that fits, three digits.

    >>> duration(0.0123), duration(4e-6), duration(75.0), duration(0.9999)
    ('12.3 ms', '4.00 µs', '75.0 s', '1.00 s')
    """
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")))


def known_duration(seconds: float) -> str:
    """The same; a dash for 0, which is what a diagnosis has where nothing was measured.

    >>> known_duration(0.0123), known_duration(0.0)
    ('12.3 ms', '-')
    """
    return duration(seconds) if seconds != 0 else "-"


def size(count: float) -> str:
    """Bytes in the decimal unit that fits.

    >>> size(8_388_608), size(12)
    ('8.39 MB', '12 B')
    """
    if count < 1000:
        return f"{count:.0f} B"
    return _scaled(count, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return f"0 {units[0][1]}"
    for factor, unit in units:
        # 0.9995: three digits would round up to 1000 of this unit's smaller neighbour.
        if abs(value) >= 0.9995 * factor:
            return f"{_three_digits(value / factor)} {unit}"
    factor, unit = units[-1]
    return f"{_three_digits(value / factor)} {unit}"


def _three_digits(value: float) -> str:
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}"


def rough_percent(fraction: float) -> str:
    """A fraction for a sentence: whole percents from 10 %, one decimal below.

    >>> rough_percent(0.3141), rough_percent(0.0314)
    ('31 %', '3.1 %')
    """
    return f"{100 * fraction:.0f} %" if abs(fraction) >= 0.0995 else percent(fraction)


def expected_gain(advice: Advice) -> str:
    """What a change is expected to gain."""
    if advice.gain_fraction is None:
        return "unknown: this change cannot be replayed"
    if advice.gain_range is None:
        return f"up to {rough_percent(advice.gain_fraction)} of the step time"
    low, high = (rough_percent(bound) for bound in advice.gain_range)
    spread = f" ({low} to {high} over the steps)" if low != high else ""
    return f"{rough_percent(advice.gain_fraction)} of the step time{spread}"


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks as ranges.

    >>> rank_list([0, 1, 2, 3, 8, 10, 11])
    '0-3,8,10-11'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def count_of(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count_of(1, "rank"), count_of(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def cause_label(cause: str) -> str:
    """The label of a cause, or its own name where it is none of ours."""
    return CAUSES[Cause(cause)].label if cause in set(Cause) else visible(cause)


def what_first(diagnosis: Diagnosis) -> str:
    """The headline of a diagnosis: a job that stands still comes before all that its steps lost."""
    return visible(diagnosis.stuck.title) if diagnosis.stuck is not None else headline(diagnosis.verdict)


def origin_name(origin: Origin) -> str:
    """Where idle time began, in a few words."""
    rank = "" if origin.rank is None else f", rank {origin.rank}"
    if origin.what == "work":
        return f"{origin.op}{'' if origin.stage is None else f' of stage {origin.stage}'}{rank}"
    if origin.what == "message" and origin.link is not None:
        return f"messages from stage {origin.link[0]} to stage {origin.link[1]}{rank and f' (rank {origin.rank})'}"
    if origin.what == "collective":
        return f"collectives of {origin.group or 'a group without a name'}"
    names = {"schedule": "the schedule itself", "host": f"host of rank {origin.rank}", "step before": "a step before"}
    return names.get(origin.what, origin.what)


def headline(verdict: Verdict) -> str:
    """What is the matter, and where, in a few words."""
    if verdict.cause is None:
        return "Undecided" if verdict.confidence == "undecided" else "Nothing worth changing"
    what = {Cause.COMMUNICATION: "communication stall", Cause.UNEXPLAINED: "unexplained idle time"}
    name = what[Cause(verdict.cause)] if verdict.cause in what else cause_label(verdict.cause)
    undecided = "Undecided; largest part: " if verdict.confidence == "undecided" else ""
    text = f"{undecided}{name}{verdict_place(verdict)}"
    return text[:1].upper() + text[1:]


def verdict_place(verdict: Verdict) -> str:
    """The place of a verdict with its preposition; empty where it has none."""
    if verdict.link is not None:
        return f" on the link from stage {verdict.link[0]} to stage {verdict.link[1]}"
    places = [
        f"{name} {value}" for name, value in (("stage", verdict.stage), ("rank", verdict.rank)) if value is not None
    ]
    return f" at {', '.join(places)}" if places else ""


def step_time(steps: Steps) -> str:
    """The usual time of a step, its spread where it is known, and how many steps it is of."""
    if steps.count == 1:
        return f"{duration(steps.median_s)}: one step, so that its spread is not known; {steps.dropped} dropped"
    spread = f"{duration(steps.p10_s)} to {duration(steps.p90_s)} from 10th to 90th percentile"
    return f"{duration(steps.median_s)} median ({spread}); {steps.count} analysed, {steps.dropped} dropped"
