"""What C++ issues, in a job of two replicas of a two-stage pipeline under DDP (torch >= 2.14, which tells of it)."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Collective, Flag, Kind
from tests.e2e.conftest import read_trace, torchrun, work_only

if TYPE_CHECKING:
    from ppdiag.trace import Trace

distributed_c10d = pytest.importorskip("torch.distributed.distributed_c10d")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(distributed_c10d.ProcessGroup, "register_pre_hook"),
        reason="before torch 2.14 process groups have no hooks (CONTRIBUTING: tests on a newer torch)",
    ),
]

RANKS, STEPS, MICROBATCHES, SLOW_S = 4, 5, 4, 0.03
REPLICAS = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
LAYER_BYTES = (16 * 16 + 16) * 4
"""A layer's weight and bias are a bucket, from the second step on."""
STEP = {
    (Collective.ALL_REDUCE, LAYER_BYTES): 2,  # DDP
    (Collective.ALL_REDUCE, 4): 1,  # functional: the norm
    (Collective.ALL_GATHER, 8): 1,  # functional: of two norms
    (Collective.ALL_REDUCE, 8): 1,  # the same, compiled
    (Collective.ALL_REDUCE, 12): 1,  # by torch.distributed.all_reduce
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, list[str], list[str]]:
    """(trace, results with the recorder, results without it); rank 2 is slow."""
    folder: Path = tmp_path_factory.mktemp("issued_by_torch")
    arguments = ["--steps", str(STEPS), "--slow-rank", "2", "--slow-s", str(SLOW_S), "--results"]
    torchrun(RANKS, "data_parallel.py", *arguments, str(folder / "on"), run_dir=folder / "run")
    torchrun(RANKS, "data_parallel.py", *arguments, str(folder / "off"))
    on, off = ([Path(f"{folder / name}{rank}").read_text() for rank in range(RANKS)] for name in ("on", "off"))
    return read_trace(folder / "run"), on, off


def collectives(trace: Trace, rank: int, step: int) -> np.ndarray:
    """Those of a step, without what torch's pipelining does at its beginning."""
    spans = work_only(trace.by_rank()[rank])
    return spans[(spans["kind"] == Kind.COLLECTIVE) & (spans["step"] == step)]


def gradients(trace: Trace, rank: int, step: int) -> np.ndarray:
    found = collectives(trace, rank, step)
    return found[found["size_bytes"] == LAYER_BYTES]


def test_losses_norms_and_weights_are_bit_identical_with_and_without_the_recorder(run) -> None:
    _, recorded, plain = run
    assert recorded == plain
    assert all(json.loads(values) for values in plain)


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_collective_is_recorded_once_whoever_issued_it(run, rank: int) -> None:
    trace = run[0]
    for step in range(1, STEPS):
        found = collectives(trace, rank, step)
        assert Counter((Collective(span["op"]), int(span["size_bytes"])) for span in found) == STEP
        assert {trace.groups[group].ranks for group in found["group"].tolist()} == {REPLICAS[rank]}
        assert (found["flags"] & int(Flag.NEVER_WAITED | Flag.FAILED) == 0).all()
        assert (found["post_ns"] <= found["start_ns"]).all()


@pytest.mark.parametrize("rank", range(RANKS))
def test_collectives_of_a_group_are_numbered_as_on_the_other_ranks(run, rank: int) -> None:
    found = np.concatenate([collectives(run[0], rank, step) for step in range(STEPS)])
    numbers = np.sort(found["seq"])
    assert all(after == before + 1 for before, after in pairwise(numbers.tolist()))
    twin = next(other for other in REPLICAS[rank] if other != rank)
    others = np.concatenate([collectives(run[0], twin, step) for step in range(STEPS)])
    keys = ("seq", "op", "size_bytes", "step")
    assert {tuple(span[list(keys)]) for span in found} == {tuple(span[list(keys)]) for span in others}


def test_the_root_of_a_broadcast_of_the_replicas_is_one_of_them(run) -> None:
    spans = run[0].spans
    roots = spans[(spans["kind"] == Kind.COLLECTIVE) & (spans["op"] == Collective.BROADCAST)]
    assert {(int(span["rank"]), int(span["peer"])) for span in roots} == {(0, 0), (2, 0), (1, 1), (3, 1)}


@pytest.mark.parametrize("rank", range(RANKS))
def test_gradients_are_waited_for_at_the_end_of_the_last_backward(run, rank: int) -> None:
    spans = run[0].by_rank()[rank]
    for step in range(1, STEPS):
        backwards = spans[(spans["kind"] == Kind.BACKWARD) & (spans["step"] == step)]
        last = backwards[np.argmax(backwards["start_ns"])]
        waits = gradients(run[0], rank, step)
        assert int(last["microbatch"]) == MICROBATCHES - 1
        assert (last["start_ns"] <= waits["post_ns"]).all()
        assert (waits["end_ns"] <= last["end_ns"]).all()
        assert len(np.unique(waits["end_ns"])) == 1, "the reducer waits for all in one callback"


def test_the_wait_for_gradients_is_as_long_as_the_other_replica_is_late(run) -> None:
    """Rank 2 makes rank 3, the last stage, late by so much, and rank 1 waits for the gradients of that one."""
    late_s = MICROBATCHES * SLOW_S
    assert 0.5 * late_s < wait_s(run[0], 1) < 2 * late_s
    assert wait_s(run[0], 3) < 0.3 * late_s


def wait_s(trace: Trace, rank: int) -> float:
    waits = [gradients(trace, rank, step)[0] for step in range(1, STEPS)]
    return float(np.median([wait["end_ns"] - wait["start_ns"] for wait in waits])) / 1e9


def test_the_wait_is_idle_time_and_no_backward(run) -> None:
    diagnosis = diagnose(run[0])
    waiting = next(found for found in diagnosis.ranks if found.rank == 1)
    assert waiting.where.collective * diagnosis.steps.median_s > 0.5 * MICROBATCHES * SLOW_S
    assert waiting.busy_fraction * diagnosis.steps.median_s < 0.5 * MICROBATCHES * SLOW_S
