"""Forward and microbatch of code that no adapter names, from calls of root modules and gaps between messages.

Active once a message was posted outside every adapter. Then a call of a module that no other module called is (part of)
a forward; consecutive ones with no message and no backward between them are one forward (a loss after the model). Where
a loop calls no modules at all, the time from the last wait, backward or optimizer step to the send of an activation, or
to the start of a backward, is the forward. A backward is the autograd engine's (``autograd``).

All spans found here carry ``Flag.INFERRED`` and no stage: the analysis finds that from the peers.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, deque
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import guard, optimizer, process_group
from ppdiag.hooks.device import HostSpan
from ppdiag.hooks.patching import Patches
from ppdiag.hooks.recorder import RECORDER, Tail, compute_tail, known_thread, thread_state
from ppdiag.model import NONE, Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

PROBE = "modules"
SHORTEST_FORWARD_NS = 50_000
"""A gap between two messages shorter than this is the cost of the calls, not a forward in plain tensor code."""
_PEER_AT, _KIND_AT = 4, 12
"""Positions of peer and kind in a tail."""
_INFERRED = int(Flag.INFERRED)
"""A plain int: arithmetic on enums takes ten times as long."""
RAISED = object()

_patches = Patches()


@dataclass
class _Forward:
    """A forward that later module calls may still extend."""

    root: int
    label: tuple[int, int]
    """(microbatch, chunk)."""
    start_ns: int
    end_ns: int
    flags: int
    begin: Any = None
    """The device's moments of begin and end, where there is a device."""
    end: Any = None


@dataclass
class _Backward:
    """A running backward; a hook in the graph of the forward's output fills in the label."""

    start_ns: int
    label: tuple[int, int] | None = None
    begin: Any = None
    """The device's moment of the begin, where there is a device."""


class Inference:
    """Finds forwards and backwards in the order of events of one rank."""

    def __init__(self) -> None:
        self.in_use = False
        """A message was posted outside every adapter."""
        self._open: _Forward | None = None
        self._forward_seen = False
        """Since the last wait, backward, optimizer step or sent activation."""
        self._activation_waits = False
        """An activation was received, and its forward has not been seen."""
        self._roles: dict[int, int] = {}
        """Peer -> kind of the first message with it: what is sent to a peer so known by a send is an activation."""
        self._shapes: Counter[int] = Counter()
        """Peer -> receives of whole numbers, which no activation is, that have not been waited for."""
        self._backward_seen = False
        """Since the last wait or optimizer step."""
        self._sent = False
        """The last event was the send of an activation."""
        self._boundary_ns = 0
        self._boundary_mark: Any = None
        self._chunks: dict[int, int] = {}
        self._microbatches: dict[int, int] = {}
        self._outstanding: deque[tuple[int, int]] = deque(maxlen=4096)
        self._running: _Backward | None = None

    def new_step(self) -> None:
        """Microbatches are counted from 0 in each step, and chunks in the order of their first forward in it."""
        self._chunks.clear()
        self._microbatches.clear()
        self._outstanding.clear()

    def message(self, kind: int, tensor: Any, peer: int = NONE) -> None:
        """A message is about to be posted."""
        if not self.in_use:
            self.in_use = True
            install_module_calls()
        if thread_state().depth or _in_backward():
            return
        self.close()
        self._roles.setdefault(peer, kind)
        if kind == Kind.RECV and not tensor.is_floating_point():
            self._shapes[peer] += 1
        if self._chunks:  # a loop whose forwards are module calls: a send without one is a second message of a forward
            return
        if kind == Kind.RECV:
            if self._activation_waits and self._is_long():
                self._gap(None)
        elif not self._forward_seen and self._is_activation(tensor, peer):
            self._gap(tensor)
            self._boundary(perf_counter_ns())
            self._sent = True

    def waited(self, end_ns: int, tails: Sequence[Tail] = ()) -> None:
        """A wait for these messages has ended."""
        if thread_state().depth == 0:
            self.close()
            self._boundary(end_ns)
            self._backward_seen = False
            for tail in tails:
                if tail[_KIND_AT] != Kind.RECV:
                    continue
                peer = tail[_PEER_AT]
                if self._shapes[peer]:
                    self._shapes[peer] -= 1
                elif self._roles.get(peer) == Kind.RECV:
                    self._activation_waits = True

    def optimized(self, end_ns: int) -> None:
        """The outermost optimizer step has ended."""
        self.close()
        self._boundary(end_ns)
        self._backward_seen = False

    def backward_begins(self) -> _Backward:
        """The engine starts on this thread."""
        self.close()
        if RECORDER.step_ended:
            RECORDER.begin_step()
        # An activation came and no module was called since, or no forward is there that this could be the backward of:
        # the forward was plain tensor code, since the last wait.
        unseen = self._activation_waits or not (self._outstanding or self._forward_seen or self._backward_seen)
        if self.in_use and unseen and not self._chunks:
            self._gap(None)
        self._running = run = _Backward(perf_counter_ns())
        tail = self._tail(Kind.BACKWARD, run.start_ns, (NONE, NONE), 0)
        RECORDER.inside_start_ns, RECORDER.inside = run.start_ns, tail
        if RECORDER.instruments is not None:
            run.begin = RECORDER.instruments.begin(tail)
        return run

    def backward_ends(self, run: _Backward, *, failed: bool) -> None:
        """The engine is done."""
        end_ns = perf_counter_ns()
        RECORDER.inside = self._running = None
        label = run.label or (self._outstanding[0] if self._outstanding else (NONE, NONE))
        with contextlib.suppress(ValueError):
            self._outstanding.remove(label)
        tail = self._tail(Kind.BACKWARD, run.start_ns, label, Flag.FAILED if failed else 0)
        if RECORDER.instruments is not None:
            RECORDER.instruments.end(run.begin, HostSpan(run.start_ns, end_ns, (tail,)))
        else:
            RECORDER.append((run.start_ns, end_ns, tail))
        self._boundary(end_ns)
        self._backward_seen = True

    def module_begins(self, module: Any) -> None:
        """A root module is called."""
        if self._open is not None and self._open.root == id(module):
            self.close()  # the same stage again: the next microbatch
        if self._open is None:
            if RECORDER.step_ended:
                RECORDER.begin_step()
            chunk = self._chunks.setdefault(id(module), len(self._chunks))
            now = perf_counter_ns()
            self._open = _Forward(id(module), self._next_label(chunk), now, now, _evaluation_flag())
        opened = self._open
        tail = self._tail(Kind.FORWARD, opened.start_ns, opened.label, opened.flags)
        RECORDER.inside_start_ns, RECORDER.inside = opened.start_ns, tail
        if RECORDER.instruments is not None:
            mark = RECORDER.instruments.begin(tail)
            if opened.end_ns == opened.start_ns:
                opened.begin = mark
            else:
                RECORDER.instruments.drop(mark)

    def module_ends(self, output: Any) -> None:
        """The root module has returned ``output``, or raised (then it is ``RAISED``)."""
        RECORDER.inside = None
        opened = self._open
        if opened is not None:
            opened.end_ns = perf_counter_ns()
            if RECORDER.instruments is not None:
                tail = self._tail(Kind.FORWARD, opened.start_ns, opened.label, opened.flags)
                RECORDER.instruments.drop(opened.end)
                opened.end = RECORDER.instruments.leave(tail)
            self._follow(_first_tensor(output), opened.label)
            if output is RAISED:
                opened.flags |= Flag.FAILED

    def close(self) -> None:
        """The forward that is open, if any, has ended where its last module call did."""
        opened, self._open = self._open, None
        if opened is None:
            return
        tail = self._tail(Kind.FORWARD, opened.start_ns, opened.label, opened.flags)
        if RECORDER.instruments is not None:
            RECORDER.instruments.keep(opened.begin, opened.end, HostSpan(opened.start_ns, opened.end_ns, (tail,)))
        else:
            RECORDER.append((opened.start_ns, opened.end_ns, tail))
        self._forward_seen = True
        self._activation_waits = False
        if not opened.flags & Flag.EVALUATION:
            self._outstanding.append(opened.label)

    def _is_activation(self, tensor: Any, peer: int) -> bool:
        if not tensor.is_floating_point():
            return False
        if tensor.requires_grad:
            return not self._sent or self._is_long()
        if tensor.numel() == 1:  # a loss, or DeepSpeed's engine trying its connections
            return False
        if peer != NONE:
            return self._roles[peer] == Kind.SEND and self._is_long()
        return bool(_evaluation_flag()) and not self._backward_seen

    def _is_long(self) -> bool:
        """Whether there was time for a forward since the last event: several tensors may be sent for one."""
        return not self._boundary_ns or perf_counter_ns() - self._boundary_ns >= SHORTEST_FORWARD_NS

    def _gap(self, output: Any) -> None:
        """The forward is the time since the last event."""
        if RECORDER.step_ended:
            RECORDER.begin_step()
        end_ns = perf_counter_ns()
        label = self._next_label(0)
        flags = _evaluation_flag()
        self._open = _Forward(0, label, self._boundary_ns or end_ns, end_ns, flags)
        if RECORDER.instruments is not None:
            self._open.begin, self._boundary_mark = self._boundary_mark, None
            self._open.end = RECORDER.instruments.mark()
        self._follow(output, label)
        self.close()

    def _next_label(self, chunk: int) -> tuple[int, int]:
        microbatch = self._microbatches.get(chunk, 0)
        self._microbatches[chunk] = microbatch + 1
        return microbatch, chunk

    def _boundary(self, end_ns: int) -> None:
        self._boundary_ns = end_ns
        self._forward_seen = self._sent = False
        if self.in_use and RECORDER.instruments is not None:
            RECORDER.instruments.drop(self._boundary_mark)
            self._boundary_mark = RECORDER.instruments.mark()

    def _follow(self, tensor: Any, label: tuple[int, int]) -> None:
        """Have the graph say which forward a backward belongs to, when it comes to this tensor's node."""
        node = getattr(tensor, "grad_fn", None)
        if node is None:
            return

        def name_backward(_gradients: Any) -> None:
            if self._running is not None and self._running.label is None:
                self._running.label = label

        node.register_prehook(name_backward)

    def _tail(self, kind: Kind, start_ns: int, label: tuple[int, int], flags: int) -> Any:
        microbatch, chunk = label
        flags |= thread_state().flags | _INFERRED
        return compute_tail(kind, start_ns, (microbatch, NONE, chunk), flags)


INFERENCE = Inference()


def install() -> None:
    """Listen to the other probes; module calls are patched when the first message is posted outside every adapter."""
    if INFERENCE.message in process_group.before_post:
        return
    guard.register(PROBE, uninstall)
    process_group.before_post.append(INFERENCE.message)
    process_group.after_wait.append(INFERENCE.waited)
    optimizer.after_step.append(INFERENCE.optimized)
    RECORDER.on_step.append(INFERENCE.new_step)
    RECORDER.on_finish.append(INFERENCE.close)


def uninstall() -> None:
    """Stop listening, and put ``Module.__call__`` back."""
    _patches.restore()
    pairs: tuple[tuple[list[Any], Any], ...] = (
        (process_group.before_post, INFERENCE.message),
        (process_group.after_wait, INFERENCE.waited),
        (optimizer.after_step, INFERENCE.optimized),
        (RECORDER.on_step, INFERENCE.new_step),
        (RECORDER.on_finish, INFERENCE.close),
    )
    for listeners, function in pairs:
        if function in listeners:
            listeners.remove(function)
    INFERENCE.__init__()  # type: ignore[misc]


def install_module_calls() -> None:
    """Patch ``torch.nn.Module.__call__``."""
    torch = sys.modules["torch"]
    if not _patches:
        owner = torch.nn.Module
        _patches.replace(owner, "__call__", _call(vars(owner)["__call__"], torch.compiler.is_compiling))


def _call(original: Any, is_compiling: Any) -> Any:
    recorder, inference = RECORDER, INFERENCE

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = known_thread() or thread_state()
        if state.depth or state.named or not recorder.active or is_compiling() or _is_recomputed():
            return original(self, *args, **kwargs)
        state.depth = 1
        output = RAISED
        try:
            _guarded(inference.module_begins, self)
            output = original(self, *args, **kwargs)
        finally:
            state.depth = 0
            _guarded(inference.module_ends, output)
        return output

    call.__name__ = call.__qualname__ = "__call__"
    return call


def _guarded(function: Any, argument: Any) -> None:
    try:
        function(argument)
    except Exception as error:
        guard.failed(PROBE, error)


def _is_recomputed() -> bool:
    """Within a backward, where no forward begins; so where that cannot be told."""
    try:
        return _in_backward()
    except Exception as error:
        guard.failed(PROBE, error)
        return True


def _in_backward() -> bool:
    """Within a backward: a recomputed forward (checkpointing) is part of it."""
    return bool(sys.modules["torch"]._C._current_graph_task_id() != -1)


def _evaluation_flag() -> int:
    return 0 if sys.modules["torch"].is_grad_enabled() else Flag.EVALUATION


def _first_tensor(output: Any) -> Any:
    """The first tensor with a graph in what a module returned."""
    if isinstance(output, (tuple, list)):
        return next((tensor for tensor in map(_first_tensor, output) if tensor is not None), None)
    if isinstance(output, dict):
        return _first_tensor(list(output.values()))
    return output if getattr(output, "grad_fn", None) is not None else None
