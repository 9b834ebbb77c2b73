"""Makes traces from exact durations: an independent simulation of a pipeline, a few lines of its own.

Every rank runs its order of ops; an op waits for its message, computes, and posts what its neighbour needs. A message
arrives ``transfer`` after both ends were posted. Times are whole microseconds, so that hand calculations are exact.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ppdiag.model import Flag, Kind
from ppdiag.trace import JobFacts, ProcessGroup, RankFacts, Trace, make_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppdiag.analyzers.schedules import Op

US = 1_000
MS = 1_000_000


@dataclass
class Pipeline:
    """A pipeline to simulate. Durations in ns."""

    orders: Sequence[Sequence[Op]]
    """Of each rank of one replica."""
    stage_rank: Sequence[int]
    """Stage -> position of its rank along the pipeline."""
    duration: Callable[[Op], int] = lambda op: 10 * MS if op.kind is Kind.FORWARD else 20 * MS
    transfer: Callable[[int, int], int] = lambda src, dst: 0  # noqa: ARG005  (of a pair of ranks)
    before_optimizer: Callable[[int, int], int] = lambda rank, step: 0  # noqa: ARG005
    between: Callable[[int, int], int] = lambda rank, step: 0  # noqa: ARG005
    host_gap: int = 0
    """Host time before every op."""
    optimizer: int = 1 * MS
    steps: int = 4
    origin: int = 1_000 * MS
    rows: list[dict[str, int]] = field(default_factory=list)

    def trace(self) -> Trace:
        """Simulates and returns the trace."""
        ranks = len(self.orders)
        now = [self.origin] * ranks
        sequence: dict[tuple[int, int], int] = defaultdict(int)
        for step in range(self.steps):
            now = self._step(step, now, sequence)
        group = ProcessGroup("pp", tuple(range(ranks)))
        facts = {rank: RankFacts(rank, host=f"host{rank}", clock="one", status="finished") for rank in range(ranks)}
        return Trace(make_spans(self.rows), JobFacts(source="synthetic", world_size=ranks), facts, (group,))

    def _step(self, step: int, now: list[int], sequence: dict[tuple[int, int], int]) -> list[int]:
        ranks = len(self.orders)
        now = list(now)
        position = [0] * ranks
        posted: dict[tuple[Kind, int, int], int] = {}
        local: set[tuple[Kind, int, int]] = set()
        while any(position[r] < len(self.orders[r]) for r in range(ranks)):
            progressed = False
            for rank in range(ranks):
                while position[rank] < len(self.orders[rank]):
                    op = self.orders[rank][position[rank]]
                    if not self._run(op, rank, step, now, posted, local, sequence):
                        break
                    position[rank] += 1
                    progressed = True
            assert progressed, "the orders deadlock"
        for rank in range(ranks):
            now[rank] += self.before_optimizer(rank, step)
            self._span(Kind.OPTIMIZER, rank, step, now[rank], now[rank] + self.optimizer)
            now[rank] += self.optimizer + self.between(rank, step)
        return now

    def _run(self, op, rank, step, now, posted, local, sequence) -> bool:  # type: ignore[no-untyped-def]  # noqa: ANN001
        needed = self._input(op)
        now_here = now[rank] + self.host_gap
        if needed is not None and needed not in local:
            if needed not in posted:
                return False
            src = self.stage_rank[needed[1]]
            sent = posted[needed]
            arrived = max(sent, now_here) + self.transfer(src, rank)
            seq = sequence[src, rank]
            sequence[src, rank] += 1
            common = {"seq": seq, "size_bytes": 1024, "microbatch": op.microbatch, "step": step}
            self.rows.append(
                dict(
                    common, kind=Kind.SEND, rank=src, peer=rank, stage=needed[1], start_ns=sent, end_ns=sent,
                    post_ns=sent, flags=Flag.NEVER_WAITED, tag=int(needed[0]),
                )
            )
            self.rows.append(
                dict(
                    common, kind=Kind.RECV, rank=rank, peer=src, stage=op.stage, start_ns=now_here, end_ns=arrived,
                    post_ns=now_here, tag=int(needed[0]),
                )
            )
            now_here = arrived
        end = now_here + self.duration(op)
        self._span(op.kind, rank, step, now_here, end, stage=op.stage, microbatch=op.microbatch)
        now[rank] = end
        key = (op.kind, op.stage, op.microbatch)
        posted[key] = end
        consumer = self._consumer_rank(op)
        if consumer == rank:
            local.add(key)
        return True

    def _input(self, op: Op) -> tuple[Kind, int, int] | None:
        last = len(self.stage_rank) - 1
        if op.kind is Kind.FORWARD:
            return (Kind.FORWARD, op.stage - 1, op.microbatch) if op.stage > 0 else None
        if op.kind is Kind.BACKWARD:
            return (Kind.BACKWARD, op.stage + 1, op.microbatch) if op.stage < last else None
        return None

    def _consumer_rank(self, op: Op) -> int | None:
        stage = op.stage + (1 if op.kind is Kind.FORWARD else -1)
        return self.stage_rank[stage] if op.kind is not Kind.WEIGHT and 0 <= stage < len(self.stage_rank) else None

    def _span(self, kind: Kind, rank: int, step: int, start: int, end: int, **labels: int) -> None:
        self.rows.append(dict(labels, kind=kind, rank=rank, step=step, start_ns=start, end_ns=end))
