"""Arms a Python process: the probes go on as soon as the modules they patch have been imported, and never before.

``arm`` is called by the start-up hook in every Python under ``ppdiag run``; in most of them torch is never imported,
and then nothing else happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import adapters, guard
from ppdiag.rundir import PROCESSES_FILE, RUN_DIR_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

DISTRIBUTED = "torch.distributed"
AUTOGRAD = "torch.autograd.variable"
OPTIMIZER = "torch.optim.optimizer"
DATA_LOADER = "torch.utils.data.dataloader"

_state: dict[str, Any] = {"finder": None, "forks": False}


def arm() -> None:
    """Watch this process. Idempotent; does nothing without a run directory; never raises."""
    if _state["finder"] is not None or not os.environ.get(RUN_DIR_VARIABLE):
        return
    try:
        _state["finder"] = finder = _Finder()
        sys.meta_path.insert(0, finder)
        if not _state["forks"] and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_forked)
            _state["forks"] = True
        _note_process("armed")
        for name in filter(finder.is_watched, list(sys.modules)):  # other threads import meanwhile
            run_installers(name)
    except Exception as error:
        guard.failed("install", error)


def disarm() -> None:
    """Take everything off again: the finder and all probes. What has been recorded stays."""
    finder, _state["finder"] = _state["finder"], None
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
    uninstall_probes()


def install_probes() -> None:
    """Patch all that has been imported by now (again)."""
    for name in filter(_Finder().is_watched, list(sys.modules)):
        run_installers(name, note=False)


def uninstall_probes() -> None:
    """Put all that was patched back as it was."""
    for name in adapters.ADAPTERS:
        with contextlib.suppress(Exception):
            adapters.load(name).uninstall()
    for probe in [*_probes(DISTRIBUTED), *_probes(AUTOGRAD), *_probes(OPTIMIZER)]:
        with contextlib.suppress(Exception):
            probe.uninstall()


def sleep_probes() -> None:
    """Take off what costs something with every op. Adapters stay: some patch only what is made after them."""
    for probe in _probes_of_ops():
        probe.uninstall()


def wake_probes() -> None:
    """Put on again what :func:`sleep_probes` took off."""
    for probe in _probes_of_ops():
        if not guard.has_failed(probe.PROBE):
            probe.install()


def _probes_of_ops() -> list[Any]:
    from ppdiag.hooks import autograd, host_causes, issued_by_torch, layer_times, modules, process_group

    # The patch of autograd lies over that of modules.
    return [layer_times, process_group, issued_by_torch, modules, host_causes, autograd]


def _is_asleep(probe: Any) -> bool:
    recorder = sys.modules.get("ppdiag.hooks.recorder")
    return recorder is not None and recorder.RECORDER.asleep and probe in _probes_of_ops()


def run_installers(name: str, *, note: bool = True) -> None:
    """Install what patches the module of this name, which has been executed."""
    try:
        if name == DISTRIBUTED and note:
            _note_process("torch")
        for probe in _probes(name):
            if not _is_asleep(probe):
                probe.install()
        for package in adapters.ADAPTERS:
            if name.startswith(package):
                adapters.load(package).install(name)
    except Exception as error:
        framework = next((package for package in adapters.ADAPTERS if name.startswith(package)), name)
        guard.failed(f"install {framework}", error)


def _probes(module: str) -> list[Any]:
    """The probes that a module of torch is patched by; imported only now, since most processes never import torch."""
    if module == OPTIMIZER:
        from ppdiag.hooks import control, optimizer

        return [optimizer, control]
    if module == DISTRIBUTED:
        from ppdiag.hooks import clock, host_causes, instruments, issued_by_torch, layer_times, modules, process_group

        return [layer_times, process_group, issued_by_torch, modules, clock, host_causes, instruments]
    if module == AUTOGRAD:
        from ppdiag.hooks import autograd

        return [autograd]
    if module == DATA_LOADER:
        from ppdiag.hooks import host_causes

        return [host_causes]
    return []


class _Finder:
    """A meta path finder that finds nothing itself: it has the others find, and sees to what follows the execution."""

    def __init__(self) -> None:
        self._names = {DISTRIBUTED, AUTOGRAD, OPTIMIZER, DATA_LOADER, *adapters.ADAPTERS}
        self._prefixes = tuple(f"{package}." for package in adapters.ADAPTERS)

    def is_watched(self, name: str) -> bool:
        """Whether something of ours patches the module of this name."""
        return name in self._names or name.startswith(self._prefixes)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders give, its loader made to call us after it has executed the module."""
        if not self.is_watched(name):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                _watch(spec)
                return spec
        return None


def _watch(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        with contextlib.suppress(AttributeError):
            del loader.exec_module  # leave the loader as it was
        execute(module)
        if _state["finder"] is not None:
            run_installers(spec.name)

    with contextlib.suppress(AttributeError):  # a loader without a __dict__ cannot be watched
        loader.exec_module = exec_module


def _forked() -> None:
    """In a forked child: off if the parent was recording (a DataLoader's worker), else still armed."""
    with contextlib.suppress(Exception):
        recorder = sys.modules.get("ppdiag.hooks.recorder")
        if recorder is not None and recorder.RECORDER.forked():
            disarm()


def _note_process(event: str) -> None:
    """Append a line to the run's list of processes, in one write."""
    facts = {"pid": os.getpid(), "ppid": os.getppid(), "argv": list(getattr(sys, "orig_argv", [])) or sys.argv}
    line = json.dumps({**facts, "executable": sys.executable, "event": event, "unix_ns": time.time_ns()}) + "\n"
    folder = os.environ[RUN_DIR_VARIABLE]
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)  # on a host of its own, where the launcher's does not reach
        path = os.path.join(folder, PROCESSES_FILE)
        # Whatever others may have laid under this name: a link is not followed, a pipe that nobody reads is no wait.
        safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | safe, 0o644)
        try:
            os.write(fd, line.encode("utf-8", "backslashreplace"))
        finally:
            os.close(fd)
