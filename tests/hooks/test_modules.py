"""Forwards and backwards found from the order of events, without torch: modules and tensors are stand-ins."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.hooks import modules
from ppdiag.hooks.modules import RAISED, Inference
from ppdiag.hooks.recorder import RECORDER
from ppdiag.model import SPAN_FIELDS, Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = [name for name, _, _ in SPAN_FIELDS]


class Node:
    """A node of the graph; runs its prehooks when the backward comes to it."""

    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def register_prehook(self, hook: Any) -> None:
        self.hooks.append(hook)

    def run(self) -> None:
        for hook in self.hooks:
            hook(())


class Tensor:
    def __init__(self, *, grad: bool = True, numbers: int = 8, whole: bool = False) -> None:
        self.whole = whole
        self.grad_fn = Node() if grad else None
        self.requires_grad = grad
        self.numbers = numbers

    def numel(self) -> int:
        return self.numbers

    def is_floating_point(self) -> bool:
        return not self.whole


@pytest.fixture
def inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[Inference]:
    torch = SimpleNamespace(
        _C=SimpleNamespace(_current_graph_task_id=lambda: -1), is_grad_enabled=lambda: True, grad=True
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(modules, "install_module_calls", lambda: None)
    monkeypatch.setattr(RECORDER, "active", True)
    monkeypatch.setattr(RECORDER, "step_ended", False)
    yield Inference()
    RECORDER.spans.clear()


def found() -> list[tuple[Kind, int, int]]:
    """(kind, chunk, microbatch) of what was recorded, in order."""
    spans = [dict(zip(NAMES, span, strict=True)) for span in RECORDER.spans]
    assert all(span["flags"] & Flag.INFERRED for span in spans)
    assert all(span["start_ns"] <= span["end_ns"] for span in spans)
    return [(Kind(span["kind"]), span["chunk"], span["microbatch"]) for span in spans]


def call(inference: Inference, module: object, output: Tensor | None) -> None:
    inference.module_begins(module)
    inference.module_ends(output)


def backward(inference: Inference, output: Tensor) -> None:
    run = inference.backward_begins()
    if output.grad_fn is not None:
        output.grad_fn.run()
    inference.backward_ends(run, failed=False)


def test_a_loss_after_the_model_is_part_of_the_same_forward(inference: Inference) -> None:
    model, loss, output = object(), object(), Tensor()
    call(inference, model, Tensor())
    call(inference, loss, output)
    backward(inference, output)
    assert found() == [(Kind.FORWARD, 0, 0), (Kind.BACKWARD, 0, 0)]


def test_the_same_model_again_is_the_next_microbatch(inference: Inference) -> None:
    model = object()
    for _ in range(3):
        call(inference, model, Tensor())
    inference.close()
    assert found() == [(Kind.FORWARD, 0, 0), (Kind.FORWARD, 0, 1), (Kind.FORWARD, 0, 2)]


def test_a_message_ends_a_forward_and_two_models_are_two_chunks(inference: Inference) -> None:
    first, second = object(), object()
    for model in (first, second, first, second):
        call(inference, model, Tensor())
        inference.message(Kind.SEND, Tensor())
    assert found() == [
        (Kind.FORWARD, 0, 0),
        (Kind.FORWARD, 1, 0),
        (Kind.FORWARD, 0, 1),
        (Kind.FORWARD, 1, 1),
    ]


def test_the_graph_tells_which_microbatch_a_backward_is_of_in_any_order(inference: Inference) -> None:
    model, outputs = object(), [Tensor() for _ in range(3)]
    for output in outputs:
        call(inference, model, output)
    for output in reversed(outputs):
        backward(inference, output)
    assert [microbatch for kind, _, microbatch in found() if kind == Kind.BACKWARD] == [2, 1, 0]


def test_without_a_graph_backwards_are_taken_in_the_order_of_the_forwards(inference: Inference) -> None:
    model = object()
    for _ in range(2):
        call(inference, model, None)
    for _ in range(2):
        backward(inference, Tensor(grad=False))
    assert not any(span[NAMES.index("flags")] & Flag.FAILED for span in RECORDER.spans)
    assert [microbatch for kind, _, microbatch in found() if kind == Kind.BACKWARD] == [0, 1]


def test_a_loop_without_modules_has_its_forward_in_the_gap_before_the_send(inference: Inference) -> None:
    inference.message(Kind.RECV, Tensor(grad=False))
    inference.waited(123)
    inference.message(Kind.SEND, Tensor())
    inference.message(Kind.SEND, Tensor())  # a second tensor of the same output
    assert found() == [(Kind.FORWARD, 0, 0)]
    assert RECORDER.spans[0][0] == 123


def test_a_gradient_that_is_sent_is_no_forward(inference: Inference) -> None:
    call(inference, object(), Tensor())
    inference.message(Kind.RECV, Tensor(grad=False))
    inference.waited(5)
    backward(inference, Tensor(grad=False))
    inference.message(Kind.SEND, Tensor(grad=False))
    assert [kind for kind, _, _ in found()] == [Kind.FORWARD, Kind.BACKWARD]


def test_a_module_that_raises_ends_its_forward_as_failed(inference: Inference) -> None:
    inference.module_begins(object())
    inference.module_ends(RAISED)
    inference.close()
    (span,) = RECORDER.spans
    assert span[NAMES.index("flags")] & Flag.FAILED


def test_microbatches_are_counted_anew_in_each_step(inference: Inference) -> None:
    model = object()
    call(inference, model, Tensor())
    inference.optimized(1)
    inference.new_step()
    call(inference, model, Tensor())
    inference.close()
    assert [microbatch for _, _, microbatch in found()] == [0, 0]


def waited(inference: Inference, kind: Kind, peer: int) -> None:
    """The wait for a message of this peer has ended a while ago: what follows is long enough for a forward."""
    tail = (0, 0, 0, 0, peer, 0, -1, -1, -1, 0, 0, 0, int(kind), 0)
    inference.waited(1, [tail])


def test_without_modules_a_send_to_whom_was_sent_first_is_an_activation_though_it_is_detached(
    inference: Inference,
) -> None:
    for _ in range(2):  # the first stage of 1F1B: its backwards come between the forwards
        inference.message(Kind.SEND, Tensor(grad=False), 1)
        time.sleep(2 * modules.SHORTEST_FORWARD_NS / 1e9)
    inference.message(Kind.RECV, Tensor(grad=False), 1)
    waited(inference, Kind.RECV, 1)
    backward(inference, Tensor(grad=False))
    time.sleep(2 * modules.SHORTEST_FORWARD_NS / 1e9)
    inference.message(Kind.SEND, Tensor(grad=False), 1)
    assert found() == [(Kind.FORWARD, 0, 0), (Kind.FORWARD, 0, 1), (Kind.BACKWARD, 0, 0), (Kind.FORWARD, 0, 2)]


def test_a_received_shape_is_no_activation(inference: Inference) -> None:
    inference.message(Kind.RECV, Tensor(grad=False, whole=True), 0)
    waited(inference, Kind.RECV, 0)
    time.sleep(2 * modules.SHORTEST_FORWARD_NS / 1e9)
    inference.message(Kind.RECV, Tensor(grad=False), 0)
    assert found() == []
    waited(inference, Kind.RECV, 0)
    time.sleep(2 * modules.SHORTEST_FORWARD_NS / 1e9)
    inference.message(Kind.RECV, Tensor(grad=False, whole=True), 0)
    assert found() == [(Kind.FORWARD, 0, 0)]


def test_one_number_without_a_graph_is_no_activation(inference: Inference) -> None:
    for _ in range(2):
        inference.message(Kind.SEND, Tensor(grad=False, numbers=1), 1)
        time.sleep(2 * modules.SHORTEST_FORWARD_NS / 1e9)
    assert found() == []


def test_without_modules_the_last_stage_has_its_forwards_between_the_receives(inference: Inference) -> None:
    for _ in range(2):
        inference.message(Kind.RECV, Tensor(grad=False), 0)
        waited(inference, Kind.RECV, 0)
    for _ in range(2):
        backward(inference, Tensor(grad=False))
        inference.message(Kind.SEND, Tensor(grad=False), 0)
        waited(inference, Kind.SEND, 0)
    assert [kind for kind, _, _ in found()] == [Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD]
    assert [microbatch for _, _, microbatch in found()] == [0, 1, 0, 1]
