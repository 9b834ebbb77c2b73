"""The one place where failures of our own code in the training process end: said once, then that probe is off."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_disable: dict[str, Callable[[], None]] = {}
_faults: list[tuple[str, str]] = []
_listeners: list[Callable[[str, str], None]] = []


def register(probe: str, disable: Callable[[], None]) -> None:
    """Name the function that switches a probe off when it fails."""
    _disable[probe] = disable


def listen(listener: Callable[[str, str], None]) -> None:
    """Tell ``listener`` (probe, error) about each fault, those of the past included."""
    _listeners.append(listener)
    for probe, error in _faults:
        listener(probe, error)


def failed(probe: str, error: BaseException) -> None:
    """A probe of ours raised: switch it off and say so once. Never raises."""
    say_once(probe, f"{type(error).__name__}: {error}", "this part of the recording is off, the job goes on")
    with contextlib.suppress(Exception):
        _disable.pop(probe, _nothing)()


def has_failed(probe: str) -> bool:
    """Whether a probe has switched itself off for good."""
    return any(known == probe for known, _ in _faults)


def say_once(probe: str, text: str, consequence: str) -> None:
    """One line on stderr and one fault line for each probe, however often it fails."""
    if has_failed(probe):
        return
    _faults.append((probe, text[:500]))
    with contextlib.suppress(Exception):  # stderr may be closed
        sys.stderr.write(f"ppdiag: {probe}: {text[:500]}; {consequence}\n")
    for listener in _listeners:
        with contextlib.suppress(Exception):
            listener(probe, text[:500])


def reset() -> None:
    """Forget all faults (for tests)."""
    _disable.clear()
    _faults.clear()
    _listeners.clear()


def _nothing() -> None:
    pass
