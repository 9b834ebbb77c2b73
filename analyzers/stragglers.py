"""How much stragglers slow a job, by the definitions of the what-if analysis of StragglerAnalysis.

Their timeline: compute ops of a rank follow each other; messages of each type run beside them one after the other, from
their compute op or to it; the tail of a step is a chain. A message takes what passed after the last of its ends began.
The *ideal* timeline gives every op of a type one time: the mean over all ranks and steps for compute, the median for
messages and collectives. Launch delays are left out of both timelines, so that

- slowdown S = mean step time with the recorded times / mean step time of the ideal;
- S of a group (op type, stage, replica) = mean step time of the ideal with the group's recorded times / of the ideal;
- M of a group = the share of (recorded - ideal) that goes when the group takes ideal times: M_S of the last stage, M_W
  of the slowest 3 % of the ranks, a rank's slowness being the smaller S of its replica and its stage.

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI '25), equations 1, 2, 4 and 5,
and the artifact's readme.

Shape letters: O ops of one replica in one step, S steps, D replicas, P stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.straggler_timeline import Timeline, tabulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.analyzers.straggler_timeline import Op
    from ppdiag.trace import Trace

SLOWEST_PERCENT = 3
"""Share of the ranks that M_W repairs."""
AVERAGED = ("forward-compute", "backward-compute", "optimizer", "gc")
"""Types whose ideal is a mean; that of the others is a median."""


@dataclass(frozen=True, slots=True)
class Explained:
    """What repairing, or keeping, one group of ops does. Mean step times in seconds.

    Attributes:
        recorded_s, ideal_s: of the two timelines.
        repaired_s: recorded times, those of the group ideal.
        kept_s: ideal times, those of the group as recorded.
    """

    recorded_s: float
    ideal_s: float
    repaired_s: float
    kept_s: float

    @property
    def by_repair(self) -> float:
        """Share of the slowdown that goes when the group is repaired: the authors' M."""
        return (self.recorded_s - self.repaired_s) / (self.recorded_s - self.ideal_s)

    @property
    def by_keeping(self) -> float:
        """Share of the slowdown that the group makes alone."""
        return (self.kept_s - self.ideal_s) / (self.recorded_s - self.ideal_s)


class Stragglers:
    """The analysis of one job.

    Attributes:
        steps: the steps' numbers in the recording (S).
        measured_S: measured step times, in seconds; likewise ``recorded_S`` and ``ideal_S``, replayed.

    Raises:
        BadRecord: the steps and replicas do not all have the same ops, or these contradict each other.
    """

    def __init__(self, trace: Trace) -> None:
        table = tabulate(trace)
        self.steps = table.steps
        self.measured_S = table.end_OSD.max(axis=(0, 2)) - table.start_OSD.min(axis=(0, 2))
        self._table = table
        self._timeline = Timeline(table, trace.job.source)
        self._own_OSD = self._timeline.own_times(table)
        self._ideal_OSD = _ideal(table.ops, self._own_OSD)

    @cached_property
    def recorded_S(self) -> np.ndarray:
        """Step times with the recorded times of all ops and no launch delays."""
        return self._timeline.step_times(self._own_OSD)

    @cached_property
    def ideal_S(self) -> np.ndarray:
        """Step times of the ideal timeline."""
        return self._timeline.step_times(self._ideal_OSD)

    @property
    def launch_slowdown(self) -> float:
        """Measured step time / recorded without launch delays."""
        return float(self.measured_S.mean() / self.recorded_S.mean())

    @property
    def slowdown(self) -> float:
        """S."""
        return float(self.recorded_S.mean() / self.ideal_S.mean())

    @property
    def launch_slowdown_S(self) -> np.ndarray:
        """Measured time of each step / recorded without launch delays."""
        return self.measured_S / self.recorded_S

    @property
    def slowdown_S(self) -> np.ndarray:
        """S of each step alone."""
        return self.recorded_S / self.ideal_S

    @cached_property
    def by_type_S(self) -> dict[str, np.ndarray]:
        """S of each type of op in each step; the messages of one direction are one type."""
        types = np.array([_with_its_peer(op.type) for op in self._table.ops])
        return {str(name): self._slowdown_of((types == name)[:, None]) for name in np.unique(types)}

    @cached_property
    def by_stage_S(self) -> dict[int, np.ndarray]:
        """S of each stage in each step."""
        return {stage: self._slowdown_of(self._on(stage)[:, None]) for stage in range(self._table.rank_DP.shape[1])}

    @cached_property
    def by_replica_S(self) -> dict[int, np.ndarray]:
        """S of each data-parallel replica in each step."""
        replicas = np.arange(len(self._table.rank_DP))
        return {d: self._slowdown_of((replicas == d)[None, :]) for d in replicas.tolist()}

    @property
    def by_type(self) -> dict[str, float]:
        """S of each type of op; this and the two below are means over the steps, whose ideals are all the same."""
        return {name: float(slowdown_S.mean()) for name, slowdown_S in self.by_type_S.items()}

    @property
    def by_stage(self) -> dict[int, float]:
        """S of each stage."""
        return {stage: float(slowdown_S.mean()) for stage, slowdown_S in self.by_stage_S.items()}

    @property
    def by_replica(self) -> dict[int, float]:
        """S of each data-parallel replica."""
        return {replica: float(slowdown_S.mean()) for replica, slowdown_S in self.by_replica_S.items()}

    def last_stage(self) -> Explained:
        """The last stage repaired: M_S."""
        return self.explain(self._on(self._table.rank_DP.shape[1] - 1)[:, None])

    def slowest_ranks(self) -> Explained:
        """The slowest ranks repaired: M_W."""
        rank_DP, by_replica, by_stage = self._table.rank_DP, self.by_replica, self.by_stage
        slowness = {(d, p): min(by_replica[d], by_stage[p]) for d, p in np.ndindex(*rank_DP.shape)}
        places = sorted(slowness, key=lambda place: (-slowness[place], rank_DP[place]))
        group_OD = np.zeros((len(self._table.ops), len(rank_DP)), bool)
        for d, p in places[: -(-len(places) * SLOWEST_PERCENT // 100)]:
            group_OD[:, d] |= self._on(p)
        return self.explain(group_OD)

    def explain(self, group_OD: np.ndarray) -> Explained:
        """What a group of ops (a mask over ops x replicas) explains of the slowdown."""
        repaired_S = self._timeline.step_times(np.where(group_OD[:, None, :], self._ideal_OSD, self._own_OSD))
        return Explained(
            recorded_s=float(self.recorded_S.mean()),
            ideal_s=float(self.ideal_S.mean()),
            repaired_s=float(repaired_S.mean()),
            kept_s=float(self._kept_S(group_OD).mean()),
        )

    def _slowdown_of(self, group_OD: np.ndarray) -> np.ndarray:
        return self._kept_S(group_OD) / self.ideal_S

    def _kept_S(self, group_OD: np.ndarray) -> np.ndarray:
        return self._timeline.step_times(np.where(group_OD[:, None, :], self._own_OSD, self._ideal_OSD))

    def _on(self, stage: int) -> np.ndarray:
        return np.array([op.stage == stage for op in self._table.ops])


def _with_its_peer(name: str) -> str:
    direction, _, what = name.partition("-")
    return f"{direction}-pp-comm" if what in ("send", "recv") else name


def _ideal(ops: Sequence[Op], own_OSD: np.ndarray) -> np.ndarray:
    ideal = np.empty_like(own_OSD)
    types = np.array([op.type for op in ops])
    for name in np.unique(types):
        times = own_OSD[types == name]
        ideal[types == name] = times.mean() if name in AVERAGED else np.median(times)
    return ideal
