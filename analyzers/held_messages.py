"""Messages that were ready and had to wait for another one: behind it on the wire, or in one batch with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.messages import MISSING, number_rows
from ppdiag.analyzers.symptoms import severity
from ppdiag.diagnosis import WORTH_SAYING, percent
from ppdiag.model import Flag, Kind

if TYPE_CHECKING:
    from ppdiag.analyzers.diagnose import Analysis
    from ppdiag.diagnosis import Symptom

IN_ORDER = 0.9
"""Messages of a pair keep their order where this share of those that could show it do."""
_NOT_READY = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Held:
    """Receives that were held up by other messages.

    Attributes:
        share: of the step time of all ranks.
        count: receives held up, in all analysed steps.
        rank, peer: the pair that lost most.
    """

    share: float
    count: int
    rank: int
    peer: int


def held_behind_another(analysis: Analysis) -> Held | None:
    """Receives whose two ends were posted while a message posted earlier between the same two ranks was not ready.

    A communicator works off its messages in the order of their posts. So a receive that is ready at both ends waits
    until all that were posted before it are. Only where messages are seen to keep that order is this said: None where
    not, or where nothing was held.

    Source: pytorch/pytorch#172668, pytorch/pytorch#188833.
    """
    spans = analysis.trace.spans
    index = _matched(analysis)
    ready = _ready_ns(analysis, index)
    ahead = _ready_ahead(spans[index], ready)
    begin = np.maximum(ready, spans["start_ns"][index])
    end = spans["end_ns"][index]
    waited = (spans["kind"][index] == Kind.RECV) & (end > begin)
    telling = waited & (ahead > begin)
    kept_order = telling & (end >= ahead)
    if kept_order.sum() < IN_ORDER * telling.sum():
        return None
    return _held(analysis, index[kept_order], (ahead - begin)[kept_order])


def held_in_batch(analysis: Analysis) -> Held | None:
    """Receives that were ready at both ends, and waited for in one batch with a message of another rank that was not.

    Source: pytorch/pytorch#175225: one stream a batch, so that it ends as a whole.
    """
    spans = analysis.trace.spans
    index = _matched(analysis)
    index = index[spans["end_ns"][index] > spans["start_ns"][index]]
    if not len(index):
        return None
    ready = _ready_ns(analysis, index)
    batch = _batches(spans[index])
    first = np.flatnonzero(np.append(True, np.diff(batch) != 0))
    last = np.maximum.reduceat(ready, first)
    peer = spans["peer"][index]
    mixed = (np.minimum.reduceat(peer, first) != np.maximum.reduceat(peer, first))[batch]
    begin = np.maximum(ready, spans["start_ns"][index])
    held_ns = np.minimum(last[batch], spans["end_ns"][index]) - begin
    chosen = mixed & (spans["kind"][index] == Kind.RECV) & (held_ns > 0)
    return _held(analysis, index[chosen], held_ns[chosen])


def symptom_of(held: Held | None, words: Symptom, what: str) -> Symptom | None:
    """A symptom with its numbers, where receives were held up for 5 % of the ranks' time.

    Args:
        held: the receives.
        words: the symptom without evidence and severity.
        what: what they waited for, in words.
    """
    if held is None or held.share < WORTH_SAYING:
        return None
    receives = "1 receive that was" if held.count == 1 else f"{held.count} receives that were"
    numbers = (
        f"{receives} ready waited {what}: {percent(held.share)} of the ranks' time",
        f"most of it on rank {held.rank}, receiving from rank {held.peer}",
    )
    return replace(words, severity=severity(held.share), evidence=numbers)


def largest_batch(spans: np.ndarray) -> tuple[int, int]:
    """(rank, number of messages) of the largest batch that was waited for as one; (-1, 0) where there is none."""
    messages = np.isin(spans["kind"], (Kind.SEND, Kind.RECV)) & (spans["end_ns"] > spans["start_ns"])
    if not messages.any():
        return -1, 0
    batch = _batches(spans[messages])
    sizes = np.bincount(batch)
    largest = int(sizes.argmax())
    return int(spans["rank"][messages][batch == largest][0]), int(sizes[largest])


def _matched(analysis: Analysis) -> np.ndarray:
    """Indices of the messages of the analysed steps whose other end is recorded, and whose times nobody guessed."""
    spans, steps = analysis.trace.spans, analysis.steps
    waited = (spans["flags"] & np.uint16(Flag.NEVER_WAITED | Flag.INFERRED)) == 0
    messages = np.isin(spans["kind"], (Kind.SEND, Kind.RECV)) & np.isin(steps.number, steps.kept)
    return np.flatnonzero(messages & waited & (analysis.program.messages.partner != MISSING))


def _ready_ns(analysis: Analysis, index: np.ndarray) -> np.ndarray:
    """When both ends of each message were posted."""
    post = analysis.trace.spans["post_ns"]
    return np.maximum(post[index], post[analysis.program.messages.partner[index]])


def _ready_ahead(messages: np.ndarray, ready: np.ndarray) -> np.ndarray:
    """For each message: when all that its rank posted before it, to or from the same peer, were ready."""
    ahead = np.full(len(messages), _NOT_READY)
    order = np.lexsort((messages["post_ns"], messages["peer"], messages["rank"]))
    rank, peer = messages["rank"][order], messages["peer"][order]
    bounds = np.flatnonzero((np.diff(rank) != 0) | (np.diff(peer) != 0)) + 1
    for own in np.split(order, bounds):
        post = messages["post_ns"][own]
        latest = np.concatenate([[_NOT_READY], np.maximum.accumulate(ready[own])])
        ahead[own] = latest[np.searchsorted(post, post, "left")]  # of one batch none is ahead of the other
    return ahead


def _batches(messages: np.ndarray) -> np.ndarray:
    """Number of the batch of each message: those of a rank whose waits are one and the same.

    A trace is sorted by rank, start and end, so that a batch lies together.
    """
    new = np.zeros(len(messages), bool)
    for name in ("rank", "start_ns", "end_ns"):
        new[1:] |= np.diff(messages[name]) != 0
    return np.cumsum(new)


def _held(analysis: Analysis, index: np.ndarray, held_ns: np.ndarray) -> Held | None:
    if not len(index):
        return None
    spans, steps = analysis.trace.spans, analysis.steps
    total_s = float(steps.duration_s.sum()) * len(steps.ranks)
    rank, peer = spans["rank"][index], spans["peer"][index]
    pair = number_rows(rank, peer)
    worst = int(np.bincount(pair, weights=held_ns)[pair].argmax())
    return Held(float(held_ns.sum()) / 1e9 / total_s, len(index), int(rank[worst]), int(peer[worst]))
