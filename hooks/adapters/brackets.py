"""What framework adapters are made of: brackets around the framework's own calls, and the wrappers that put them there.

A framework that lacks a function which its adapter needs (as after an upgrade) costs the names alone: that adapter is
off, says so once, and the universal layer records the job as it does any other.
"""

from __future__ import annotations

import functools
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import guard
from ppdiag.hooks.device import HostSpan
from ppdiag.hooks.patching import Patches
from ppdiag.hooks.recorder import RECORDER, Tail, known_thread, thread_state, with_flag
from ppdiag.model import NONE, Flag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NO_LABEL = (NONE, NONE, NONE)


class Wrappers:
    """The functions and methods of one framework that its adapter has wrapped.

    Args:
        probe: the name under which the adapter speaks.
    """

    def __init__(self, probe: str) -> None:
        self.probe = probe
        self.off = False
        """The framework lacks something: nothing is wrapped any more."""
        self._patches = Patches()

    def wrap(self, owner: Any, names: Sequence[str], make: Callable[[Any], Any], *, optional: bool = False) -> None:
        """Replace functions of a module, or methods in a class, by what ``make`` makes of them.

        Args:
            owner: the module or class.
            names: what to wrap.
            make: called with the original, gives the wrapper.
            optional: not all versions have it; else the adapter goes off where one of the names is missing.
        """
        missing = [name for name in names if not callable(vars(owner).get(name))]
        if missing and not optional:
            self.switch_off(f"{owner.__name__} has no {missing[0]}")
        for name in names:
            original = vars(owner).get(name)
            if self.off or name in missing or hasattr(original, "_ppdiag"):
                continue
            wrapper: Any = functools.update_wrapper(make(original), original)
            wrapper._ppdiag = True
            wrapper._torchdynamo_disable = True
            self._patches.replace(owner, name, wrapper)

    def switch_off(self, what: str) -> None:
        """The framework is not what the adapter knows: put everything back and say so once."""
        self.off = True
        self.restore()
        guard.say_once(self.probe, what, "its stages and microbatches are not named, the job and the recording go on")

    def restore(self) -> None:
        """Put everything back."""
        self._patches.restore()


def begin(kind: int, label: tuple[int, int, int], flags: int = 0) -> Tail:
    """Tail of a bracket that begins now; ``label`` is (microbatch, stage, chunk).

    Kinds and flags are plain ints here: arithmetic on enums takes ten times as long.
    """
    recorder, state = RECORDER, known_thread() or thread_state()
    if recorder.step_ended:
        recorder.begin_step()
    (microbatch, stage, chunk), thread, flags = label, state.number, flags | state.flags
    step, start_ns = recorder.step, perf_counter_ns()
    return (start_ns, 0, step, NONE, NONE, 0, microbatch, stage, chunk, NONE, thread, flags, kind, 0)


def run(tails: Sequence[Tail], original: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Call a function that is one op, or several that the framework runs in one; the universal layer infers nothing."""
    recorder, state, first = RECORDER, known_thread() or thread_state(), tails[0]
    instruments = recorder.instruments
    mark = None if instruments is None else instruments.begin(first)
    state.named += 1
    recorder.inside_start_ns, recorder.inside = first[0], first
    try:
        result = original(*args, **kwargs)
    except BaseException:
        tails = tuple(with_flag(tail, Flag.FAILED) for tail in tails)
        raise
    finally:
        end_ns = perf_counter_ns()
        state.named -= 1
        recorder.inside = None
        try:
            if instruments is not None:
                instruments.end(mark, HostSpan(first[0], end_ns, tuple(tails)))
            else:
                for tail in tails:
                    recorder.append((tail[0], end_ns, tail))
        except Exception as error:
            guard.failed("brackets", error)
    return result


def run_schedule(tail: Tail, original: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Call a framework's pipeline step."""
    try:
        return run((tail,), original, args, kwargs)
    finally:
        RECORDER.pipeline_ended()
