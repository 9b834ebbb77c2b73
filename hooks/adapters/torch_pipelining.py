"""``torch.distributed.pipelining`` (2.8 to 2.14): names the work of its stages and the messages between them.

Patched are only methods whose names and meaning were the same in all these versions; the tracer's stages share them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import weakref
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import guard, process_group
from ppdiag.hooks.adapters import brackets
from ppdiag.hooks.device import HostSpan
from ppdiag.hooks.recorder import RECORDER, Tail, compute_tail, known_thread, thread_state, with_flag
from ppdiag.model import NONE, Flag, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.hooks.instruments import Instruments

PROBE = "torch.distributed.pipelining"
STAGE_MODULE = "torch.distributed.pipelining.stage"
SCHEDULES_MODULE = "torch.distributed.pipelining.schedules"
SHORTEST_INITIALISATION_NS = 50_000
"""The initialiser is called in every step and returns in some 5 us where nothing is left to do: no bracket then."""
_MOST_LABELS = 4096
"""More than any schedule prepares at a time; beyond it, they are of messages that were never posted."""
_KINDS = {
    "forward_one_chunk": Kind.FORWARD,
    "backward_one_chunk": Kind.BACKWARD,
    "backward_weight_one_chunk": Kind.WEIGHT,
}
_PAYLOADS = {
    "get_fwd_recv_ops": Payload.ACTIVATION,
    "get_fwd_send_ops": Payload.ACTIVATION,
    "get_bwd_recv_ops": Payload.GRADIENT,
    "get_bwd_send_ops": Payload.GRADIENT,
}

_DATA_PARALLEL = ("dp", "fsdp", "hsdp", "replicate", "shard")
"""How the dimensions of a mesh that hold replicas are called, at the beginning of their names."""
_NO_LABEL = (NONE, NONE, NONE)
_SCHEDULE = int(Kind.SCHEDULE)
_INIT, _EVALUATION, _FAILED = int(Flag.INIT), int(Flag.EVALUATION), int(Flag.FAILED)
"""Plain ints: arithmetic on enums takes ten times as long."""
_FORWARD_PARAMETERS = ("self", "fwd_chunk_id", "args", "kwargs", "save_forward_output"), (None, True)
_BACKWARD_PARAMETERS = ("self", "bwd_chunk_id", "loss", "full_backward", "last_backward"), (None, True, False)
"""Names and defaults, since 2.10 and in all versions."""

_wrappers = brackets.Wrappers(PROBE)
_chunks: dict[int, tuple[int, bool]] = {}
"""Stage index -> (index among the stages of this rank, in the order in which its schedule lists them; is it the last
one of the pipeline)."""
_NO_CHUNK = (0, False)
_schedule: list[weakref.ref[Any]] = []
"""The schedule that ran last: its facts are said. Not its id, which the next one may get."""
_held: dict[int, tuple[int, int, Tail, tuple[Instruments, Any, Any] | None]] = {}
"""Thread -> (start, end, tail, instruments and the device's begin and end) of a forward of the last stage, whose loss
is still to come and belongs to it."""


class TorchPipelining:
    """The adapter."""

    def install(self, name: str) -> None:
        """Patch the classes of the two modules that have some."""
        guard.register(PROBE, self.uninstall)
        if name == STAGE_MODULE:
            owner = sys.modules[name]._PipelineStageBase
            for method, kind in _KINDS.items():
                _wrappers.wrap(owner, [method], functools.partial(_compute, kind=kind))
            for method, payload in _PAYLOADS.items():
                _wrappers.wrap(owner, [method], functools.partial(_label, payload=payload))
        elif name == SCHEDULES_MODULE:
            module = sys.modules[name]
            _wrappers.wrap(module.PipelineScheduleSingle, ["step"], _step)
            _wrappers.wrap(module.PipelineScheduleMulti, ["step"], _step)
            _wrappers.wrap(module.PipelineScheduleSingle, ["_initialize_stage"], _initialize, optional=True)
            _wrappers.wrap(module.PipelineScheduleMulti, ["_initialize_stages"], _initialize, optional=True)
            _wrappers.wrap(module._PipelineSchedule, ["_maybe_compute_loss"], _loss, optional=True)

    def uninstall(self) -> None:
        """Undo all patches."""
        _wrappers.restore()
        _chunks.clear()
        _schedule.clear()
        _held.clear()


ADAPTER = TorchPipelining()


def _compute(original: Any, kind: Kind) -> Any:
    """Wrapper of ``forward_one_chunk``, ``backward_one_chunk`` and ``backward_weight_one_chunk``.

    It has the parameters of the original where they are those that we know: to pass on ``*args, **kwargs`` takes as
    long as all the rest.
    """
    parameters = _parameters(original)
    if parameters == _FORWARD_PARAMETERS:
        forward = _bracket(original, kind)

        def forward_one_chunk(
            self: Any, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: Any = True
        ) -> Any:
            return forward(self, fwd_chunk_id, args, kwargs, save_forward_output)

        return forward_one_chunk
    if parameters == _BACKWARD_PARAMETERS:
        backward = _bracket(original, kind)

        def backward_one_chunk(
            self: Any, bwd_chunk_id: int, loss: Any = None, full_backward: Any = True, last_backward: Any = False
        ) -> Any:
            return backward(self, bwd_chunk_id, loss, full_backward, last_backward)

        return backward_one_chunk
    compute = _bracket(lambda stage, _, args, kwargs, __: original(stage, *args, **kwargs), kind)

    def any_one_chunk(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compute(self, args[0] if args else _chunk_id(kwargs), args, kwargs, None)

    return any_one_chunk


def _parameters(function: Any) -> tuple[tuple[str, ...], tuple[Any, ...]] | None:
    """Names of a function's parameters, and the defaults of the last ones; None where it has others than plain ones.

    Another tool's wrapper may take more than the method whose signature it claims.
    """
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    if any(parameter.kind != inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
        return None
    defaults = (parameter.default for parameter in parameters)
    return tuple(p.name for p in parameters), tuple(d for d in defaults if d is not inspect.Parameter.empty)


def _bracket(original: Any, kind: Kind) -> Any:
    """A call of a stage's method, with the stage, the microbatch and three more arguments."""
    recorder, held, chunks, clock = RECORDER, _held, _chunks, perf_counter_ns
    code, is_forward = int(kind), kind == Kind.FORWARD

    def bracket(self: Any, microbatch: int, first: Any, second: Any, third: Any) -> Any:
        # schedule.eval calls the backward too, which returns at once
        if not (recorder.active or recorder.start()) or not (is_forward or getattr(self, "has_backward", True)):
            return original(self, microbatch, first, second, third)
        state = known_thread() or thread_state()
        try:
            if recorder.step_ended:
                recorder.begin_step()
            if held:
                _release(state.number)
            index, flags = self.stage_index, state.flags if self.has_backward else state.flags | _EVALUATION
            (chunk, is_last), step, thread = chunks.get(index, _NO_CHUNK), recorder.step, state.number
            start_ns = clock()
            tail = (start_ns, 0, step, NONE, NONE, 0, microbatch, index, chunk, NONE, thread, flags, code, 0)
        except Exception as error:
            guard.failed(PROBE, error)
            return original(self, microbatch, first, second, third)
        state.named += 1
        recorder.inside_start_ns, recorder.inside = start_ns, tail
        instruments = recorder.instruments
        begin = None if instruments is None else instruments.begin(tail)
        try:
            result = original(self, microbatch, first, second, third)
        except BaseException:
            _failed(start_ns, tail, begin)
            raise
        finally:
            state.named -= 1
            recorder.inside = None
        try:
            if is_last and is_forward:
                marks = None if instruments is None else (instruments, begin, instruments.leave(tail))
                held[state.number] = (start_ns, clock(), tail, marks)
            elif instruments is not None:
                instruments.end(begin, HostSpan(start_ns, clock(), (tail,)))
            else:
                recorder.append((start_ns, clock(), tail))
        except Exception as error:
            guard.failed(PROBE, error)
        return result

    return bracket


def _failed(start_ns: int, tail: Tail, mark: Any) -> None:
    """The framework's call has raised."""
    try:
        instruments = RECORDER.instruments
        if instruments is not None:
            instruments.drop(mark)
            instruments.drop(instruments.leave(tail))
        RECORDER.append((start_ns, perf_counter_ns(), with_flag(tail, Flag.FAILED)))
    except Exception as error:
        guard.failed(PROBE, error)


def _chunk_id(kwargs: dict[str, Any]) -> Any:
    return next((value for name, value in kwargs.items() if name.endswith("_chunk_id")), NONE)


def _release(thread: int, end_ns: int = 0, flag: int = 0) -> None:
    """Append the forward that this thread holds back, if any; with ``end_ns`` where its loss ended later."""
    held = _held.pop(thread, None)
    if held is None:
        return
    start_ns, forward_end_ns, tail, marks = held
    tail = with_flag(tail, flag) if flag else tail
    if marks is None:
        RECORDER.append((start_ns, end_ns or forward_end_ns, tail))
        return
    instruments, begin, end = marks
    if end_ns:
        instruments.drop(end)
        end = instruments.mark()
    instruments.keep(begin, end, HostSpan(start_ns, end_ns or forward_end_ns, (tail,)))


def _loss(original: Any) -> Any:
    """Wrapper of ``_maybe_compute_loss``: a loss over a large vocabulary is work of the last stage's forward."""

    def maybe_compute_loss(*args: Any, **kwargs: Any) -> Any:
        if not _held:
            return original(*args, **kwargs)
        flag = _FAILED
        try:
            result = original(*args, **kwargs)
            flag = 0
        finally:
            try:
                _release(thread_state().number, perf_counter_ns(), flag)
            except Exception as error:
                guard.failed(PROBE, error)
        return result

    return maybe_compute_loss


def _label(original: Any, payload: Payload) -> Any:
    """Wrapper of ``get_*_ops``: the tensors of these ops are about to be posted, for this stage and microbatch."""
    recorder, labels, chunks, code = RECORDER, process_group.labels, _chunks, int(payload)

    def get_ops(self: Any, chunk_id: Any = NONE, **named: Any) -> Any:
        if named or chunk_id == NONE:
            ops, chunk_id = original(self, **named), _chunk_id(named)
        else:
            ops = original(self, chunk_id)
        if ops and recorder.active:
            try:
                index, flags = self.stage_index, 0 if self.has_backward else _EVALUATION
                label = (chunk_id, index, chunks.get(index, _NO_CHUNK)[0], code, flags)
                for op in ops:
                    labels[id(op.tensor)] = label
            except Exception as error:
                guard.failed(PROBE, error)
        return ops

    return get_ops


def _step(original: Any) -> Any:
    """Wrapper of ``schedule.step``."""
    recorder = RECORDER

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (recorder.active or recorder.start()):
            return original(self, *args, **kwargs)
        try:
            tail = _begin_step(self)
        except Exception as error:
            guard.failed(PROBE, error)
            return original(self, *args, **kwargs)
        state, instruments = thread_state(), recorder.instruments
        begin = None if instruments is None else instruments.begin(tail)
        state.named += 1
        flag = _FAILED
        try:
            result = original(self, *args, **kwargs)
            flag = 0
        finally:
            state.named -= 1
            try:
                if _held:
                    _release(state.number)
                end_ns, ended = perf_counter_ns(), with_flag(tail, flag) if flag else tail
                if instruments is not None:
                    instruments.end(begin, HostSpan(tail[0], end_ns, (ended,)))
                else:
                    recorder.append((tail[0], end_ns, ended))
                recorder.pipeline_ended()
            except Exception as error:
                guard.failed(PROBE, error)
        return result

    return step


def _begin_step(schedule: Any) -> Tail:
    if RECORDER.step_ended:
        RECORDER.begin_step()
    if len(process_group.labels) > _MOST_LABELS:
        process_group.labels.clear()
    if not _schedule or _schedule[0]() is not schedule:
        _schedule[:] = [weakref.ref(schedule)]
        _say_facts(schedule)
    flags = thread_state().flags | (0 if getattr(schedule, "_has_backward", True) else _EVALUATION)
    return compute_tail(_SCHEDULE, perf_counter_ns(), _NO_LABEL, flags)


def _say_facts(schedule: Any) -> None:
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    _chunks.clear()
    _chunks.update({stage.stage_index: (chunk, stage.is_last) for chunk, stage in enumerate(stages)})
    distributed = sys.modules["torch.distributed.distributed_c10d"]
    members = distributed.get_process_group_ranks(stages[0].group or distributed.GroupMember.WORLD)
    placement = stages[0].stage_index_to_group_rank
    RECORDER.fact("framework", "torch.distributed.pipelining")
    RECORDER.fact("schedule", type(schedule).__name__.removeprefix("Schedule"))
    RECORDER.fact("microbatches", schedule._n_microbatches)
    RECORDER.fact("pp", stages[0].group_size)
    RECORDER.fact("vpp", len(stages))
    RECORDER.fact("stages", [stage.stage_index for stage in stages])
    RECORDER.fact("stage_ranks", [members[placement[index]] for index in sorted(placement)])
    with contextlib.suppress(Exception):  # stages are named without it
        _say_mesh(stages)


def _say_mesh(stages: Sequence[Any]) -> None:
    """The ranks that share a stage: from the device mesh of its parameters, where there is one (FSDP2, tensors)."""
    parameters = (parameter for stage in stages for parameter in stage.submod.parameters())
    mesh = next((found for found in (getattr(p, "device_mesh", None) for p in parameters) if found is not None), None)
    if mesh is None or mesh.mesh_dim_names is None:
        return
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    RECORDER.fact("device_mesh", sizes)
    RECORDER.fact("tp", sizes.get("tp", 1))
    RECORDER.fact("dp", math.prod(size for name, size in sizes.items() if name.startswith(_DATA_PARALLEL)))


def _initialize(original: Any) -> Any:
    """Wrapper of ``_initialize_stage(s)``: shape exchange, extra forwards and backwards, in step 1 and after eval."""

    def initialize(self: Any, *args: Any, **kwargs: Any) -> Any:
        state, start_ns = thread_state(), perf_counter_ns()
        before = state.flags
        state.flags = before | _INIT
        try:
            return original(self, *args, **kwargs)
        finally:
            try:
                end_ns = perf_counter_ns()
                if RECORDER.active and end_ns - start_ns > SHORTEST_INITIALISATION_NS:
                    tail = compute_tail(Kind.INIT, start_ns, _NO_LABEL, state.flags)
                    RECORDER.append((start_ns, end_ns, tail))
            except Exception as error:
                guard.failed(PROBE, error)
            state.flags = before

    return initialize
