"""What each layer of a stage takes, in a few sampled steps, where ``ppdiag run --layer-times`` asks for it.

A layer is a child of the list of blocks that is nearest to the stage's root module; with none, the root itself. Its
forward is the call of the module. Its backward begins when the autograd engine comes to the node of its output: a hook
of that node marks the moment, so that nothing is put into the graph. A layer that is recomputed (checkpointing) within
a backward is part of that backward.

While steps are sampled ``torch.nn.Module.__call__`` is patched; nothing is left in the user's modules.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from ppdiag.hooks import guard, modules
from ppdiag.hooks.device import HostSpan
from ppdiag.hooks.patching import Patches
from ppdiag.hooks.recorder import RECORDER, known_thread, thread_state
from ppdiag.model import NONE, Kind
from ppdiag.rundir import LAYER_TIMES_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.hooks.recorder import Tail

PROBE = "layer times"
SKIPPED_STEPS = 2
"""Recorded steps before the first sampled one: shapes are exchanged, memory is first allocated."""
SAMPLED_STEPS = 5
MOST_LAYERS = 4096
_LONGEST_NAME = 200
_LAYER, _FORWARD, _BACKWARD = int(Kind.LAYER), int(Kind.FORWARD), int(Kind.BACKWARD)

_patches = Patches()


class Named(NamedTuple):
    """A layer, and its name within the root module."""

    name: str
    module: Any


class _Begun(NamedTuple):
    """A call that runs: of a layer (its number), or of a root that is none."""

    number: int
    is_root: bool
    follows: bool
    """The first layer in a root: the gradient of its input ends its backward."""
    start_ns: int
    mark: Any


class _Thread(threading.local):
    """What the calling thread is inside of."""

    def __init__(self) -> None:
        self.in_root = self.in_layer = self.layer_seen = False


class LayerTimes:
    """Numbers the layers of this process and records their calls."""

    def __init__(self) -> None:
        self.sampling = False
        self._steps = 0
        self._numbers: dict[int, int] = {}
        """id of a module -> its number."""
        self._kept: list[Any] = []
        """The modules known by their id, so that no other gets it."""
        self._roots: set[int] = set()
        self._thread = _Thread()

    def new_step(self) -> None:
        """A recorded step begins: sample it, or no more."""
        try:
            self._steps += 1
            if SKIPPED_STEPS <= self._steps < SKIPPED_STEPS + SAMPLED_STEPS:
                self.sampling = True
                _patch()
            elif self._kept or self.sampling:
                self.sampling = False
                _patches.restore()
                self._numbers.clear()
                self._roots.clear()
                self._kept.clear()
        except Exception as error:
            guard.failed(PROBE, error)

    def begins(self, module: Any) -> _Begun | None:
        """A module is called; None where that is neither a root nor a layer, or a recomputation."""
        thread = self._thread
        if thread.in_layer or modules._in_backward():
            return None
        if thread.in_root:
            number = self._numbers.get(id(module), NONE)
            if number == NONE:
                return None
            follows, thread.layer_seen = not thread.layer_seen, True
            return self._begun(number, is_root=False, follows=follows)
        if (known_thread() or thread_state()).depth:  # within a root whose call began before this step was sampled
            return None
        if id(module) not in self._roots:
            self._number_layers(module)
        thread.in_root, thread.layer_seen = True, False
        return self._begun(self._numbers.get(id(module), NONE), is_root=True, follows=False)

    def ends(self, begun: _Begun) -> None:
        """The call that began has returned or raised."""
        if begun.is_root:
            self._thread.in_root = False
        if begun.number != NONE:
            self._thread.in_layer = False

    def record(self, begun: _Begun, inputs: Sequence[Any], output: Any) -> None:
        """The call has returned: its time, and the moments to come at which its backward begins and ends."""
        if begun.number == NONE:
            return
        instruments = RECORDER.instruments
        mark = None if instruments is None else instruments.mark()
        _append(begun.number, _FORWARD, begun=begun, end=mark)
        _mark_gradient(output, begun.number)
        if begun.follows:
            _mark_gradient(inputs, NONE)

    def _begun(self, number: int, *, is_root: bool, follows: bool) -> _Begun:
        mark = None
        if number != NONE:
            self._thread.in_layer = True
            instruments = RECORDER.instruments
            mark = None if instruments is None else instruments.mark()
        return _Begun(number, is_root, follows, perf_counter_ns(), mark)

    def _number_layers(self, root: Any) -> None:
        self._roots.add(id(root))
        self._kept.append(root)
        found = [row for row in layers_of(root) if id(row.module) not in self._numbers]
        first = len(self._numbers)
        if not found or first + len(found) > MOST_LAYERS:
            return
        for number, (_, module) in enumerate(found, start=first):
            self._numbers[id(module)] = number
            self._kept.append(module)
        names = [row.name[:_LONGEST_NAME] for row in found]
        RECORDER.lines.append({"type": "layers", "first": first, "root": type(root).__name__, "names": names})


LAYER_TIMES = LayerTimes()


def install() -> None:
    """Wait for the steps that are to be sampled, where the job asks for it."""
    if os.environ.get(LAYER_TIMES_VARIABLE) and LAYER_TIMES.new_step not in RECORDER.on_step:
        guard.register(PROBE, uninstall)
        RECORDER.on_step.append(LAYER_TIMES.new_step)


def uninstall() -> None:
    """Sample no more, and put ``Module.__call__`` back."""
    LAYER_TIMES.sampling = False
    _patches.restore()
    if LAYER_TIMES.new_step in RECORDER.on_step:
        RECORDER.on_step.remove(LAYER_TIMES.new_step)


def _patch() -> None:
    torch = sys.modules["torch"]
    if not _patches:
        owner = torch.nn.Module
        _patches.replace(owner, "__call__", _call(vars(owner)["__call__"], torch.compiler.is_compiling))


def _call(original: Any, is_compiling: Any) -> Any:
    recorder, layers = RECORDER, LAYER_TIMES

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not layers.sampling or not recorder.active or is_compiling():
            return original(self, *args, **kwargs)
        begun = _guarded(layers.begins, self)
        if begun is None:
            return original(self, *args, **kwargs)
        try:
            output = original(self, *args, **kwargs)
        finally:
            layers.ends(begun)
        _guarded(layers.record, begun, [*args, *kwargs.values()], output)
        return output

    call.__name__ = call.__qualname__ = "__call__"
    return call


def _guarded(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        guard.failed(PROBE, error)
        return None


def _append(number: int, op: int, *, begun: _Begun, end: Any) -> None:
    tail: Tail = (begun.start_ns, 0, RECORDER.step, number, NONE, 0, NONE, NONE, NONE, NONE, 0, 0, _LAYER, op)
    span = HostSpan(begun.start_ns, perf_counter_ns(), (tail,))
    if RECORDER.instruments is None:
        RECORDER.append((span.start_ns, span.end_ns, tail))
    else:
        RECORDER.instruments.keep(begun.mark, end, span)


def _mark_gradient(value: Any, number: int) -> None:
    """Record the moment at which the backward comes to this value, as a span of no length."""
    node = getattr(modules._first_tensor(value), "grad_fn", None)
    if node is None:
        return

    def moment(_gradients: Any) -> None:
        if LAYER_TIMES.sampling and RECORDER.active:
            _guarded(_moment, number)

    node.register_prehook(moment)


def _moment(number: int) -> None:
    instruments = RECORDER.instruments
    begin, end = (None, None) if instruments is None else (instruments.mark(), instruments.mark())
    _append(number, _BACKWARD, begun=_Begun(number, False, False, perf_counter_ns(), begin), end=end)


# -- which modules are layers ------------------------------------------------------------------------------------------


def layers_of(root: Any) -> list[Named]:
    """The layers of a stage's root module, in their order: the longest list of blocks that is nearest to the root.

    A list is a ``ModuleList``, a ``ModuleDict``, or any module with numbered children (``Sequential``, DeepSpeed's
    ``PipelineModule``); of the latter the most frequent class is taken, since embedding and head may stand beside. One
    of plain parts alone (a linear layer, an activation) counts only at the root: within a block it is the block's own.
    Without parameters there are none.
    """
    if not _learns(root):
        return []
    level, is_top = [Named("", root)], True
    while level:
        found = max((_listed(row, is_top=is_top) for row in level), key=len)
        if found:
            return found
        level = [child for row in level for child in _children(row)]
        is_top = is_top and len(level) == 1
    return [Named("", root)]


def _listed(row: Named, *, is_top: bool) -> list[Named]:
    """The layers of this module, where it is a list of blocks; else none."""
    nn = sys.modules["torch"].nn
    children = _children(row)
    if isinstance(row.module, (nn.ModuleList, nn.ModuleDict)):
        return children
    numbered = [child for child in children if child.name.rpartition(".")[2].isdigit()]
    blocks = [child for child in numbered if _children(child)]
    if not numbered or not (blocks or is_top):
        return []
    ((common, _),) = Counter(type(child.module) for child in blocks or numbered).most_common(1)
    return [child for child in numbered if type(child.module) is common]


def _children(row: Named) -> list[Named]:
    before = f"{row.name}." if row.name else ""
    return [Named(before + name, child) for name, child in row.module.named_children() if _learns(child)]


def _learns(module: Any) -> bool:
    return next(module.parameters(), None) is not None
