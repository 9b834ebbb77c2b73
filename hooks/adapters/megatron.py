"""Megatron-Core (0.8 to 0.19): names the work of its schedules and the messages between its stages.

Its schedules call ``forward_step`` and ``backward_step`` as globals of their module, and ``_p2p_ops`` or
``_batched_p2p_ops`` as globals of theirs, in all these versions, though the layers between (functions until 0.12, a
class since 0.14) changed. A forward says its microbatch; its backward is the one that is given its output. Receives are
named by their order: that of the forwards, or of the backwards, of this rank.
"""

from __future__ import annotations

import functools
import itertools
import sys
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import guard, process_group
from ppdiag.hooks.adapters import brackets
from ppdiag.hooks.adapters.megatron_grid import Grid, say_facts
from ppdiag.hooks.recorder import RECORDER, compute_tail
from ppdiag.model import NONE, Flag, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ppdiag.hooks.adapters.brackets import Label

PROBE = "megatron.core"
PACKAGE = "megatron.core.pipeline_parallel"
SCHEDULES = {
    "forward_backward_no_pipelining": "no pipelining",
    "forward_backward_pipelining_with_interleaving": "Interleaved1F1B",
    "forward_backward_pipelining_without_interleaving": "1F1B",
}
"""Function -> name of the schedule."""
MODEL_AT, OUTPUT_AT = 2, 1
"""Position of the model among the arguments of a forward, and of its output among those of its backward."""
COMBINED_ARGUMENTS = {"f_model": 2, "b_model": 6, "b_output_tensor": 8}
"""Positions of the arguments of the combined step that are looked at. All are the same in all versions."""
_FORWARD, _BACKWARD = int(Kind.FORWARD), int(Kind.BACKWARD)
_ACTIVATION, _GRADIENT = int(Payload.ACTIVATION), int(Payload.GRADIENT)
_UNKNOWN = (*brackets.NO_LABEL, _ACTIVATION, 0)
_CONTAINERS = frozenset((list, tuple, dict))
"""What may hold several tensors. To ask for these exact types is ten times as fast as ``isinstance`` of a tensor."""


@dataclass
class _Call:
    """One call of a schedule: what is known of its pipeline, and what is on its way."""

    places: dict[int, tuple[int, int]]
    """``id`` of a model chunk -> its stage and index."""
    first_place: tuple[int, int]
    """That of what is none of these."""
    last_stage: int
    """The stage that computes the loss."""
    flags: int
    next_forward: Iterator[Label]
    """Labels of the activations that are still to be received, in order."""
    next_backward: Iterator[Label]
    """Labels of the gradients that are still to be received, in order."""
    forwards: dict[int, Label] = field(default_factory=dict)
    """``id`` of the first tensor of a forward's output -> its label, until its backward."""
    model: Any = None
    place: tuple[int, int] = (NONE, NONE)
    """Of the forward before, which is most often that of the next."""


_wrappers = brackets.Wrappers(PROBE)
_calls: list[_Call] = []
"""The schedule that runs now; empty between two."""


class Megatron:
    """The adapter."""

    def install(self, name: str) -> None:
        """Wrap the functions of the module of this name."""
        guard.register(PROBE, self.uninstall)
        module = sys.modules[name]
        if name == f"{PACKAGE}.schedules":
            _wrappers.wrap(module, ["forward_step"], _forward_step)
            _wrappers.wrap(module, ["backward_step"], _backward_step)
            _wrappers.wrap(module, ["backward_step_multimodule"], _backward_step, optional=True)
            for function, schedule in SCHEDULES.items():
                _wrappers.wrap(module, [function], functools.partial(_schedule, name=schedule))
        elif name == f"{PACKAGE}.p2p_communication":
            _wrappers.wrap(module, ["_p2p_ops", "_batched_p2p_ops"], _p2p_ops)
        elif name == f"{PACKAGE}.combined_1f1b":
            _wrappers.wrap(module, ["combined_forward_backward_step"], _combined_step, optional=True)

    def uninstall(self) -> None:
        """Put everything back."""
        _wrappers.restore()
        _calls.clear()


ADAPTER = Megatron()


def order_of_forwards(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) of a rank's forwards: chunk by chunk for a group of microbatches, then the next group.

    Source: ``get_schedule_table`` of Megatron-Core; with one chunk, plainly one microbatch after the other.

    >>> order_of_forwards(4, 2, 2)
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    """
    groups = [range(first, min(first + group, microbatches)) for first in range(0, microbatches, group)]
    return [(microbatch, chunk) for group in groups for chunk in range(chunks) for microbatch in group]


def _tensors(value: Any) -> list[Any]:
    """All tensors in an output: it may be one, a list (None among them), or a dict by module."""
    if value is None:
        return []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value]


def _guarded(function: Callable[..., Any], *args: Any) -> Any:
    """What a part of the adapter returns; None where it fails, which switches the adapter off."""
    try:
        return function(*args)
    except Exception as error:
        guard.failed(PROBE, error)
        return None


def _forward_step(original: Any) -> Any:
    """Wrapper of ``forward_step``, which computes the loss too."""
    forward = _forward(original)

    def any_forward_step(*args: Any, **kwargs: Any) -> Any:
        model = args[MODEL_AT] if len(args) > MODEL_AT else kwargs.get("model")
        return forward(model, kwargs.get("current_microbatch"), args, kwargs)

    return brackets.with_parameters_of(original, forward, "model", "current_microbatch") or any_forward_step


def _forward(original: Any) -> Any:
    """A call of ``forward_step``, with the model and the microbatch among its arguments.

    Here and in ``_backward_step`` an output that is one tensor is named in place: each further function costs time.
    """
    recorder, calls, labels, run = RECORDER, _calls, process_group.labels, brackets.run

    def forward(model: Any, microbatch: int | None, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        if not calls or not recorder.active:
            return original(*args, **(kwargs or {}))
        try:
            call = calls[-1]
            if model is not call.model:
                call.model, call.place = model, call.places.get(id(model)) or call.first_place
            stage, chunk = call.place
            label = (NONE if microbatch is None else microbatch, stage, chunk, _ACTIVATION, call.flags)
        except Exception as error:
            guard.failed(PROBE, error)
            return original(*args, **(kwargs or {}))
        result = run(PROBE, _FORWARD, label, original, args, kwargs)
        try:
            output = result[0]
            if type(output) is list and len(output) == 1:
                output = output[0]
            if type(output) in _CONTAINERS:
                _forward_ended(call, label, output)
            else:
                key = id(output)
                call.forwards[key] = label
                if stage != call.last_stage:
                    labels[key] = label
        except Exception as error:
            guard.failed(PROBE, error)
        return result

    return forward


def _forward_ended(call: _Call, label: Label, output: Any) -> None:
    """Remember whose output this is; a send of it is of that forward."""
    tensors = _tensors(output)
    for tensor in tensors[:1]:
        call.forwards[id(tensor)] = label
    if label[1] != call.last_stage:
        _name_messages(label, tensors)


def _name_messages(label: Label, tensors: list[Any]) -> None:
    for tensor in tensors:
        process_group.labels[id(tensor)] = label


def _backward_step(original: Any) -> Any:
    """Wrapper of ``backward_step``."""
    backward = _backward(original)

    def any_backward_step(*args: Any, **kwargs: Any) -> Any:
        output = args[OUTPUT_AT] if len(args) > OUTPUT_AT else kwargs.get("output_tensor")
        return backward(output, args, kwargs)

    return brackets.with_parameters_of(original, backward, "output_tensor") or any_backward_step


def _backward(original: Any) -> Any:
    """A call of ``backward_step``, with the output among its arguments."""
    recorder, calls, labels, run = RECORDER, _calls, process_group.labels, brackets.run

    def backward(output: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        if not calls or not recorder.active:
            return original(*args, **(kwargs or {}))
        try:
            first = output[0] if type(output) is list and output else output
            label = calls[-1].forwards.pop(id(first), None) or _label_of(calls[-1], output)
        except Exception as error:
            guard.failed(PROBE, error)
            return original(*args, **(kwargs or {}))
        result = run(PROBE, _BACKWARD, label, original, args, kwargs)
        try:
            microbatch, stage, chunk, _, flags = label
            if stage <= 0:
                return result
            gradient = result[0] if type(result) is list and len(result) == 1 else result
            if type(gradient) in _CONTAINERS:
                _backward_ended(label, gradient)
            else:
                labels[id(gradient)] = (microbatch, stage, chunk, _GRADIENT, flags)
        except Exception as error:
            guard.failed(PROBE, error)
        return result

    return backward


def _label_of(call: _Call, output: Any) -> Label:
    """Label of the forward whose output this is."""
    first = next(iter(_tensors(output)), None)
    return call.forwards.pop(id(first), _UNKNOWN)


def _backward_ended(label: Label, gradient: Any) -> None:
    """A send of what a backward returned is of it."""
    microbatch, stage, chunk, _, flags = label
    if stage > 0:
        _name_messages((microbatch, stage, chunk, _GRADIENT, flags), _tensors(gradient))


def _combined_step(original: Any) -> Any:
    """Wrapper of ``combined_forward_backward_step``: the layers of one F and one B in turns, to hide their all-to-all.

    Where it has both, both spans are the whole call: what each took of it is not known.
    """

    def combined_step(*args: Any, **kwargs: Any) -> Any:
        if not _calls or not RECORDER.active:
            return original(*args, **kwargs)
        call = _calls[-1]
        started = _guarded(_begin_combined, call, args, kwargs)
        if not started:
            return original(*args, **kwargs)
        forward, backward, named = started
        result = _run_combined(forward, backward, original, args, named)
        _guarded(_combined_ended, call, forward, backward, result)
        return result

    return combined_step


def _run_combined(forward: Label | None, backward: Label | None, original: Any, args: Any, kwargs: Any) -> Any:
    if forward is None or backward is None:
        kind = _BACKWARD if forward is None else _FORWARD
        return brackets.run(PROBE, kind, forward or backward or _UNKNOWN, original, args, kwargs)
    also = (compute_tail(_BACKWARD, perf_counter_ns(), backward[:3], backward[4]),)
    return brackets.run(PROBE, _FORWARD, forward, original, args, kwargs, also=also)


def _combined_ended(call: _Call, forward: Label | None, backward: Label | None, result: Any) -> None:
    if forward is not None:
        _forward_ended(call, forward, result[0])
    if backward is not None:
        _backward_ended(backward, result[2])


def _begin_combined(call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(label of F or None, label of B or None, keyword arguments with named messages); None where it has neither."""
    f_model, b_model, output = (
        args[at] if at < len(args) else kwargs.get(name) for name, at in COMBINED_ARGUMENTS.items()
    )
    forward = backward = None
    named = dict(kwargs)
    if f_model is not None:
        microbatch = kwargs.get("current_microbatch")
        place = call.places.get(id(f_model)) or call.first_place
        forward = (NONE if microbatch is None else microbatch, *place, _ACTIVATION, call.flags)
        _name_before(named, "post_forward", functools.partial(_forward_ended, call, forward))
    if b_model is not None:
        backward = _label_of(call, output)
        _name_before(named, "post_backward", functools.partial(_backward_ended, backward))
    return (forward, backward, named) if forward or backward else None


def _name_before(named: dict[str, Any], key: str, ended: Callable[[Any], None]) -> None:
    """Have the call-back that sends a result of the combined step name it first."""
    send = named.get(key)
    if send is None:
        return

    def name_and_send(result: Any, *args: Any, **kwargs: Any) -> Any:
        _guarded(ended, result)
        return send(result, *args, **kwargs)

    named[key] = name_and_send


def _p2p_ops(original: Any) -> Any:
    """Wrapper of ``_p2p_ops`` and ``_batched_p2p_ops``: what comes from the previous rank is an activation."""
    recorder, calls, labels = RECORDER, _calls, process_group.labels

    def p2p_ops(*args: Any, **kwargs: Any) -> Any:
        if calls and recorder.active:
            try:
                activation, gradient = kwargs.get("tensor_recv_prev"), kwargs.get("tensor_recv_next")
                if activation is not None:
                    labels[id(activation)] = next(calls[-1].next_forward)
                if gradient is not None:
                    labels[id(gradient)] = next(calls[-1].next_backward)
            except Exception as error:
                guard.failed(PROBE, error)
        return original(*args, **kwargs)

    return p2p_ops


def _schedule(original: Any, name: str) -> Any:
    """Wrapper of one of the three ``forward_backward_*`` functions, which take keyword arguments only."""

    def schedule(*args: Any, **kwargs: Any) -> Any:
        if not (RECORDER.active or RECORDER.start()):
            return original(*args, **kwargs)
        try:
            call = _begin_schedule(name, kwargs)
        except Exception as error:
            guard.failed(PROBE, error)
            return original(*args, **kwargs)
        _calls.append(call)
        try:
            return brackets.run_schedule(PROBE, call.flags, original, args, kwargs)
        finally:
            if _calls:  # else the adapter was taken off meanwhile
                _calls.pop()

    return schedule


def _begin_schedule(name: str, kwargs: dict[str, Any]) -> _Call:
    models = kwargs["model"] if isinstance(kwargs["model"], list) else [kwargs["model"]]
    microbatches = kwargs["num_microbatches"]
    grid = Grid(kwargs)
    rank, ranks = grid.place("pp")
    flags = int(Flag.EVALUATION) if kwargs.get("forward_only") else 0
    order = order_of_forwards(microbatches, len(models), _group_size(models[0]) or ranks)
    places = [(chunk * ranks + rank, chunk) for chunk in range(len(models))]
    last_stage = ranks * len(models) - 1
    forwards = [(microbatch, *places[chunk], _ACTIVATION, flags) for microbatch, chunk in order]
    backwards = [(microbatch, *places[-1 - chunk], _GRADIENT, flags) for microbatch, chunk in order]
    process_group.labels.clear()
    say_facts(grid, schedule=name, microbatches=microbatches, chunks=len(models))
    return _Call(
        places={id(model): place for model, place in zip(models, places, strict=True)},
        first_place=places[0],
        last_stage=last_stage,
        flags=flags,
        next_forward=_and_unknown([label for label in forwards if label[1] > 0], _ACTIVATION),
        next_backward=_and_unknown([label for label in backwards if label[1] < last_stage], _GRADIENT),
    )


def _and_unknown(labels: list[Label], payload: int) -> Iterator[Label]:
    """The labels, then one without a place for whatever else is received."""
    return itertools.chain(labels, itertools.repeat((*brackets.NO_LABEL, payload, 0)))


def _group_size(model: Any) -> int | None:
    """Microbatches of one chunk in a row; a setting since 0.10, the number of ranks before."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    return getattr(getattr(model, "config", None), "microbatch_group_size_per_vp_stage", None)
