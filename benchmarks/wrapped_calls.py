"""What a single wrapped call costs the training thread, for each wrapper around the ops of a step.

Each is called on a stand-in that does nothing, with the parameters of the real one, and the same call without the
wrapper is taken off: in a loop (*hot*), and right after work that has evicted the caches (*cold*), which is what it
costs in a step. Medians, in ns. Run it on an idle machine.

    python benchmarks/wrapped_calls.py
"""

# ruff: noqa: ARG001, ARG002, FBT001, FBT002, PLR0917  (parameters as the frameworks have them)
from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ppdiag.hooks import process_group
from ppdiag.hooks.adapters import deepspeed, megatron, torch_pipelining
from ppdiag.hooks.recorder import RECORDER, thread_state
from ppdiag.model import Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS, REPETITIONS, COLD_CALLS = 1000, 30, 200
LABEL = (0, 0, 0, int(Payload.ACTIVATION), 0)


def nothing() -> None: ...


@dataclass(frozen=True)
class Call:
    """A wrapper, what it wraps, and how a framework calls it."""

    wrapped: Callable[..., Any]
    plain: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[], Any] = nothing
    """Before each call."""


class Nothing:
    """Stands in for a stage, a group, a Work and an engine, whose calls do nothing."""

    stage_index, has_backward, is_last = 0, True, False
    operations: Any = ()
    tensor: Any = None

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: Any = True
    ) -> None: ...

    def wait(self) -> None: ...

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        return self

    def get_ops(self, chunk_id: int) -> Any:
        return self.operations

    def instruction(self, buffer_id: int) -> None: ...


def forward_step(
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    input_tensor: Any,
    forward_data_store: Any,
    config: Any,
    cp_group_size: int,
    collect_non_loss_data: bool = False,
    checkpoint_activations_microbatch: Any = None,
    is_first_microbatch: bool = False,
    current_microbatch: int | None = None,
    vp_stage: int | None = None,
    is_last_stage: bool = True,
) -> Any:
    """Megatron-Core's since 0.14."""
    return forward_data_store


def backward_step(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any) -> Any:
    """Megatron-Core's since 0.19."""
    return input_tensor


def p2p_ops(*, tensor_send_prev: Any, tensor_recv_prev: Any, tensor_send_next: Any, tensor_recv_next: Any) -> None: ...


def torch_calls() -> dict[str, Call]:
    """Those of torch's pipelining, and of the layer under all frameworks."""
    one, tensors = Nothing(), [torch.zeros(16, 4)]
    one.tensor, one.operations = tensors[0], [one]
    forward = torch_pipelining._compute(Nothing.forward_one_chunk, Kind.FORWARD)
    label = torch_pipelining._label(Nothing.get_ops, Payload.ACTIVATION)
    send, wait = process_group._message(Nothing.send, int(Kind.SEND)), process_group._wait(Nothing.wait)
    send(one, tensors, 1, 0)  # makes it pending
    pending = dict(process_group._pending)
    return {
        "send": Call(send, Nothing.send, (one, tensors, 1, 0)),
        "Work.wait": Call(wait, Nothing.wait, (one,), prepare=lambda: process_group._pending.update(pending)),
        "torch forward_one_chunk": Call(forward, Nothing.forward_one_chunk, (one, 0, (), None, True)),
        "torch get_fwd_send_ops": Call(label, Nothing.get_ops, (one, 0)),
    }


def megatron_calls() -> dict[str, Call]:
    model, output = object(), torch.zeros(16, 4)
    endless = itertools.repeat(LABEL)
    call = megatron._Call({id(model): (1, 0)}, (1, 0), 3, 0, endless, endless)
    megatron._calls[:] = [call]
    forward, backward = megatron._forward_step(forward_step), megatron._backward_step(backward_step)
    positions = (None, None, model, 8, None, ([output], 0), None, 1, False, None)
    names = {"is_first_microbatch": False, "current_microbatch": 3, "vp_stage": None, "is_last_stage": False}
    message = {"tensor_send_prev": None, "tensor_recv_prev": output, "tensor_send_next": output}

    def prepare() -> None:
        call.forwards.clear()
        call.forwards[id(output)] = (3, 1, 0, int(Payload.ACTIVATION), 0)

    return {
        "Megatron forward_step": Call(forward, forward_step, positions, names),
        "Megatron backward_step": Call(backward, backward_step, ([output], [output], None, None), prepare=prepare),
        "Megatron _p2p_ops": Call(megatron._p2p_ops(p2p_ops), p2p_ops, (), {**message, "tensor_recv_next": None}),
    }


def deepspeed_calls() -> dict[str, Call]:
    deepspeed._batches[:] = [deepspeed._Batch((1, 6), 0, buffers={0: 0})]
    plain, engine, named = Nothing.instruction, (Nothing(),), {"buffer_id": 0}
    names = ("ForwardPass", "BackwardPass", "SendActivation")
    return {f"DeepSpeed {name}": Call(deepspeed._instruction(plain, name), plain, engine, named) for name in names}


def wrapped_calls_ns(work: Callable[[], Any]) -> dict[str, tuple[float, float]]:
    """Name -> median ns that one wrapped call takes longer than the bare one: in a loop, and after ``work``.

    The recorder must be awake.
    """
    thread_state().named = 1  # as within a schedule: the universal layer leaves the work to the adapter
    calls = {**torch_calls(), **megatron_calls(), **deepspeed_calls()}
    found = {}
    for name, call in calls.items():
        # One after the other, so that a change of the machine's speed is in both.
        hot = [hot_ns(call, call.wrapped) - hot_ns(call, call.plain) for _ in range(REPETITIONS)]
        both = [[cold_ns(call, function, work) for function in (call.wrapped, call.plain)] for _ in range(COLD_CALLS)]
        with_ns, without_ns = np.median(both, axis=0)
        found[name] = (float(np.median(hot)), float(with_ns - without_ns))
    thread_state().named = 0
    for left in (process_group._pending, process_group.labels, megatron._calls, deepspeed._batches, RECORDER._spans):
        left.clear()
    return found


def hot_ns(call: Call, function: Callable[..., Any]) -> float:
    arguments, named, prepare = call.arguments, call.named, call.prepare
    total = time.thread_time_ns()
    for _ in range(CALLS):
        prepare()
        function(*arguments, **named)
    total = time.thread_time_ns() - total
    RECORDER._spans.clear()
    return total / CALLS


def cold_ns(call: Call, function: Callable[..., Any], work: Callable[[], Any]) -> int:
    call.prepare()
    work()
    arguments, named = call.arguments, call.named
    begin = time.perf_counter_ns()
    function(*arguments, **named)
    return time.perf_counter_ns() - begin


def show_calls(calls_ns: dict[str, tuple[float, float]]) -> str:
    rows = [f"  {name:<24} {hot:+6.0f}  ({cold:+.0f})" for name, (hot, cold) in calls_ns.items()]
    return "\n".join(["a wrapped call, ns hot (cold)", *rows])


def main() -> None:
    torch.set_num_threads(1)
    model, batch = nn.Sequential(*[nn.Linear(384, 384) for _ in range(4)]), torch.randn(16, 384)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    RECORDER.active = True  # without a file
    print(show_calls(wrapped_calls_ns(lambda: model(batch).sum().backward())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
