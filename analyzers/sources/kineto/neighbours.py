"""Who talks to whom, where the messages do not say it; and the number of each message on its way.

torch.profiler writes the peer of a message of gloo only with ``record_shapes=True``. Without it the labels say the
stage, and so the neighbour; without labels the ranks of a lone pipeline are in the order in which its first forward
reaches them.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from ppdiag.model import NONE, PIPELINE_KINDS, Kind, Payload
from ppdiag.trace import rank_slices, sorted_spans

STEP_BITS, OCCURRENCE_BITS = 40, 20
"""A message's number: its step, how many before it in the step had its label, its microbatch."""
MOST_OCCURRENCES = 1 << 20


def fill_peers(spans: np.ndarray) -> list[str]:
    """Fills in the peers that are not known, in place.

    Returns:
        What was assumed, and what remains unknown.
    """
    spans[:] = sorted_spans(spans)
    messages = np.isin(spans["kind"], (Kind.SEND, Kind.RECV))
    unknown = np.flatnonzero(messages & (spans["peer"] == NONE))
    if not len(unknown):
        return []
    labelled = unknown[(spans["stage"][unknown] >= 0) & (spans["op"][unknown] != Payload.UNKNOWN)]
    _by_stage(spans, labelled)
    rest = unknown[spans["peer"][unknown] == NONE]
    warnings = []
    if len(rest):
        order = _order(spans, messages)
        if order:
            _by_order(spans, rest, order)
            warnings.append(
                "messages do not say their peers (record_shapes=True of torch.profiler would): ranks are taken for one "
                f"pipeline in the order of their first forward ({', '.join(map(str, order[:16]))})"
            )
    silent = int((spans["peer"][unknown] == NONE).sum())
    if silent:
        warnings.append(
            f"{silent} sends and receives do not say their peer, so that it is unknown who was waited for there (those "
            "of gloo do with record_shapes=True of torch.profiler)"
        )
    return warnings


def _by_stage(spans: np.ndarray, chosen: np.ndarray) -> None:
    """The peers of labelled messages: the rank that holds the next stage, in the same replica."""
    holders: dict[int, list[int]] = defaultdict(list)
    ops = np.isin(spans["kind"], PIPELINE_KINDS) & (spans["stage"] >= 0)
    for stage, rank in np.unique(np.stack([spans["stage"][ops], spans["rank"][ops]], axis=1), axis=0).tolist():
        holders[stage].append(rank)
    for i in chosen.tolist():
        forward = spans["op"][i] == Payload.ACTIVATION
        towards = 1 if forward == (spans["kind"][i] == Kind.SEND) else -1
        own, other = holders.get(int(spans["stage"][i]), []), holders.get(int(spans["stage"][i]) + towards, [])
        rank = int(spans["rank"][i])
        if rank in own and len(own) == len(other):
            spans["peer"][i] = other[own.index(rank)]


def _order(spans: np.ndarray, messages: np.ndarray) -> list[int]:
    """The ranks of a lone pipeline from first to last; empty where there may be several of them."""
    forwards = spans["kind"] == Kind.FORWARD
    first: dict[int, int] = {}
    leaders = 0
    for rank, own in rank_slices(spans["rank"]).items():
        if not forwards[own].any():
            return []
        first[rank] = int(spans["start_ns"][own][forwards[own]].min())
        step = spans["step"][own][forwards[own]][0]
        received = messages[own] & (spans["kind"][own] == Kind.RECV) & (spans["step"][own] == step)
        leaders += not (received & (spans["post_ns"][own] < first[rank])).any()
    return sorted(first, key=lambda rank: first[rank]) if leaders == 1 and len(first) > 1 else []


def _by_order(spans: np.ndarray, chosen: np.ndarray, order: list[int]) -> None:
    """The peers of messages by the op they belong to: what a forward needs comes from before, and so on."""
    place = {rank: n for n, rank in enumerate(order)}
    ops = np.isin(spans["kind"], PIPELINE_KINDS)
    unknown = rank_slices(spans["rank"][chosen])
    for rank, own in rank_slices(spans["rank"]).items():
        mine = chosen[unknown.get(rank, slice(0))]
        starts, forwards = spans["start_ns"][own][ops[own]], spans["kind"][own][ops[own]] == Kind.FORWARD
        sent = spans["kind"][mine] == Kind.SEND
        before = np.searchsorted(starts, spans["post_ns"][mine], "right") - 1
        following = np.searchsorted(starts, spans["end_ns"][mine], "left")
        at = np.where(sent, before, following)
        known = (at >= 0) & (at < len(starts))
        towards = np.where(forwards[at[known]] == sent[known], 1, -1)
        neighbour = place[rank] + towards
        inside = (neighbour >= 0) & (neighbour < len(order))
        spans["peer"][mine[known][inside]] = np.array(order)[neighbour[inside]]


def number_messages(spans: np.ndarray) -> None:
    """Gives messages and collectives their number among those of the same kind and ends, in place.

    Labelled messages are known by what they carry, so that a recording that begins in the middle of a step still fits;
    others by their order within the step.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    messages = np.isin(spans["kind"], (Kind.SEND, Kind.RECV, Kind.COLLECTIVE))
    order = np.flatnonzero(messages)
    order = order[np.lexsort((spans["post_ns"][order], spans["rank"][order]))]
    for i in order.tolist():
        row = spans[i]
        step, microbatch = int(row["step"]), 0
        if row["kind"] == Kind.COLLECTIVE:
            key: tuple[int, ...] = (int(row["rank"]), int(row["group"]), step, -1)
        else:
            if row["stage"] >= 0 and row["op"] != Payload.UNKNOWN:
                forward = row["op"] == Payload.ACTIVATION
                received = row["kind"] == Kind.RECV
                sender = int(row["stage"]) + ((-1 if forward else 1) if received else 0)
                spans["tag"][i] = 2 * (sender + 1) + int(not forward)
                microbatch = max(0, int(row["microbatch"]))
            key = (
                int(row["rank"]),
                int(row["group"]),
                step,
                int(row["peer"]),
                int(row["kind"]),
                int(spans["tag"][i]),
                microbatch,
            )
        nth = counts[key]
        counts[key] += 1
        spans["seq"][i] = (step << STEP_BITS) + (min(nth, MOST_OCCURRENCES - 1) << OCCURRENCE_BITS) + microbatch
