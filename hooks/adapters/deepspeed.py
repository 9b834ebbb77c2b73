"""DeepSpeed's ``PipelineEngine`` (0.14 to 0.19, DualPipeV too): names what its instructions do.

The engine calls its instructions through the class attribute ``_INSTRUCTION_MAP``, which holds the functions that were
in the class when it was made: wrapping ``_exec_forward_pass`` has no effect. So each batch runs with a map of its own,
an attribute of the instance for as long as the call lasts. That covers subclasses with maps and instructions of theirs.

An instruction names a buffer, which is used again for later microbatches: these are counted.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import guard, process_group
from ppdiag.hooks.adapters import brackets
from ppdiag.hooks.recorder import RECORDER, known_thread, thread_state
from ppdiag.model import Flag, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Callable

PROBE = "deepspeed"
ENGINE_MODULE = "deepspeed.runtime.pipe.engine"
MESSAGES = {
    "RecvActivation": int(Payload.ACTIVATION),
    "SendActivation": int(Payload.ACTIVATION),
    "RecvGrad": int(Payload.GRADIENT),
    "SendGrad": int(Payload.GRADIENT),
}
"""Name of an instruction -> what it sends or receives."""
DUAL_PIPE_V = "DualPipeVEngine"
_FORWARD, _BACKWARD = int(Kind.FORWARD), int(Kind.BACKWARD)


@dataclass
class _Batch:
    """One call of the engine: which microbatches it has come to."""

    stages: tuple[int, int]
    """Of this process, by phase: 1 is the way back of a V."""
    flags: int
    forwards: list[int] = field(default_factory=lambda: [0, 0])
    """Forwards so far, by phase."""
    receives: list[int] = field(default_factory=lambda: [0, 0])
    """Activations received so far, by phase."""
    buffers: dict[int, int] = field(default_factory=dict)
    """Buffer -> microbatch of the last forward in it."""


_wrappers = brackets.Wrappers(PROBE)
_batches: list[_Batch] = []
"""The batch that runs now; empty between two."""


class DeepSpeed:
    """The adapter."""

    def install(self, name: str) -> None:
        """Wrap the methods of the engine."""
        if name != ENGINE_MODULE:
            return
        guard.register(PROBE, self.uninstall)
        engine = sys.modules[name].PipelineEngine
        if not isinstance(vars(engine).get("_INSTRUCTION_MAP"), dict):
            _wrappers.switch_off("PipelineEngine has no _INSTRUCTION_MAP")
            return
        _wrappers.wrap(engine, ["__init__"], _make)
        _wrappers.wrap(engine, ["train_batch"], lambda original: _batch(original, 0))
        _wrappers.wrap(engine, ["eval_batch"], lambda original: _batch(original, int(Flag.EVALUATION)))
        _wrappers.wrap(engine, ["_send_tensor_meta", "_recv_tensor_meta"], _shapes, optional=True)

    def uninstall(self) -> None:
        """Put everything back."""
        _wrappers.restore()
        _batches.clear()


ADAPTER = DeepSpeed()


def _make(original: Any) -> Any:
    """Wrapper of the constructor, which tries its connections: nothing is inferred from those messages."""

    def make(*args: Any, **kwargs: Any) -> Any:
        state = thread_state()
        state.named += 1
        try:
            return original(*args, **kwargs)
        finally:
            state.named -= 1

    return make


def _batch(original: Any, flags: int) -> Any:
    """Wrapper of ``train_batch`` and ``eval_batch``."""

    def batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _batches or not (RECORDER.active or RECORDER.start()):
            return original(self, *args, **kwargs)
        try:
            known = _begin_batch(self, flags)
            instructions = {command: _instruction(run, command.__name__) for command, run in _map_of(self).items()}
        except Exception as error:
            guard.failed(PROBE, error)
            return original(self, *args, **kwargs)
        _batches.append(known)
        self.__dict__["_INSTRUCTION_MAP"] = instructions
        try:
            return brackets.run_schedule(PROBE, flags, original, (self, *args), kwargs)
        finally:
            self.__dict__.pop("_INSTRUCTION_MAP", None)
            _batches.clear()

    return batch


def _map_of(engine: Any) -> dict[type, Callable[..., Any]]:
    return dict(engine._INSTRUCTION_MAP)


def _begin_batch(engine: Any, flags: int) -> _Batch:
    _say_facts(engine)
    return _Batch((engine.stage_id, 2 * engine.num_stages - 1 - engine.stage_id), flags)


def _instruction(original: Any, name: str) -> Any:
    """Wrapper of one instruction, called as a method of the engine with a buffer, and with a phase where it is a V."""
    if name == "ForwardPass":
        return _forward(original)
    if name == "BackwardPass":
        return _backward(original)
    if name in MESSAGES:
        return _messages(original, name, MESSAGES[name])
    return original


def _forward(original: Any) -> Any:
    """A forward meets its microbatch first: the next one of its phase."""
    batches, run = _batches, brackets.run

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            batch, phase = batches[-1], kwargs.get("phase", 0)
            microbatch = batch.forwards[phase]
            batch.forwards[phase] = microbatch + 1
            batch.buffers[args[1] if len(args) > 1 else kwargs["buffer_id"]] = microbatch
            label = (microbatch, batch.stages[phase], phase, 0, batch.flags)
        except Exception as error:
            guard.failed(PROBE, error)
            return original(*args, **kwargs)
        return run(PROBE, _FORWARD, label, original, args, kwargs)

    return forward


def _backward(original: Any) -> Any:
    """A backward finds its microbatch in its buffer."""
    batches, run = _batches, brackets.run

    def backward(*args: Any, **kwargs: Any) -> Any:
        try:
            batch, phase = batches[-1], kwargs.get("phase", 0)
            microbatch = batch.buffers[args[1] if len(args) > 1 else kwargs["buffer_id"]]
            label = (microbatch, batch.stages[phase], phase, 0, batch.flags)
        except Exception as error:
            guard.failed(PROBE, error)
            return original(*args, **kwargs)
        return run(PROBE, _BACKWARD, label, original, args, kwargs)

    return backward


def _messages(original: Any, name: str, payload: int) -> Any:
    """Wrapper of a send or a receive: all that is posted in it, and all that it queues for ``CommitP2P``, is named."""
    batches, labels, counted = _batches, process_group.labels, name == "RecvActivation"

    def messages(*args: Any, **kwargs: Any) -> Any:
        state = known_thread() or thread_state()
        try:
            batch, phase = batches[-1], kwargs.get("phase", 0)
            if counted:  # before the forward
                microbatch = batch.receives[phase]
                batch.receives[phase] = microbatch + 1
            else:
                microbatch = batch.buffers[args[1] if len(args) > 1 else kwargs["buffer_id"]]
            label = (microbatch, batch.stages[phase], phase, payload, batch.flags)
            queue = args[0].__dict__.get("_p2p_ops")
            queued = len(queue) if queue else 0
        except Exception as error:
            guard.failed(PROBE, error)
            return original(*args, **kwargs)
        state.message = label
        try:
            return original(*args, **kwargs)
        finally:
            state.message = None
            if queue:
                for operation in queue[queued:]:
                    labels[id(operation.tensor)] = label

    return messages


def _shapes(original: Any) -> Any:
    """Wrapper of the exchange of shapes, in the first batch, or before each message where they vary: no payload."""

    def exchange(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = thread_state()
        before = state.message
        if before is not None:
            state.message = (*before[:3], int(Payload.UNKNOWN), before[4])
        try:
            return original(self, *args, **kwargs)
        finally:
            state.message = before

    return exchange


def _say_facts(engine: Any) -> None:
    say, grid, dual = RECORDER.fact, engine.grid, _is_dual(engine)
    chunks, ranks, rank = 2 if dual else 1, engine.num_stages, engine.stage_id
    members = [grid.stage_to_global(stage) for stage in range(ranks)]
    say("framework", "deepspeed")
    say("framework_version", str(getattr(sys.modules["deepspeed"], "__version__", "")))
    say("schedule", "DualPipeV" if dual else "1F1B")
    say("microbatches", engine.micro_batches)
    say("pp", ranks)
    say("vpp", chunks)
    say("tp", grid.get_slice_parallel_world_size())
    say("dp", grid.get_data_parallel_world_size())
    coordinates = {"pp": rank, "tp": grid.get_slice_parallel_rank(), "dp": grid.get_data_parallel_rank()}
    say("coordinates", coordinates)
    say("stages", [rank, 2 * ranks - 1 - rank] if dual else [rank])
    say("stage_ranks", members + members[::-1] if dual else members)


def _is_dual(engine: Any) -> bool:
    return any(parent.__name__ == DUAL_PIPE_V for parent in type(engine).__mro__)
