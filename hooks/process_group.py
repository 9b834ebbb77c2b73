"""Messages and collectives of any code: the methods of ``ProcessGroup`` and ``Work.wait``, patched as class attributes.

The functions of ``torch.distributed`` are left alone: ``P2POp`` compares them by identity, and ``from torch.distributed
import isend`` may have bound them before us. All of them end in the methods patched here.

One span a message: posted in ``send``/``recv``, waited for in its ``Work.wait``. Not seen: what C++ issues by itself
(``issued_by_torch`` sees it), and a wait through ``get_future()``, whose message counts as never waited for.
"""

from __future__ import annotations

import functools
import sys
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import groups, guard
from ppdiag.hooks.collectives import COLLECTIVES, Marks, describe
from ppdiag.hooks.device import HostSpan
from ppdiag.hooks.patching import Patches
from ppdiag.hooks.recorder import RECORDER, Tail, ThreadState, known_thread, thread_state, with_flag
from ppdiag.model import NONE, Collective, Flag, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppdiag.hooks.groups import Channel, Group

PROBE = "process_group"
labels: dict[int, tuple[int, int, int, int, int]] = {}
"""``id`` of a tensor about to be sent or received -> (microbatch, stage, chunk, payload, flags), put in by adapters."""
before_post: list[Callable[[int, Any, int], None]] = []
"""Told (kind, tensor, global rank of the peer) before a message that no adapter has named is posted."""
after_wait: list[Callable[[int, tuple[Tail, ...]], None]] = []
"""Told the time (ns) at which the wait for messages that no adapter has named ended, and the messages' tails."""

_patches = Patches()
_pending: dict[Any, tuple[Tail, ...]] = {}
"""Work -> what it carries. Works are told apart by identity."""
_any_source: dict[int, Group] = {}
"""``id`` of the (pending) Work of a receive from anyone -> its group: the sender is known after the wait."""
_SEND, _RECV = int(Kind.SEND), int(Kind.RECV)
_NO_LABEL = (NONE, NONE, NONE, int(Payload.UNKNOWN), 0)


def install() -> None:
    """Patch the classes. ``torch.distributed`` must have been imported."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or _patches or not hasattr(distributed, "ProcessGroup"):
        return
    guard.register(PROBE, uninstall)
    owner = distributed.ProcessGroup
    wrappers: dict[str, Callable[[Any], Any]] = {
        "send": functools.partial(_message, kind=_SEND),
        "recv": functools.partial(_message, kind=_RECV),
        "recv_anysource": _recv_anysource,
        "_start_coalescing": _start_coalescing,
        "_end_coalescing": _end_coalescing,
    }
    for name, op in COLLECTIVES.items():
        wrappers[name] = functools.partial(_collective, op=op)
    for name, wrap in wrappers.items():
        if name in vars(owner):
            _patches.replace(owner, name, _named_like(wrap(_function(owner, name)), name))
    _patches.replace(distributed.Work, "wait", _named_like(_wait(_function(distributed.Work, "wait")), "wait"))
    RECORDER.on_flush.append(write_abandoned)
    RECORDER.on_finish.append(write_pending)


def uninstall() -> None:
    """Take all patches off; what is still pending is forgotten."""
    _patches.restore()
    for listeners, function in ((RECORDER.on_flush, write_abandoned), (RECORDER.on_finish, write_pending)):
        if function in listeners:
            listeners.remove(function)
    _pending.clear()
    _any_source.clear()
    labels.clear()


def write_abandoned() -> None:
    """Write the messages whose Work the job has dropped without waiting (on the writer's thread)."""
    if not _pending:
        return
    for work, tails in list(_pending.items()):
        if sys.getrefcount(work) <= _REFERENCES_OF_OURS and _pending.pop(work, None) is not None:
            _any_source.pop(id(work), None)  # another Work may get this id
            _never_waited(tails)


def write_pending() -> None:
    """At exit: write all messages that have not been waited for."""
    for work in list(_pending):
        tails = _pending.pop(work, None)
        if tails is not None:
            _never_waited(tails)


def _never_waited(tails: tuple[Tail, ...]) -> None:
    for tail in tails:
        RECORDER.append((tail[0], tail[0], with_flag(tail, Flag.NEVER_WAITED)))


def _references_of_ours(pending: dict[Any, tuple[Any, ...]]) -> int:
    """Reference count of a Work in the loop above that nobody but us can reach: it differs between Python versions."""
    for work, _tails in list(pending.items()):
        return sys.getrefcount(work)
    return 0


_REFERENCES_OF_OURS = _references_of_ours({object(): ()})


def _function(owner: Any, name: str) -> Any:
    """The plain function below a pybind method: calling it directly is the fastest."""
    found = getattr(owner, name)
    return getattr(found, "__func__", found)


def _named_like(wrapper: Any, name: str) -> Any:
    wrapper.__name__ = wrapper.__qualname__ = name
    wrapper._torchdynamo_disable = True
    return wrapper


def _channel(owner: Any, kind: int, rank: int, tag: int) -> Channel | None:
    """The channel of a message; None in a group of one."""
    group = groups.find(owner)
    return group.channel(kind, rank, tag) if group.size > 1 else None


def _label(kind: int, tensor: Any, peer: int, state: ThreadState) -> tuple[int, int, int, int, int]:
    """What names a message whose tensor has no label of its own."""
    if before_post and not state.named:
        for function in before_post:
            function(kind, tensor, peer)
    return state.message or _NO_LABEL


def _after_post(work: Any, tail: Tail, marks: Marks | None = None) -> None:
    """A post has returned to us, and must return to the job. Never raises."""
    RECORDER.inside = None
    try:
        _posted(work, tail, marks)
    except Exception as error:
        guard.failed(PROBE, error)


def _posted(work: Any, tail: Tail, marks: Marks | None) -> None:
    """The end of a posted op is the wait for its Work, or the batch's Work, or now."""
    batch = thread_state().batch
    if work is None and batch is None:
        _ended(tail, Flag.SYNCHRONOUS, marks)
        return
    if marks is not None:
        marks.drop()
    if batch is not None:
        batch.append(tail)
    else:
        _pending[work] = (tail,)


def _ended(tail: Tail, flag: Flag, marks: Marks | None = None) -> None:
    """The post itself was the whole op: it blocked until the end, or it raised. Never raises itself."""
    RECORDER.inside = None
    try:
        end_ns, tail = perf_counter_ns(), with_flag(tail, flag)
        if marks is not None:
            marks.keep(HostSpan(tail[0], end_ns, (tail,)))
        else:
            RECORDER.append((tail[0], end_ns, tail))
    except Exception as error:
        guard.failed(PROBE, error)


def _message_arguments(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """(tensors, rank, tag) of a call that gives some of them by name; nothing where it gives others."""
    given = (*args, *(named[name] for name in ("tensors", "dstRank", "srcRank", "tag") if name in named))
    return given if len(given) == len(args) + len(named) else ()


def _message(original: Any, kind: int) -> Any:  # noqa: C901  (see below)
    """Wrapper of ``send(tensors, dstRank, tag)`` and ``recv(tensors, srcRank, tag)``.

    What it needs is fetched here and not in functions: each further one costs some 0.3 us where the caches are cold.
    """
    recorder, channels, pending, known, clock = RECORDER, groups.CHANNELS[kind], _pending, labels, perf_counter_ns

    def message(self: Any, *args: Any, **named: Any) -> Any:
        if not (recorder.active or recorder.start()):
            return original(self, *args, **named)
        try:
            tensors, rank, tag = _message_arguments(args, named) if named else args
        except ValueError:  # no call that we know
            return original(self, *args, **named)
        tail, state = None, known_thread() or thread_state()
        try:
            channel = channels.get((id(self), rank, tag)) or _channel(self, kind, rank, tag)
            if channel is not None:
                tensor = tensors[0]
                label = known.pop(id(tensor), None) or _label(kind, tensor, channel.peer, state)
                microbatch, stage, chunk, payload, flags = label
                if recorder.step_ended:
                    recorder.begin_step()
                channel.last = seq = channel.last + 1
                size_bytes, step, peer, group = tensor.nbytes, recorder.step, channel.peer, channel.group
                thread, flags, start_ns = state.number, flags | state.flags, clock()
                tail = (start_ns, size_bytes, step, seq, peer, tag, microbatch, stage, chunk, group, thread, flags, kind, payload)  # fmt: skip  # noqa: E501
                recorder.inside_start_ns, recorder.inside = start_ns, tail
        except Exception as error:
            guard.failed(PROBE, error)
        if tail is None:
            return original(self, tensors, rank, tag)
        try:
            work = original(self, tensors, rank, tag)
        except BaseException:
            _ended(tail, Flag.FAILED)
            raise
        try:
            recorder.inside = None
            if work is not None and state.batch is None:
                pending[work] = (tail,)
            else:
                _posted(work, tail, None)
        except Exception as error:
            guard.failed(PROBE, error)
        return work

    return message


def _describe_any_source(group: Group, tensor: Any, tag: int) -> Tail:
    state = thread_state()
    label = labels.pop(id(tensor), None) or _label(_RECV, tensor, NONE, state)
    if RECORDER.step_ended:
        RECORDER.begin_step()
    place = (*label[:3], group.index, state.number, label[4] | state.flags)
    return (perf_counter_ns(), tensor.nbytes, RECORDER.step, NONE, NONE, tag, *place, _RECV, label[3])


def _recv_anysource(original: Any) -> Any:
    """Wrapper of ``recv_anysource(tensors, tag)``."""

    def recv_anysource(self: Any, *args: Any, **named: Any) -> Any:
        if not (RECORDER.active or RECORDER.start()):
            return original(self, *args, **named)
        tail = group = None
        try:
            group = groups.find(self)
            if group.size > 1:
                tail = _describe_any_source(group, args[0][0], args[1] if len(args) > 1 else 0)
        except Exception as error:
            guard.failed(PROBE, error)
        if tail is None or group is None:
            return original(self, *args, **named)
        try:
            work = original(self, *args, **named)
        except BaseException:
            _ended(tail, Flag.FAILED)
            raise
        _after_post(work, tail)
        if work is not None:
            _any_source[id(work)] = group
        return work

    return recv_anysource


def _collective(original: Any, op: Collective) -> Any:
    """Wrapper of any collective, whatever its overloads."""

    def collective(*args: Any, **named: Any) -> Any:
        if not (RECORDER.active or RECORDER.start()):
            return original(*args, **named)
        tail = marks = None
        try:
            group = groups.find(args[0])
            if group.size > 1:
                described = describe(group, op, args)
                marks = None if RECORDER.instruments is None else Marks(RECORDER.instruments, described)
                tail = described
                RECORDER.inside_start_ns, RECORDER.inside = tail[0], tail
        except Exception as error:
            guard.failed(PROBE, error)
        if tail is None:
            return original(*args, **named)
        try:
            work = original(*args, **named)
        except BaseException:
            if marks is not None:
                marks.leave()
            _ended(tail, Flag.FAILED, marks)
            raise
        if marks is not None:
            marks.leave()
        _after_post(work, tail, marks)
        return work

    return collective


CODE_OF_COLLECTIVES = _collective(None, Collective.OTHER).__code__
"""The code of the wrappers of collectives: on the stack below it, an op is one that they record."""


def _start_coalescing(original: Any) -> Any:
    def start_coalescing(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        try:
            thread_state().batch = []
        except Exception as error:
            guard.failed(PROBE, error)
        return result

    return start_coalescing


def _end_coalescing(original: Any) -> Any:
    def end_coalescing(*args: Any, **named: Any) -> Any:
        tails = None
        try:
            state = thread_state()
            tails, state.batch = state.batch, None
        except Exception as error:
            guard.failed(PROBE, error)
        work = original(*args, **named)
        if tails and RECORDER.active:
            _batch_posted(work, tails)
        return work

    return end_coalescing


def _batch_posted(work: Any, tails: list[Tail]) -> None:
    """The ops of a batch end with its Work, or with the call where there is none. Never raises."""
    try:
        if work is None:
            for tail in tails:
                _ended(tail, Flag.SYNCHRONOUS)
        else:
            _pending[work] = tuple(tails)
    except Exception as error:
        guard.failed(PROBE, error)


def _wait(original: Any) -> Any:  # noqa: C901  (as in _message)
    recorder, pending, clock = RECORDER, _pending, perf_counter_ns

    def wait(self: Any, *args: Any, **named: Any) -> Any:
        try:
            tails = pending.pop(self, None) if pending else None
        except Exception:  # a Work of the user's that cannot be compared: it is not ours either
            tails = None
        if tails is None:
            return original(self, *args, **named) if args or named else original(self)
        recorder.inside = tails[0]
        recorder.inside_start_ns = start_ns = clock()
        instruments = recorder.instruments
        mark = None if instruments is None else instruments.begin(tails[0])
        try:
            result = original(self, *args, **named) if args or named else original(self)
        except BaseException:
            _wait_failed(start_ns, tails, mark)
            raise
        end_ns = clock()
        recorder.inside = None
        try:
            if _any_source:
                tails = _with_source(self, tails)
            if instruments is not None:
                instruments.end(mark, HostSpan(start_ns, end_ns, tails))
            else:
                for tail in tails:
                    recorder.append((start_ns, end_ns, tail))
            if after_wait and not (known_thread() or thread_state()).named:
                for function in after_wait:
                    function(end_ns, tails)
        except Exception as error:
            guard.failed(PROBE, error)
        return result

    return wait


def _wait_failed(start_ns: int, tails: tuple[Tail, ...], mark: Any) -> None:
    end_ns, instruments = perf_counter_ns(), RECORDER.instruments
    try:
        if instruments is not None:
            instruments.drop(mark)
            instruments.drop(instruments.leave(tails[0]))
        for tail in tails:
            RECORDER.append((start_ns, end_ns, with_flag(tail, Flag.FAILED)))
    except Exception as error:
        guard.failed(PROBE, error)


def _with_source(work: Any, tails: tuple[Tail, ...]) -> tuple[Tail, ...]:
    """Put the sender in the tail of a receive from anyone, now that it is known."""
    group = _any_source.pop(id(work), None)
    if group is None:
        return tails
    try:
        rank, tail = work._source_rank(), tails[0]
        channel = group.channel(_RECV, rank, tail[5])
        channel.last += 1
        return ((*tail[:3], channel.last, channel.peer, *tail[5:]),)
    except Exception as error:
        guard.failed(PROBE, error)
        return tails
