"""The layers of a run: as ``ppdiag run --layer-times`` has recorded what each takes, else equal shares of the stages.

Shape letters: L layers, S stages.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppdiag.analyzers.planning import orders
from ppdiag.analyzers.what_if.layers import MOST_LAYERS, LayerTimes, layer_times, layers_now
from ppdiag.errors import BadShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ppdiag.analyzers.shape import Shape
    from ppdiag.analyzers.what_if.run import Run
    from ppdiag.trace import Trace

MEASURED, EQUAL = "measured", "equal shares"
"""Where the times of layers are from."""


class _Stage(NamedTuple):
    """The layers of a stage as one rank recorded them, in seconds: forward, backward, and of each what is no layer."""

    names: tuple[str, ...]
    forward: tuple[float, ...]
    forward_rest: float
    backward: tuple[float, ...] | None
    backward_rest: float


class MeasuredLayers(NamedTuple):
    """The layers of all stages.

    Attributes:
        counts: layers of each stage.
        weights: for each stage what each of its layers takes of a microbatch, in seconds.
        rest: for each stage what is no layer: embedding on the first, head and loss on the last.
        names: for each stage the names of its layers within the root module.
    """

    counts: tuple[int, ...]
    weights: tuple[np.ndarray, ...]
    rest: tuple[float, ...]
    names: tuple[tuple[str, ...], ...] = ()

    def times(self, stage_S: np.ndarray) -> LayerTimes:
        """What the layers take where the stages take so long: each its measured share of its stage.

        What is no layer stays on the first and the last stage; on those between it goes with the layers.

        >>> two = np.array([1.0, 3.0])
        >>> MeasuredLayers((2, 2), (two, two), (1.0, 0.0)).times(np.array([10.0, 4.0]))
        LayerTimes(layer_L=array([2., 6., 1., 3.]), before=2.0, after=0.0)
        """
        shares, before, after = self._shares()
        layer_L = np.concatenate([share_L * time for share_L, time in zip(shares, stage_S.tolist(), strict=True)])
        return LayerTimes(layer_L, before * float(stage_S[0]), after * float(stage_S[-1]))

    def mix(self, stages: int) -> list[list[tuple[int, float]]] | None:
        """As ``op_times.stage_mix``, of these layers laid onto as many stages; None where there are fewer layers.

        >>> MeasuredLayers((2, 2), (np.array([1.0, 3.0]), np.ones(2)), (0.0, 2.0)).mix(4)
        [[(0, 0.25)], [(0, 0.75)], [(1, 0.25)], [(1, 0.75)]]
        """
        shares, before, after = self._shares()
        owner_L, share_L = np.repeat(np.arange(len(self.counts)), self.counts), np.concatenate(shares)
        if len(share_L) < stages:
            return None
        ends = np.cumsum(orders.layers_of_stages(len(share_L), stages))
        mix = []
        for stage, own in enumerate(np.split(np.arange(len(share_L)), ends[:-1])):
            parts: dict[int, float] = {}
            for layer in own.tolist():
                parts[int(owner_L[layer])] = parts.get(int(owner_L[layer]), 0.0) + float(share_L[layer])
            for is_here, end, share in ((stage == 0, 0, before), (stage == stages - 1, len(shares) - 1, after)):
                if is_here and share > 0:
                    parts[end] = parts.get(end, 0.0) + share
            mix.append(list(parts.items()))
        return mix

    def _shares(self) -> tuple[list[np.ndarray], float, float]:
        """Share of each layer in its stage's time, and of what is no layer in the first stage's and in the last's."""
        last = len(self.counts) - 1
        shares, beyond = [], [0.0] * (last + 1)
        for stage, (weight_L, rest) in enumerate(zip(self.weights, self.rest, strict=True)):
            kept = rest if stage in (0, last) else 0.0
            whole = max(float(weight_L.sum()) + kept, 1e-12)
            shares.append(weight_L / whole)
            beyond[stage] = kept / whole
        return shares, beyond[0], beyond[-1] if last else 0.0


def measured_layers(trace: Trace, shape: Shape) -> MeasuredLayers | None:
    """The layers as recorded; None where any stage has no record of its layers.

    Of the ranks that hold the same stage the median is taken.
    """
    found: dict[int, list[_Stage]] = {}
    for rank, stages in shape.stages.items():
        rows = trace.ranks[rank].facts.get("layers") if rank in trace.ranks else None
        for row in [row for row in rows if isinstance(row, dict)] if isinstance(rows, (list, tuple)) else ():
            stage = _stage_of(row, stages)
            recorded = _read(row)
            if stage is not None and recorded is not None:
                found.setdefault(stage, []).append(recorded)
    count = 1 + max((stage for stages in shape.stages.values() for stage in stages), default=-1)
    if sorted(found) != list(range(count)):
        return None
    weights, rest = zip(*(_combined(found[stage]) for stage in range(count)), strict=True)
    names = tuple(found[stage][0].names[: len(own)] for stage, own in enumerate(weights))
    return MeasuredLayers(tuple(map(len, weights)), weights, rest, names)


def _stage_of(row: Mapping[str, Any], stages: Sequence[int]) -> int | None:
    """The stage that a row is of, named as such or by its place among the stages of the rank."""
    if not isinstance(row.get("stage"), int) or not isinstance(row.get("chunk"), int):
        return None
    if row["stage"] >= 0:
        return row["stage"] if row["stage"] in stages else None
    chunk = max(0, row["chunk"])
    return stages[chunk] if chunk < len(stages) else None


def _read(row: Mapping[str, Any]) -> _Stage | None:
    forward, backward = _times(row.get("forward_s")), _times(row.get("backward_s"))
    rest = _times([row.get("forward_rest_s"), row.get("backward_rest_s") if backward else 0.0])
    if not forward or rest is None or (backward is not None and len(backward) != len(forward)):
        return None
    names = row.get("names")
    told = [str(name) for name in names] if isinstance(names, (list, tuple)) else []
    return _Stage((*told, *[""] * len(forward))[: len(forward)], forward, rest[0], backward, rest[1])


def _times(values: Any) -> tuple[float, ...] | None:  # noqa: ANN401  (what a file says)
    """Times in seconds; None where they are something else."""
    if not isinstance(values, (list, tuple)) or len(values) > MOST_LAYERS:
        return None
    if not all(isinstance(value, (int, float)) and math.isfinite(value) and value >= 0 for value in values):
        return None
    return tuple(map(float, values))


def _combined(recorded: Sequence[_Stage]) -> tuple[np.ndarray, float]:
    """What each layer takes, and the rest: the medians over the ranks that saw as many layers as most did.

    Forward and backward together; the forward alone where not all saw the backward.
    """
    count = Counter(len(stage.forward) for stage in recorded).most_common(1)[0][0]
    alike = [stage for stage in recorded if len(stage.forward) == count]
    rows = [[*stage.forward, stage.forward_rest] for stage in alike]
    if all(stage.backward is not None for stage in alike):
        backward = [[*(stage.backward or ()), stage.backward_rest] for stage in alike]
        rows = np.add(rows, backward).tolist()
    times = np.median(np.array(rows), axis=0)
    return times[:-1], float(times[-1])


class KnownLayers(NamedTuple):
    """How many layers each stage has in a run, and whether what each takes was measured."""

    counts: tuple[int, ...]
    measured: MeasuredLayers | None

    def times(self, stage_S: np.ndarray) -> LayerTimes:
        """What the layers take where the stages take so long."""
        return layer_times(stage_S, self.counts) if self.measured is None else self.measured.times(stage_S)

    @property
    def source(self) -> str:
        """Where the times are from."""
        return EQUAL if self.measured is None else MEASURED


def known_layers(run: Run, *, total: int | None = None, given: Sequence[int] | None = None) -> KnownLayers:
    """The layers of a run: as recorded; where ``given`` says otherwise, or nothing is recorded, as given.

    Args:
        run: the run.
        total: how many layers there are to be; None for those that there are.
        given: layers of each stage in the run; None where they are not told: then as recorded, else as even as they go.

    Raises:
        BadShape: the numbers do not fit the run or each other, or nothing tells how many there are.
    """
    measured = measured_layers(run.trace, run.shape)
    if measured is not None and (given is None or tuple(given) == measured.counts):
        if total not in (None, sum(measured.counts)):
            found = ",".join(map(str, measured.counts))
            raise BadShape(f"the record has layers {found}, {sum(measured.counts)} of them, and the split {total}")
        return KnownLayers(measured.counts, measured)
    if total is None and given is None:
        raise BadShape(
            "how many layers each stage has is not recorded: give --layers-now, or record with ppdiag run --layer-times"
        )
    return KnownLayers(layers_now(total if total is not None else sum(given or ()), run.stages, given), None)
