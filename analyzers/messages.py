"""Pairs every send with its receive, and the members of every collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.model import Kind

if TYPE_CHECKING:
    from ppdiag.trace import Trace

MISSING = -1


@dataclass(frozen=True, slots=True)
class Messages:
    """Which spans belong together. Indices are into ``trace.spans``; ``MISSING`` where there is none.

    Attributes:
        partner: for a SEND its RECV, and the other way round (one entry a span).
        collective: number of the collective that a COLLECTIVE span is part of (one entry a span); ``MISSING`` too where
            its group is not known.
    """

    partner: np.ndarray
    collective: np.ndarray


def match(trace: Trace) -> Messages:
    """Matches by (group, source, destination, tag, sequence number), and collectives by (group, sequence number).

    Source: the rule by which MPI and NCCL match, "messages do not overtake each other" on one pair, group and tag.
    """
    spans = trace.spans
    partner = np.full(len(spans), MISSING, np.int64)
    sends = np.flatnonzero(spans["kind"] == Kind.SEND)
    receives = np.flatnonzero(spans["kind"] == Kind.RECV)
    numbered = number_rows(
        *(
            np.concatenate([spans[sent][sends], spans[received][receives]])
            for sent, received in (
                ("rank", "peer"),
                ("peer", "rank"),
                ("group", "group"),
                ("tag", "tag"),
                ("seq", "seq"),
            )
        )
    )
    sender = _first_of(numbered[: len(sends)], sends, len(numbered))
    receiver = _first_of(numbered[len(sends) :], receives, len(numbered))
    partner[sends] = receiver[numbered[: len(sends)]]
    partner[receives] = sender[numbered[len(sends) :]]
    return Messages(partner, _number_collectives(spans, len(trace.groups)))


def number_rows(*columns: np.ndarray) -> np.ndarray:
    """Numbers rows so that equal rows, and only they, have equal numbers.

    >>> number_rows(np.array([7, 7, 1]), np.array([0, 1, 0])).tolist()
    [1, 2, 0]
    """
    order = np.lexsort(columns[::-1])
    new = np.zeros(len(order), bool)
    for column in columns:
        new[1:] |= np.diff(column[order]) != 0
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(new)
    return numbers


def _first_of(numbers: np.ndarray, indices: np.ndarray, count: int) -> np.ndarray:
    """For each number the first index that has it (a key that occurs twice is no pair for its second span)."""
    first = np.full(count, MISSING, np.int64)
    first[numbers[::-1]] = indices[::-1]
    return first


def _number_collectives(spans: np.ndarray, groups: int) -> np.ndarray:
    """The number of each collective; ``groups``: how many process groups are known."""
    number = np.full(len(spans), MISSING, np.int64)
    known = (spans["group"] >= 0) & (spans["group"] < groups)
    found = np.flatnonzero((spans["kind"] == Kind.COLLECTIVE) & known)
    number[found] = number_rows(spans["group"][found], spans["seq"][found])
    return number
