"""Megatron-Core (0.8 to 0.19): names the work of its schedules and the messages between its stages.

Its schedules call ``forward_step`` and ``backward_step`` as globals of their module, and ``_p2p_ops`` or
``_batched_p2p_ops`` as globals of theirs, in all these versions, though the layers between (functions until 0.12, a
class since 0.14) changed. A forward says its microbatch; its backward is the one that is given its output. Receives are
named by their order: that of the forwards, or of the backwards, of this rank.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import guard, process_group
from ppdiag.hooks.adapters import brackets
from ppdiag.hooks.recorder import RECORDER
from ppdiag.model import NONE, Flag, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ppdiag.hooks.recorder import Tail

PROBE = "megatron.core"
PACKAGE = "megatron.core.pipeline_parallel"
SCHEDULES = {
    "forward_backward_no_pipelining": "no pipelining",
    "forward_backward_pipelining_with_interleaving": "Interleaved1F1B",
    "forward_backward_pipelining_without_interleaving": "1F1B",
}
"""Function -> name of the schedule."""
AXES = {"pp": "pipeline_model_parallel", "tp": "tensor_model_parallel", "dp": "data_parallel"}
"""Axis -> its words in the names of ``parallel_state``."""
MODEL_AT, OUTPUT_AT = 2, 1
"""Position of the model among the arguments of a forward, and of its output among those of its backward."""
COMBINED_ARGUMENTS = {"f_model": 2, "b_model": 6, "b_output_tensor": 8}
"""Positions of the arguments of the combined step that are looked at. All are the same in all versions."""
_FORWARD, _BACKWARD, _SCHEDULE = int(Kind.FORWARD), int(Kind.BACKWARD), int(Kind.SCHEDULE)
_ACTIVATION, _GRADIENT = int(Payload.ACTIVATION), int(Payload.GRADIENT)

Label = tuple[int, int, int]
"""(microbatch, stage, chunk)."""


@dataclass
class _Call:
    """One call of a schedule: what is known of its pipeline, and what is on its way."""

    rank: int
    """Of this process along the pipeline."""
    ranks: int
    chunks: dict[int, int]
    """``id`` of a model chunk -> its index."""
    flags: int
    next_forward: Iterator[Label]
    """Labels of the activations that are still to be received, in order."""
    next_backward: Iterator[Label]
    """Labels of the gradients that are still to be received, in order."""
    forwards: dict[int, Label] = field(default_factory=dict)
    """``id`` of the first tensor of a forward's output -> its label, until its backward."""
    last_stage: int = field(init=False)
    """The stage that computes the loss."""

    def __post_init__(self) -> None:
        self.last_stage = self.ranks * len(self.chunks) - 1

    def label(self, microbatch: int | None, model: Any) -> Label:
        """Label of a forward."""
        chunk = self.chunks.get(id(model), 0)
        return (NONE if microbatch is None else microbatch, chunk * self.ranks + self.rank, chunk)


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
    if type(value) is list and len(value) == 1 and hasattr(value[0], "grad_fn"):  # as most often
        return value
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

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        if not _calls or not RECORDER.active:
            return original(*args, **kwargs)
        call = _calls[-1]
        try:
            model = args[MODEL_AT] if len(args) > MODEL_AT else kwargs["model"]
            label = call.label(kwargs.get("current_microbatch"), model)
            tail = brackets.begin(_FORWARD, label, call.flags)
        except Exception as error:
            guard.failed(PROBE, error)
            return original(*args, **kwargs)
        result = brackets.run((tail,), original, args, kwargs)
        try:
            _forward_ended(call, label, result[0])
        except Exception as error:
            guard.failed(PROBE, error)
        return result

    return forward_step


def _forward_ended(call: _Call, label: Label, output: Any) -> None:
    """Remember whose output this is; a send of it is of that forward."""
    tensors = _tensors(output)
    if tensors and not call.flags:
        call.forwards[id(tensors[0])] = label
    if label[1] != call.last_stage:
        _name_messages(call, label, tensors, _ACTIVATION)


def _name_messages(call: _Call, label: Label, tensors: list[Any], payload: int) -> None:
    name = (*label, payload, call.flags)
    for tensor in tensors:
        process_group.labels[id(tensor)] = name


def _backward_step(original: Any) -> Any:
    """Wrapper of ``backward_step(input_tensor, output_tensor, ...)``."""

    def backward_step(*args: Any, **kwargs: Any) -> Any:
        if not _calls or not RECORDER.active:
            return original(*args, **kwargs)
        call = _calls[-1]
        try:
            label = _backward_label(call, args[OUTPUT_AT] if len(args) > OUTPUT_AT else kwargs["output_tensor"])
            tail = brackets.begin(_BACKWARD, label)
        except Exception as error:
            guard.failed(PROBE, error)
            return original(*args, **kwargs)
        result = brackets.run((tail,), original, args, kwargs)
        try:
            _backward_ended(call, label, result)
        except Exception as error:
            guard.failed(PROBE, error)
        return result

    return backward_step


def _backward_label(call: _Call, output: Any) -> Label:
    tensors = _tensors(output)
    return call.forwards.pop(id(tensors[0]), brackets.NO_LABEL) if tensors else brackets.NO_LABEL


def _backward_ended(call: _Call, label: Label, gradient: Any) -> None:
    if label[1] > 0:
        _name_messages(call, label, _tensors(gradient), _GRADIENT)


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
        forward, backward, tails, named = started
        result = brackets.run(tails, original, args, named)
        _guarded(_combined_ended, call, forward, backward, result)
        return result

    return combined_step


def _combined_ended(call: _Call, forward: Label | None, backward: Label | None, result: Any) -> None:
    if forward is not None:
        _forward_ended(call, forward, result[0])
    if backward is not None:
        _backward_ended(call, backward, result[2])


def _begin_combined(call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(label of F or None, label of B or None, tails, keyword arguments with named messages)."""
    f_model, b_model, output = (
        args[at] if at < len(args) else kwargs.get(name) for name, at in COMBINED_ARGUMENTS.items()
    )
    tails: list[Tail] = []
    forward = backward = None
    named = dict(kwargs)
    if f_model is not None:
        forward = call.label(kwargs.get("current_microbatch"), f_model)
        tails.append(brackets.begin(_FORWARD, forward, call.flags))
        _name_before(named, "post_forward", _forward_ended, call, forward)
    if b_model is not None:
        backward = _backward_label(call, output)
        tails.append(brackets.begin(_BACKWARD, backward))
        _name_before(named, "post_backward", _backward_ended, call, backward)
    return forward, backward, tails, named


def _name_before(named: dict[str, Any], key: str, ended: Callable[..., None], call: _Call, label: Label) -> None:
    """Have the call-back that sends a result of the combined step name it first."""
    send = named.get(key)
    if send is None:
        return

    def name_and_send(result: Any, *args: Any, **kwargs: Any) -> Any:
        _guarded(ended, call, label, result)
        return send(result, *args, **kwargs)

    named[key] = name_and_send


def _p2p_ops(original: Any) -> Any:
    """Wrapper of ``_p2p_ops`` and ``_batched_p2p_ops``: what comes from the previous rank is an activation."""

    def p2p_ops(*args: Any, **kwargs: Any) -> Any:
        if _calls and RECORDER.active:
            _guarded(_name_receives, _calls[-1], kwargs)
        return original(*args, **kwargs)

    return p2p_ops


def _name_receives(call: _Call, kwargs: dict[str, Any]) -> None:
    for name, labels, payload in (
        ("tensor_recv_prev", call.next_forward, _ACTIVATION),
        ("tensor_recv_next", call.next_backward, _GRADIENT),
    ):
        if kwargs.get(name) is not None:
            _name_messages(call, next(labels, brackets.NO_LABEL), [kwargs[name]], payload)


def _schedule(original: Any, name: str) -> Any:
    """Wrapper of one of the three ``forward_backward_*`` functions, which take keyword arguments only."""

    def schedule(*args: Any, **kwargs: Any) -> Any:
        if not (RECORDER.active or RECORDER.start()):
            return original(*args, **kwargs)
        try:
            call = _begin_schedule(name, kwargs)
            tail = brackets.begin(_SCHEDULE, brackets.NO_LABEL, call.flags)
        except Exception as error:
            guard.failed(PROBE, error)
            return original(*args, **kwargs)
        _calls.append(call)
        try:
            return brackets.run_schedule(tail, original, args, kwargs)
        finally:
            if _calls:  # else the adapter was taken off meanwhile
                _calls.pop()

    return schedule


def _begin_schedule(name: str, kwargs: dict[str, Any]) -> _Call:
    models = kwargs["model"] if isinstance(kwargs["model"], list) else [kwargs["model"]]
    microbatches = kwargs["num_microbatches"]
    grid = _Grid(kwargs)
    rank, ranks = grid.place("pp")
    chunks = {id(model): chunk for chunk, model in enumerate(models)}
    flags = int(Flag.EVALUATION) if kwargs.get("forward_only") else 0
    order = order_of_forwards(microbatches, len(models), _group_size(models[0]) or ranks)
    labels = [(microbatch, chunk * ranks + rank, chunk) for microbatch, chunk in order]
    last = len(models) - 1
    backwards = [(microbatch, (last - chunk) * ranks + rank, last - chunk) for microbatch, chunk in order]
    process_group.labels.clear()
    _say_facts(grid, schedule=name, microbatches=microbatches, chunks=len(models))
    return _Call(
        rank,
        ranks,
        chunks,
        flags,
        iter([label for label in labels if label[1] > 0]),
        iter([label for label in backwards if label[1] < ranks * len(models) - 1]),
    )


def _group_size(model: Any) -> int | None:
    """Microbatches of one chunk in a row; a setting since 0.10, the number of ranks before."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    return getattr(getattr(model, "config", None), "microbatch_group_size_per_vp_stage", None)


class _Grid:
    """The ranks of the job, from the process groups that the call was given, else from ``parallel_state``."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self._given = kwargs.get("pg_collection")
        self._pipeline = getattr(kwargs.get("p2p_communicator"), "pp_group", None)
        self._state = sys.modules["megatron.core.parallel_state"]

    def place(self, axis: str) -> tuple[int, int]:
        """This process's rank along an axis, and the number of ranks along it."""
        group = self._group(axis)
        if group is not None:
            return group.rank(), group.size()
        words = AXES[axis]
        return getattr(self._state, f"get_{words}_rank")(), getattr(self._state, f"get_{words}_world_size")()

    def pipeline(self) -> list[int]:
        """Global ranks along the pipeline."""
        group = self._group("pp") or self._state.get_pipeline_model_parallel_group()
        group = group[0] if isinstance(group, list) else group  # 0.9 to 0.12: one for each encoder that feeds it
        return list(sys.modules["torch.distributed.distributed_c10d"].get_process_group_ranks(group))

    def _group(self, axis: str) -> Any:
        if axis == "pp" and self._pipeline is not None:
            return self._pipeline
        group = getattr(self._given, axis, None)
        return group if hasattr(group, "size") else None


def _say_facts(grid: _Grid, *, schedule: str, microbatches: int, chunks: int) -> None:
    say = RECORDER.fact
    places = {axis: grid.place(axis) for axis in ("pp", "tp", "dp")}
    (rank, ranks), members = places["pp"], grid.pipeline()
    say("framework", "megatron-core")
    say("framework_version", str(getattr(sys.modules["megatron.core"], "__version__", "")))
    say("schedule", schedule)
    say("microbatches", microbatches)
    say("vpp", chunks)
    say("coordinates", {axis: place for axis, (place, _) in places.items()})
    for axis, (_, size) in places.items():
        say(axis, size)
    say("stages", [chunk * ranks + rank for chunk in range(chunks)])
    say("stage_ranks", members * chunks)
