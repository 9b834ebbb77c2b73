"""The events of a step as a block: which event belongs to which in it, and which steps have the same structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.messages import MISSING
from ppdiag.analyzers.program import COMPUTE, POST

if TYPE_CHECKING:
    from ppdiag.analyzers.program import Program


@dataclass(frozen=True, slots=True)
class Positions:
    """For each event of a program, positions of other events within the block of the same step, else ``MISSING``."""

    own_post: np.ndarray
    partner_post: np.ndarray
    collective: np.ndarray
    """Position of the first post of the collective."""


def positions_of(program: Program, lo: np.ndarray, hi: np.ndarray) -> Positions:
    """Of all events; ``lo``, ``hi``: the bounds of each analysed step's block among them."""
    events, messages = program.events, program.messages
    index = np.arange(len(events))
    block_of = np.searchsorted(lo, index, "right") - 1
    inside = (block_of >= 0) & (index < hi[block_of])
    base = np.where(inside, lo[block_of], 0)
    limit = np.where(inside, hi[block_of], 0)
    posts = np.flatnonzero(events["what"] == POST)
    post_of_span = np.full(len(program.trace.spans) + 1, MISSING, np.int64)
    post_of_span[events["span"][posts]] = posts

    def within_block(event: np.ndarray) -> np.ndarray:
        return np.where((event >= base) & (event < limit), event - base, MISSING)

    message = events["what"] != COMPUTE
    own = np.where(message, post_of_span[events["span"]], MISSING)
    partner = np.where(message, post_of_span[messages.partner[events["span"]]], MISSING)
    number = messages.collective[events["span"]]
    first_post = np.full(int(messages.collective.max(initial=-1)) + 2, len(events), np.int64)
    np.minimum.at(first_post, number[posts], posts)
    collective = np.where(message & (number >= 0), first_post[number], MISSING)
    return Positions(within_block(own), within_block(partner), within_block(collective))


def signature(program: Program, positions: Positions, block: slice) -> bytes:
    """Equal for steps of the same ops, messages and order."""
    events = program.events[block]
    spans = program.trace.spans[events["span"]]
    columns = [events["rank"], events["what"]]
    columns += [spans[name] for name in ("kind", "op", "stage", "microbatch", "peer", "group")]
    columns += [positions.own_post[block], positions.partner_post[block], positions.collective[block]]
    return np.stack([column.astype(np.int64) for column in columns]).tobytes()
