"""Orders of schedules against published tables and torch's own; formulas against a simulation of the orders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.analyzers.schedules import (
    NAMES,
    Op,
    bubble_fraction,
    order,
    peak_activations,
    stage_ranks,
)
from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
SPLIT_1F1B = "1F1B with split W"


def ops(text: str) -> list[Op]:
    """``0F1`` is the forward of microbatch 1 through stage 0."""
    letters = {"F": F, "B": B, "W": W}
    words = (word.replace("F", " F ").replace("B", " B ").replace("W", " W ").split() for word in text.split())
    return [Op(letters[kind], int(stage), int(microbatch)) for stage, kind, microbatch in words]


def shapes(max_ranks: int = 8, max_chunks: int = 4, max_microbatches: int = 32) -> Iterator[tuple[str, int, int, int]]:
    """All schedules of all sizes that exist."""
    for name in NAMES:
        for ranks in range(1, max_ranks + 1):
            for chunks in range(1, max_chunks + 1):
                for microbatches in (*range(1, 13), 16, 17, 24, max_microbatches):
                    if exists(name, ranks, chunks, microbatches):
                        yield name, ranks, chunks, microbatches


def exists(name: str, ranks: int, chunks: int, microbatches: int) -> bool:
    try:
        order(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    except ValueError:
        return False
    return True


def makespan(
    orders: Sequence[Sequence[Op]],
    placement: Sequence[int],
    forward: float,
    backward: float,
    weight: float,
    transfer: float = 0.0,
) -> float:
    """When the last op ends if each starts as soon as its rank and its input are there. Fails on a deadlock."""
    lasts = {F: forward, B: backward, W: weight}
    ends: dict[Op, float] = {}
    free = [0.0] * len(orders)
    queues = [list(reversed(rank_ops)) for rank_ops in orders]
    while any(queues):
        done_before = len(ends)
        for rank, queue in enumerate(queues):
            while queue and (source := input_of(queue[-1], len(placement))) in {None, *ends}:
                op = queue.pop()
                hop = transfer if source and placement[source.stage] != rank else 0.0
                free[rank] = ends[op] = max(free[rank], ends[source] + hop if source else 0.0) + lasts[op.kind]
        assert len(ends) > done_before, "deadlock"
    return max(free)


def input_of(op: Op, stages: int) -> Op | None:
    if op.kind is F:
        return op._replace(stage=op.stage - 1) if op.stage else None
    if op.kind is W:
        return op._replace(kind=B)
    return op._replace(stage=op.stage + 1) if op.stage < stages - 1 else op._replace(kind=F)


# -- orders: written out ---------------------------------------------------------------------------------------------


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert order("GPipe", ranks=2, chunks=1, microbatches=3) == [
        ops("0F0 0F1 0F2 0B0 0B1 0B2"),
        ops("1F0 1F1 1F2 1B0 1B1 1B2"),
    ]


def test_1f1b_warms_up_with_one_forward_for_each_rank_after() -> None:
    # Narayanan et al. 2021, figure 4, top: four devices, eight microbatches; the cool-down mirrors the warm-up
    assert order("1F1B", ranks=4, chunks=1, microbatches=8) == [
        ops("0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7"),
        ops("1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7"),
        ops("2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7"),
        ops("3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7"),
    ]


def test_1f1b_with_fewer_microbatches_than_ranks_warms_up_with_all_of_them() -> None:
    assert order("1F1B", ranks=4, chunks=1, microbatches=2)[0] == ops("0F0 0F1 0B0 0B1")
    assert order("1F1B", ranks=4, chunks=1, microbatches=2)[3] == ops("3F0 3B0 3F1 3B1")


def test_interleaved_forwards_go_in_groups_through_the_chunks() -> None:
    # Megatron's published table for groups of 3, 5 microbatches, 2 chunks:
    # microbatch 0 1 2 0 1 2 3 4 3 4, chunk 0 0 0 1 1 1 0 0 1 1
    rank_ops = order("Interleaved1F1B", ranks=2, chunks=2, microbatches=5, group=3)[0]
    forwards = [op for op in rank_ops if op.kind is F]
    assert forwards == ops("0F0 0F1 0F2 2F0 2F1 2F2 0F3 0F4 2F3 2F4")


def test_interleaved_backwards_take_the_chunks_in_reverse() -> None:
    rank_ops = order("Interleaved1F1B", ranks=2, chunks=2, microbatches=4)[1]
    # warm-up (V-1)P + 2(P-r-1) = 2 forwards
    assert rank_ops == ops("1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3")


@pytest.mark.parametrize(("rank", "warmup"), [(0, 18), (1, 16), (2, 14), (3, 12)])
def test_interleaved_warm_up_of_a_real_megatron_run(rank: int, warmup: int) -> None:
    # measured on a public trace of P=4, V=4, M=8: 18 forwards on rank 0, 12 on rank 3, and one more before the first B
    rank_ops = order("Interleaved1F1B", ranks=4, chunks=4, microbatches=8)[rank]
    assert [op.kind for op in rank_ops].index(B) == warmup + 1


def test_looped_bfs_runs_a_whole_chunk_at_a_time() -> None:
    assert order("LoopedBFS", ranks=2, chunks=2, microbatches=2)[1] == ops("1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0")


def test_split_1f1b_delays_weights_by_the_rank() -> None:
    # Qi et al. 2024, ZB-H1: rank r holds r weight gradients back, for the gaps of the cool-down
    assert order(SPLIT_1F1B, ranks=3, chunks=1, microbatches=3) == [
        ops("0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2"),
        ops("1F0 1F1 1B0 1F2 1B1 1W0 1B2 1W1 1W2"),
        ops("2F0 2B0 2F1 2B1 2F2 2B2 2W0 2W1 2W2"),
    ]


def test_zbv_goes_down_the_ranks_and_up_again() -> None:
    assert order("ZBVZeroBubble", ranks=1, chunks=2, microbatches=2) == [
        ops("0F0 1F0 1B0 1W0 0F1 0B0 0W0 1F1 1B1 1W1 0B1 0W1"),
    ]


def test_loop_and_v_placements() -> None:
    assert stage_ranks("Interleaved1F1B", 3, 2) == [0, 1, 2, 0, 1, 2]
    assert stage_ranks("ZBVZeroBubble", 3, 2) == [0, 1, 2, 2, 1, 0]
    assert stage_ranks("DualPipeV", 2, 2) == [0, 1, 1, 0]


# -- orders: torch's own ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_schedules() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_orders(module: Any, name: str, *, ranks: int, chunks: int, microbatches: int) -> Any:
    """The schedule object of torch, made without a process group from stages that are only their numbers."""
    kind = module.get_schedule_class(name)
    stages = [
        SimpleNamespace(stage_index=c * ranks, num_stages=chunks * ranks, group_size=ranks, group_rank=0, submod=None)
        for c in range(chunks)
    ]
    single = issubclass(kind, module.PipelineScheduleSingle)
    return kind(stages[0] if single else stages, microbatches, loss_fn=lambda *_: None)


def plain(actions: Sequence[Any]) -> list[Op]:
    """torch's actions as ops: an overlapped pair as torch runs it, one after the other; no gaps, no reductions."""
    kinds = {"FORWARD": F, "FULL_BACKWARD": B, "BACKWARD_INPUT": B, "BACKWARD_WEIGHT": W}
    single = [one for action in actions if action for one in (getattr(action, "sub_actions", None) or [action])]
    return [
        Op(kinds[one.computation_type.name], one.stage_index, one.microbatch_index)
        for one in single
        if one.computation_type.name in kinds
    ]


def as_run(name: str, rank_ops: list[Op]) -> list[Op]:
    """torch 2.13's table of 1F1B counts the last rank's forwards from 1; what it runs counts from 0."""
    first = min(op.microbatch for op in rank_ops if op.kind is F)
    shift = first if name == "1F1B" else 0
    return [op._replace(microbatch=op.microbatch - shift) if op.kind is F else op for op in rank_ops]


@pytest.mark.parametrize(
    "name",
    ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
)
def test_every_order_is_torchs_op_by_op(torch_schedules: Any, name: str) -> None:
    if not hasattr(torch_schedules, f"Schedule{name}"):
        pytest.skip("this torch has no such schedule")
    version = tuple(int(part) for part in pytest.importorskip("torch").__version__.split(".")[:2])
    compared = 0
    chunk_counts = (1,) if name in ("GPipe", "1F1B") else (2, 3, 4)
    sizes = [
        (p, v, m) for p in (2, 4, 8) for v in chunk_counts for m in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 17, 19, 32)
    ]
    for ranks, chunks, microbatches in sizes:
        size = {"ranks": ranks, "chunks": chunks, "microbatches": microbatches}
        try:
            theirs = torch_orders(torch_schedules, name, **size)
        except (ValueError, AssertionError):
            # Megatron runs 1F1B with fewer microbatches than ranks, torch does not, nor up to 2.10 such a GPipe
            refused = ("1F1B",) if version >= (2, 11) else ("1F1B", "GPipe")
            assert not exists(name, **size) or (name in refused and microbatches < ranks)
            continue
        expected = [as_run(name, plain(theirs.pipeline_order[rank])) for rank in range(ranks)]
        assert order(name, **size) == expected, size
        if chunks > 1:
            placement = [theirs.stage_index_to_group_rank[stage] for stage in range(ranks * chunks)]
            assert stage_ranks(name, ranks, chunks) == placement
        compared += 1
    assert compared >= 16


def test_torchs_single_chunk_zero_bubble_is_split_1f1b(torch_schedules: Any) -> None:
    theirs = torch_orders(torch_schedules, "InterleavedZeroBubble", ranks=4, chunks=1, microbatches=8)
    expected = [plain(theirs.pipeline_order[rank]) for rank in range(4)]
    assert order(SPLIT_1F1B, ranks=4, chunks=1, microbatches=8) == expected


# -- orders: what must hold for all ----------------------------------------------------------------------------------


def test_every_order_can_run_and_holds_each_op_once_on_its_rank() -> None:
    for name, ranks, chunks, microbatches in shapes(max_ranks=5, max_chunks=3):
        orders = order(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
        placement = stage_ranks(name, ranks, chunks)
        makespan(orders, placement, 1, 1, 1)
        for rank, rank_ops in enumerate(orders):
            stages = [stage for stage, its_rank in enumerate(placement) if its_rank == rank]
            once = {Op(kind, stage, m) for kind in (F, B) for stage in stages for m in range(microbatches)}
            assert {op for op in rank_ops if op.kind is not W} == once
            assert len(set(rank_ops)) == len(rank_ops)


@pytest.mark.parametrize(
    ("name", "chunks", "microbatches", "message"),
    [
        ("Chimera", 1, 8, "unknown schedule 'Chimera'; known: GPipe, 1F1B"),
        ("GPipe", 2, 8, "GPipe has one stage a rank, not 2"),
        ("DualPipeV", 3, 8, "DualPipeV has two stages a rank, not 3"),
        ("DualPipeV", 2, 7, "DualPipeV needs a microbatch for each of its 8 stages, not 7"),
        ("Interleaved1F1B", 2, 9, "Interleaved1F1B takes 4 or more microbatches at a time: 9 do not go in groups of 4"),
        ("1F1B", 1, 0, "must be at least 1"),
    ],
)
def test_a_schedule_that_does_not_exist_is_refused(name: str, chunks: int, microbatches: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        order(name, ranks=4, chunks=chunks, microbatches=microbatches)


# -- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "microbatches", "percent"),
    [
        ("GPipe", 4, 1, 4, 42.86),
        ("1F1B", 4, 1, 4, 42.86),
        ("1F1B", 4, 1, 8, 27.27),
        ("1F1B", 8, 1, 32, 17.95),
        ("Interleaved1F1B", 4, 2, 8, 15.79),
        ("Interleaved1F1B", 4, 4, 8, 8.57),
        ("Interleaved1F1B", 4, 8, 8, 4.48),
    ],
)
def test_published_bubbles(name: str, ranks: int, chunks: int, microbatches: int, percent: float) -> None:
    formula = bubble_fraction(name, ranks, chunks, microbatches)
    assert formula == pytest.approx(percent / 100, abs=5e-5)


def test_published_makespan() -> None:
    assert makespan(order("1F1B", ranks=4, chunks=1, microbatches=4), range(4), 1, 1, 0) == 14


def test_every_closed_formula_is_what_its_order_takes() -> None:
    checked = dict.fromkeys(NAMES, 0)
    for name, ranks, chunks, microbatches in shapes():
        formula = bubble_fraction(name, ranks, chunks, microbatches)
        if formula is not None and ranks in (1, 2, 3, 4, 8):
            orders = order(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
            total = makespan(orders, stage_ranks(name, ranks, chunks), 1, 1, 1)
            assert formula == pytest.approx(1 - len(orders[0]) / total), (name, ranks, chunks, microbatches)
            checked[name] += 1
    assert min(count for name, count in checked.items() if name != "DualPipeV") >= 40


def test_1f1b_takes_its_ideal_time_and_a_bubble_for_unequal_forward_and_backward_too() -> None:
    # Narayanan et al. 2021, section 2.2.1: (m + p - 1)(F + B)
    assert makespan(order("1F1B", ranks=4, chunks=1, microbatches=8), range(4), 1, 2, 0) == 11 * (1 + 2)


def test_no_formula_is_claimed_where_none_holds() -> None:
    assert bubble_fraction("DualPipeV", 4, 2, 16) is None
    assert bubble_fraction("Interleaved1F1B", 4, 2, 3) is None
    assert bubble_fraction("ZBVZeroBubble", 4, 2, 6) is None
    assert bubble_fraction("GPipe", 4, 2, 8) is None
    assert bubble_fraction("forward-only", 4, 1, 8) is None


@pytest.mark.parametrize("chunks", [1, 3])
def test_with_one_microbatch_one_rank_works_at_a_time(chunks: int) -> None:
    assert bubble_fraction("naive", 4, chunks, 1) == 0.75
    orders = order("LoopedBFS", ranks=4, chunks=chunks, microbatches=1)
    hops = 2 * (4 * chunks - 1)
    assert makespan(orders, stage_ranks("LoopedBFS", 4, chunks), 1, 2, 0, 0.5) == 4 * chunks * 3 + hops * 0.5


def test_peak_activations_of_gpipe_and_1f1b() -> None:
    # GPipe keeps all m; 1F1B min(m, p - r)
    assert peak_activations(order("GPipe", ranks=4, chunks=1, microbatches=8)) == [8, 8, 8, 8]
    assert peak_activations(order("1F1B", ranks=4, chunks=1, microbatches=8)) == [4, 3, 2, 1]
    assert peak_activations(order("1F1B", ranks=4, chunks=1, microbatches=2)) == [2, 2, 2, 1]


def test_peak_activations_of_interleaved_and_zero_bubble() -> None:
    # interleaved: warm-up of 2(p-r-1) + (v-1)p chunks and one more; ZBV: p microbatches of two chunks on every rank
    assert peak_activations(order("Interleaved1F1B", ranks=4, chunks=2, microbatches=8)) == [11, 9, 7, 5]
    assert peak_activations(order("ZBVZeroBubble", ranks=4, chunks=2, microbatches=8)) == [8, 8, 8, 8]


def test_forwards_without_a_backward_keep_no_activations() -> None:
    assert peak_activations([ops("0F0 0F1 0B1 0F2"), []]) == [1, 0]
