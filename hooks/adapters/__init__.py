"""Framework adapters: each names the stages, chunks and microbatches of one framework's pipeline.

An adapter is one file here and one line in :data:`ADAPTERS`: the framework's package, and the object that patches it.
The object is imported when the first module of the package has been executed; then, and after each further module of
the package, its ``install(name)`` is called. ``uninstall()`` is equal and opposite.
"""

from __future__ import annotations

import importlib
import os
from typing import Protocol

from ppdiag.rundir import ADAPTERS_VARIABLE

ADAPTERS: dict[str, str] = {
    "deepspeed.runtime.pipe": "ppdiag.hooks.adapters.deepspeed:ADAPTER",
    "megatron.core.pipeline_parallel": "ppdiag.hooks.adapters.megatron:ADAPTER",
    "torch.distributed.pipelining": "ppdiag.hooks.adapters.torch_pipelining:ADAPTER",
}
"""``package: "module:object"``; the standard library's notation of an entry point."""
if os.environ.get(ADAPTERS_VARIABLE) == "none":  # the universal layer works alone
    ADAPTERS.clear()


class Adapter(Protocol):
    """What a framework adapter offers."""

    def install(self, name: str) -> None:
        """Patch what there is to patch in the package's module of this name, which has just been executed."""

    def uninstall(self) -> None:
        """Undo all that was installed."""


def load(name: str) -> Adapter:
    """The adapter of this package."""
    module, _, attribute = ADAPTERS[name].partition(":")
    adapter: Adapter = getattr(importlib.import_module(module), attribute)
    return adapter
