"""What each layer of a stage took, from the spans of ``hooks.layer_times``: facts of the rank instead of spans.

Shape letters: O ops, N spans of layers, L layers in the order of their calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppdiag.analyzers.validation import whole
from ppdiag.model import NONE, Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_LAYERS = 4096
LONGEST_NAME = 200
NOT_TRAINING = int(Flag.INIT | Flag.EVALUATION | Flag.FAILED)


class LayerNames:
    """The names of a rank's layers, by number."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}

    def take(self, word: Mapping[str, Any]) -> None:
        """Take a ``layers`` line.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        first = whole(word["first"], high=MOST_LAYERS)
        for number, name in enumerate(list(word["names"])[: MOST_LAYERS - first], start=first):
            self.names[number] = str(name)[:LONGEST_NAME]


class _Op(NamedTuple):
    """The layers within one op, in the order in which they ran, and how long (ns) each took; the rest of the op."""

    layers: tuple[int, ...]
    took: tuple[int, ...]
    rest: int


def without_layers(spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The spans of a rank but those of layers, and those of layers."""
    layers = spans["kind"] == Kind.LAYER
    return (spans[~layers], spans[layers]) if layers.any() else (spans, spans[:0])


def facts_of(spans: np.ndarray, layers: np.ndarray, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The times of the layers of each stage of a rank, as a fact that every record can carry.

    Args:
        spans: the rank's spans.
        layers: its spans of layers.
        names: the names of the layers, by number.

    Returns:
        For each stage ``stage`` and ``chunk`` (-1 where not known), ``names`` (L), ``forward_s`` (L),
        ``forward_rest_s`` (the time of a forward outside of its layers), and the same of the backward; None where the
        order of the backward shows no layers.
    """
    forwards = _by_stage(spans, layers, Kind.FORWARD)
    backwards = _by_stage(spans, layers, Kind.BACKWARD)
    found = []
    for (stage, chunk), ops in sorted(forwards.items()):
        order = Counter(op.layers for op in ops).most_common(1)[0][0]
        forward_s, forward_rest_s = _medians(ops, order)
        row = {"stage": stage, "chunk": chunk, "names": [names.get(number, "") for number in order]}
        row |= {"forward_s": forward_s, "forward_rest_s": forward_rest_s, "backward_s": None, "backward_rest_s": None}
        turned = order[::-1]
        if any(op.layers == turned for op in backwards.get((stage, chunk), ())):
            backward_s, row["backward_rest_s"] = _medians(backwards[stage, chunk], turned)
            row["backward_s"] = backward_s[::-1]
        found.append(row)
    return found


def _by_stage(spans: np.ndarray, layers: np.ndarray, kind: Kind) -> dict[tuple[int, int], list[_Op]]:
    """The training ops of a kind that have layers, by (stage, chunk)."""
    ops = spans[(spans["kind"] == kind) & (spans["flags"] & NOT_TRAINING == 0)]
    ops = ops[np.argsort(ops["start_ns"], kind="stable")]
    own = layers[layers["op"] == kind]
    own = own[np.argsort(own["start_ns"], kind="stable")]
    middle = (own["start_ns"] + own["end_ns"]) // 2
    holder = np.searchsorted(ops["start_ns"], middle, side="right") - 1
    inside = (holder >= 0) & (middle <= ops["end_ns"][holder]) if len(ops) else np.zeros(len(own), bool)
    timed_alike = (own["flags"] & Flag.DEVICE) == (ops["flags"][holder] & Flag.DEVICE) if len(ops) else inside
    own, holder = own[inside & timed_alike], holder[inside & timed_alike]
    found: dict[tuple[int, int], list[_Op]] = defaultdict(list)
    bounds = [*np.flatnonzero(np.diff(holder, prepend=-1)).tolist(), len(holder)]
    for first, end in pairwise(bounds):
        op = ops[holder[first]]
        read = _forward if kind == Kind.FORWARD else _backward
        found[int(op["stage"]), int(op["chunk"])].append(read(op, own[first:end]))
    return found


def _forward(op: np.void, own: np.ndarray) -> _Op:
    took = (own["end_ns"] - own["start_ns"]).tolist()
    return _Op(tuple(own["seq"].tolist()), tuple(took), max(0, int(op["end_ns"] - op["start_ns"]) - sum(took)))


def _backward(op: np.void, own: np.ndarray) -> _Op:
    """Each layer's backward lasts until the next begins; the last one's until its input's gradient is there."""
    numbers = own["seq"].tolist()
    closed = len(numbers) > 1 and numbers[-1] == NONE
    kept = own if closed else np.append(own, own[-1:])
    moments = kept["start_ns"].copy()
    if not closed:
        moments[-1] = max(int(op["end_ns"]), int(moments[-1]))
    took = np.diff(moments).tolist()
    rest = int(op["end_ns"] - op["start_ns"]) - sum(took)
    return _Op(tuple(numbers[: len(took)]), tuple(took), max(0, rest))


def _medians(ops: Sequence[_Op], order: tuple[int, ...]) -> tuple[list[float], float]:
    """Time of each layer and of the rest, in seconds: medians over the ops with layers in this order."""
    alike = [op for op in ops if op.layers == order]
    times = np.median([[*op.took, op.rest] for op in alike], axis=0) / 1e9
    return times[:-1].tolist(), float(times[-1])
