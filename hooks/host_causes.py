"""Host time of known cause: pauses of the garbage collector, waits for the next batch, waits for the device."""

from __future__ import annotations

import functools
import gc
import sys
from time import perf_counter_ns
from typing import Any

from ppdiag.hooks import guard
from ppdiag.hooks.patching import Patches
from ppdiag.hooks.recorder import RECORDER, compute_tail
from ppdiag.model import NONE, Flag, HostCause, Kind

PROBE = "host_causes"
DATA_LOADER = "torch.utils.data.dataloader"
SHORTEST_NS = 100_000
"""Young generations are collected hundreds of times a second in tens of us, and a call that waits for a device which is
done takes some us: what is shorter is no cause of anything."""
SYNCHRONISING = (
    ("torch._C", "", "_cuda_synchronize"),
    ("torch._C", "", "_accelerator_synchronizeDevice"),
    ("torch.cuda.streams", "Stream", "synchronize"),
    ("torch.cuda.streams", "Event", "synchronize"),
)
"""(Module, class, function). Of ``torch.cuda.synchronize`` and ``torch.accelerator.synchronize`` what they call: users
may have bound those two before us, and Dynamo, which knows them by identity, goes on to put them into its graphs."""

_patches = Patches()
_device_patches = Patches()
_gc_start: dict[str, int] = {}


def install() -> None:
    """Listen to the collector; patch the DataLoader's iterator where it has been imported."""
    guard.register(PROBE, uninstall)
    if _collected not in gc.callbacks:
        gc.callbacks.append(_collected)
    owner = getattr(sys.modules.get(DATA_LOADER), "_BaseDataLoaderIter", None)  # it imports torch.distributed itself
    if owner is not None and not _patches:
        _patches.replace(owner, "__next__", _next(vars(owner)["__next__"]))


def install_synchronising() -> None:
    """Patch the calls that wait for a device: once the job uses one."""
    if _device_patches:
        return
    for module, holder, name in SYNCHRONISING:
        owner = sys.modules.get(module)
        owner = getattr(owner, holder, None) if holder else owner
        if owner is not None and name in vars(owner):
            _device_patches.replace(owner, name, _synchronising(vars(owner)[name]))


def uninstall() -> None:
    """Take all off."""
    while _collected in gc.callbacks:
        gc.callbacks.remove(_collected)
    _patches.restore()
    _device_patches.restore()
    _gc_start.clear()


def _collected(phase: str, _info: dict[str, int]) -> None:
    """``gc.callbacks``: the collector has begun or ended. Collections do not nest."""
    if not RECORDER.active:
        return
    try:
        now_ns = perf_counter_ns()
        if phase == "start":
            _gc_start["ns"] = now_ns
            return
        start_ns = _gc_start.pop("ns", now_ns)
        if now_ns - start_ns >= SHORTEST_NS:
            _say(HostCause.GC, start_ns, now_ns)
    except Exception as error:
        guard.failed(PROBE, error)


def _next(original: Any) -> Any:
    """Wrapper of ``_BaseDataLoaderIter.__next__``."""

    def __next__(self: Any) -> Any:  # noqa: N807  (the name that users see in tracebacks)
        if not RECORDER.active:
            return original(self)
        start_ns, flag = perf_counter_ns(), 0
        try:
            return original(self)
        except StopIteration:
            raise
        except BaseException:
            flag = int(Flag.FAILED)
            raise
        finally:
            try:
                _say(HostCause.DATA, start_ns, perf_counter_ns(), flag)
            except Exception as error:
                guard.failed(PROBE, error)

    return __next__


def _synchronising(original: Any) -> Any:
    """Wrapper of a call in which the host waits for its device."""

    @functools.wraps(original)
    def synchronize(*args: Any, **kwargs: Any) -> Any:
        if not RECORDER.active:
            return original(*args, **kwargs)
        start_ns = perf_counter_ns()
        try:
            return original(*args, **kwargs)
        finally:
            try:
                end_ns = perf_counter_ns()
                if end_ns - start_ns >= SHORTEST_NS:
                    _say(HostCause.SYNCHRONISING, start_ns, end_ns)
            except Exception as error:
                guard.failed(PROBE, error)

    return synchronize


def _say(cause: HostCause, start_ns: int, end_ns: int, flag: int = 0) -> None:
    tail = compute_tail(Kind.HOST, start_ns, (NONE, NONE, NONE), flag)
    RECORDER.append((start_ns, end_ns, *tail[:-1], int(cause)))
