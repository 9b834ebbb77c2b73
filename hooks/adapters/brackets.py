"""What framework adapters are made of: brackets around the framework's own calls, and the wrappers that put them there.

A framework that lacks a function which its adapter needs (as after an upgrade) costs the names alone: that adapter is
off, says so once, and the universal layer records the job as it does any other.
"""

from __future__ import annotations

import functools
import inspect
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import guard
from ppdiag.hooks.device import HostSpan
from ppdiag.hooks.patching import Patches
from ppdiag.hooks.recorder import RECORDER, Tail, known_thread, thread_state, with_flag
from ppdiag.model import NONE, Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppdiag.hooks.instruments import Instruments

Label = tuple[int, int, int, int, int]
"""(microbatch, stage, chunk, payload, flags), as in ``process_group.labels``."""
NO_LABEL = (NONE, NONE, NONE)
"""Microbatch, stage and chunk of what has none."""
_SCHEDULE, _FAILED = int(Kind.SCHEDULE), int(Flag.FAILED)
"""Plain ints: arithmetic on enums takes ten times as long."""


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


def with_parameters_of(original: Any, function: Callable[..., Any], *names: str) -> Any:
    """A function with the parameters of another, for a wrapper of it.

    To take and pass on ``**kwargs`` takes as long as all the rest of a wrapper, and parameters differ between versions:
    so this is a ``lambda`` that is made for them.

    Args:
        original: what is to be wrapped.
        function: called with the arguments of these names, then with a tuple of all.
        names: of the parameters that the wrapper looks at.

    Returns:
        None where the original has not all of these, or others than plain ones (``*args``, keyword-only).
    """
    try:
        parameters = inspect.signature(original, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # no function of Python
        return None
    plain = all(each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for each in parameters.values())
    if not plain or not parameters.keys() >= set(names):
        return None
    defaults = {name: each.default for name, each in parameters.items() if each.default is not inspect.Parameter.empty}
    declared = ", ".join(f"{name}=_defaults[{name!r}]" if name in defaults else name for name in parameters)
    source = f"lambda {declared}: _function({', '.join(names)}, ({', '.join(parameters)},))"
    return eval(source, {"_function": function, "_defaults": defaults})  # noqa: S307  (all of it are identifiers)


def run(  # noqa: PLR0917  (keywords take time)
    probe: str,
    kind: int,
    label: Label,
    original: Any,
    args: Sequence[Any],
    kwargs: Any = None,
    also: tuple[Tail, ...] = (),
) -> Any:
    """Call a function that is one op; the universal layer infers nothing in it.

    Args:
        probe: the adapter's.
        kind: of the op.
        label: its microbatch, stage, chunk and flags; a payload is not looked at.
        original: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        also: tails of further ops that the framework runs in the same call.
    """
    recorder, state = RECORDER, known_thread() or thread_state()
    try:
        microbatch, stage, chunk, _, flags = label
        if recorder.step_ended:
            recorder.begin_step()
        step, thread, flags = recorder.step, state.number, flags | state.flags
        start_ns = perf_counter_ns()
        tail = (start_ns, 0, step, NONE, NONE, 0, microbatch, stage, chunk, NONE, thread, flags, kind, 0)
        instruments = recorder.instruments
        mark = None if instruments is None else instruments.begin(tail)
        recorder.inside_start_ns, recorder.inside = start_ns, tail
    except Exception as error:
        guard.failed(probe, error)
        return original(*args, **(kwargs or {}))
    state.named += 1
    try:
        result = original(*args, **kwargs) if kwargs else original(*args)
    except BaseException:
        end_ns = perf_counter_ns()
        state.named -= 1
        _ended(probe, HostSpan(start_ns, end_ns, (tail, *also)), _FAILED, instruments, mark)
        raise
    end_ns = perf_counter_ns()
    state.named -= 1
    if instruments is not None or also:
        _ended(probe, HostSpan(start_ns, end_ns, (tail, *also)), 0, instruments, mark)
        return result
    try:
        recorder.inside = None
        recorder.append((start_ns, end_ns, tail))
    except Exception as error:
        guard.failed(probe, error)
    return result


def _ended(probe: str, span: HostSpan, flag: int, instruments: Instruments | None, mark: Any) -> None:
    """An op has ended in another way than most. Never raises."""
    RECORDER.inside = None
    try:
        if flag:
            span = span._replace(tails=tuple(with_flag(tail, flag) for tail in span.tails))
        if instruments is not None:
            instruments.end(mark, span)
            return
        for tail in span.tails:
            RECORDER.append((span.start_ns, span.end_ns, tail))
    except Exception as error:
        guard.failed(probe, error)


def run_schedule(probe: str, flags: int, original: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Call a framework's pipeline step."""
    try:
        return run(probe, _SCHEDULE, (*NO_LABEL, 0, flags), original, args, kwargs)
    finally:
        RECORDER.pipeline_ended()
