"""Backward of any code: an instance of a subclass in the place of the autograd engine, through which every one goes.

``Tensor.backward``, ``autograd.grad`` and direct calls of the engine all look up ``Variable._execution_engine``.
"""

from __future__ import annotations

import sys
from typing import Any

from ppdiag.hooks import guard
from ppdiag.hooks.modules import INFERENCE
from ppdiag.hooks.patching import Patches
from ppdiag.hooks.recorder import RECORDER, known_thread, thread_state

PROBE = "autograd"
MODULE = "torch.autograd.variable"

_patches = Patches()


def install() -> None:
    """Replace the engine. ``torch.autograd.variable`` must have been imported."""
    module, torch = sys.modules.get(MODULE), sys.modules.get("torch")
    if module is None or _patches:
        return
    variable = module.Variable
    guard.register(PROBE, uninstall)
    base = type(variable._execution_engine)
    engine = type(base.__name__, (base,), {"run_backward": _run_backward(base.run_backward, torch)})
    _patches.replace(variable, "_execution_engine", engine())


def uninstall() -> None:
    """Put the original engine back."""
    _patches.restore()


def _run_backward(original: Any, torch: Any) -> Any:
    recorder, graph_task = RECORDER, torch._C._current_graph_task_id

    def run_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (recorder.active or recorder.start()):
            return original(self, *args, **kwargs)
        state = known_thread() or thread_state()
        # A backward within a backward (checkpointing; on CUDA in another thread) is part of the outer one.
        if state.named or state.flags or graph_task() != -1:
            return original(self, *args, **kwargs)
        run = None
        try:
            run = INFERENCE.backward_begins()
        except Exception as error:
            guard.failed(PROBE, error)
        failed = True
        try:
            result = original(self, *args, **kwargs)
            failed = False
        finally:
            try:
                if run is not None:
                    INFERENCE.backward_ends(run, failed=failed)
            except Exception as error:
                guard.failed(PROBE, error)
        return result

    run_backward._torchdynamo_disable = True  # type: ignore[attr-defined]
    return run_backward
