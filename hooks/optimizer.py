"""Calls of ``Optimizer.step``, through torch's own global hooks; the end of the outermost one ends a step."""

from __future__ import annotations

import sys
from time import perf_counter_ns
from typing import Any

from ppdiag.hooks import guard
from ppdiag.hooks.device import HostSpan
from ppdiag.hooks.recorder import RECORDER, Tail, compute_tail, thread_state
from ppdiag.model import NONE, Kind

PROBE = "optimizer"
MODULE = "torch.optim.optimizer"

after_step: list[Any] = []
"""Told the time (ns) at which the outermost optimizer ended."""
at_step_end: list[Any] = []
"""Called when that has ended a step, also while the recorder sleeps."""

_handles: list[Any] = []
_open: list[tuple[int, Tail, Any]] = []
"""(id of the optimizer, tail, mark) of the steps that run: optimizers nest (a container steps its members)."""
_OPTIMIZER = int(Kind.OPTIMIZER)
_NO_LABEL = (NONE, NONE, NONE)
_stepped: set[int] = set()
"""Ids of the optimizers that have ended in this step: one that ends again, while we sleep, ends another step."""


def install() -> None:
    """Register the hooks. ``torch.optim.optimizer`` must have been imported."""
    module = sys.modules.get(MODULE)
    if module is None or _handles:
        return
    guard.register(PROBE, uninstall)
    _handles.append(module.register_optimizer_step_pre_hook(_begin))
    _handles.append(module.register_optimizer_step_post_hook(_end))


def uninstall() -> None:
    """Remove the hooks."""
    while _handles:
        _handles.pop().remove()
    _open.clear()
    _stepped.clear()


def _begin(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if not (RECORDER.active or RECORDER.start()):
        return
    try:
        if _open and any(owner == id(optimizer) for owner, _, _ in _open):
            _open.clear()  # its last step raised, and never called the post hook
        if not _open:
            RECORDER.optimizer_begins()
        start_ns = perf_counter_ns()
        tail = compute_tail(_OPTIMIZER, start_ns, _NO_LABEL, thread_state().flags)
        instruments = RECORDER.instruments
        _open.append((id(optimizer), tail, None if instruments is None else instruments.begin(tail)))
        RECORDER.inside_start_ns, RECORDER.inside = start_ns, tail
    except Exception as error:
        guard.failed(PROBE, error)


def _end(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if not RECORDER.active:
        if at_step_end:
            _ended_asleep(id(optimizer))
        return
    if not _open:
        return
    try:
        end_ns = perf_counter_ns()
        # Those above it on the stack raised: they never called their post hook.
        if _open[-1][0] != id(optimizer) and all(owner != id(optimizer) for owner, _, _ in _open):
            return
        owner, tail, mark = _open.pop()
        while owner != id(optimizer):
            owner, tail, mark = _open.pop()
        RECORDER.inside = None
        if RECORDER.instruments is not None:
            RECORDER.instruments.end(mark, HostSpan(tail[0], end_ns, (tail,)))
        else:
            RECORDER.append((tail[0], end_ns, tail))
        if not _open:
            _ended(id(optimizer), end_ns)
    except Exception as error:
        guard.failed(PROBE, error)


def _ended(owner: int, end_ns: int) -> None:
    if not RECORDER.step_ended:
        _stepped.clear()
    _stepped.add(owner)
    RECORDER.step_ended = True
    for function in after_step:
        function(end_ns)
    RECORDER.optimizer_ended(end_ns)
    for function in at_step_end:
        function()


def _ended_asleep(owner: int) -> None:
    """Count a step of which nothing else was seen, as :func:`_ended` and the first op of the next step would."""
    try:
        if owner in _stepped or not RECORDER.step_ended:
            if RECORDER.step_ended:
                RECORDER.begin_step()
            RECORDER.step_ended = True
            _stepped.clear()
            for function in at_step_end:
                function()
        _stepped.add(owner)
    except Exception as error:
        guard.failed(PROBE, error)


# A compiled optimizer breaks its graph at its own hooks anyway; this is what torch.compiler.disable sets, without
# importing Dynamo: so the hooks run there as they are, instead of being traced to their first unsupported call.
for _hook in (_begin, _end):
    _hook._torchdynamo_disable = True  # type: ignore[attr-defined]
