"""Receives posted ahead, against torch's own writing down of its schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.analyzers.edges import CyclicOrder
from ppdiag.analyzers.schedules import Op, order, stage_ranks
from ppdiag.analyzers.what_if.receives import receives_ahead, with_gaps
from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = {"FORWARD": Kind.FORWARD, "FULL_BACKWARD": Kind.BACKWARD, "BACKWARD_INPUT": Kind.BACKWARD,
         "BACKWARD_WEIGHT": Kind.WEIGHT, "RECV_F": Kind.FORWARD, "RECV_B": Kind.BACKWARD}  # fmt: skip


def test_a_receive_is_posted_as_soon_as_its_send_is_written_down() -> None:
    # in each round rank 0 runs its forward, and rank 1 the same forward after it
    turns = [[[op] for op in ops] for ops in order("GPipe", ranks=2, chunks=1, microbatches=2)]
    found = receives_ahead(turns, [0, 1])
    forward = [Op(Kind.FORWARD, 1, m) for m in (0, 1)]
    assert found[1] == {0: [forward[0]], 1: [forward[1]]}
    # rank 1's backwards are written down in the rounds after
    assert found[0] == {2: [Op(Kind.BACKWARD, 0, 0)], 3: [Op(Kind.BACKWARD, 0, 1)]}


def test_ops_that_wait_for_each_other_are_refused() -> None:
    backward_first = [[Op(Kind.BACKWARD, 0, 0)], [Op(Kind.FORWARD, 0, 0)]]
    with pytest.raises(CyclicOrder):
        receives_ahead([backward_first, [[Op(Kind.FORWARD, 1, 0)], [Op(Kind.BACKWARD, 1, 0)]]], [0, 1])


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_receives_are_posted_where_torch_posts_them(name: str, ranks: int, microbatches: int) -> None:
    pytest.importorskip("torch")
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(module, "_add_reduce_grad"):
        pytest.skip("torch 2.8 leaves one gap less after the last op of a stage: receives an op later")
    stages = [
        SimpleNamespace(stage_index=c * ranks, num_stages=2 * ranks, group_size=ranks, group_rank=0, submod=None)
        for c in range(2)
    ]
    theirs = module.get_schedule_class(name)(stages, microbatches, loss_fn=lambda *_: None)
    placement = stage_ranks(name, ranks, 2)
    turns = [[ops for action in theirs.pipeline_order[rank] if (ops := parts(action))] for rank in range(ranks)]
    # torch offers no other way to see it than the functions that its constructor would call
    with_extra = {
        rank: module._add_reduce_grad(module._add_unshard_reshard(actions), microbatches)
        for rank, actions in theirs.pipeline_order.items()
    }
    lowered = module._add_send_recv(with_extra, placement.__getitem__, 2 * ranks)
    assert receives_ahead([with_gaps(own) for own in turns], placement) == [posted(lowered[r]) for r in range(ranks)]


def parts(action: Any) -> list[Op]:
    """torch's action as ops; none of a gap."""
    single = [] if action is None else getattr(action, "sub_actions", None) or [action]
    return [
        Op(KINDS[one.computation_type.name], one.stage_index, one.microbatch_index)
        for one in single
        if one.computation_type.name in KINDS
    ]


def posted(actions: Sequence[Any]) -> dict[int, list[Op]]:
    """After how many turns torch posts which receives."""
    found: dict[int, list[Op]] = {}
    done = 0
    for action in actions:
        if action.computation_type.name in ("RECV_F", "RECV_B"):
            found.setdefault(done, []).extend(parts(action))
        elif parts(action):
            done += 1
    return found
