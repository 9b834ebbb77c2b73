"""Collectives that C++ issues: the gradients that DDP reduces, functional collectives (DTensor, compiled code).

No method of a Python class is called for these. From torch 2.14 on a group tells of each op before it issues it
(``register_pre_hook``): what the wrappers in ``process_group`` record is left to them, and the rest is recorded here.
On older torch nothing is installed.

Where such an op is waited for:

* DDP's reducer waits in C++, in a callback at the end of the backward that it queues with its last bucket. Ours is
  queued before its first bucket and so runs just before it; ours then queues another, which runs just after it. The
  time between is its wait (on a device: of the compute stream), with the copies from buckets to gradients that are
  no views of them.
* A functional collective ends in the operator ``wait_tensor``, which eager and compiled code call from Python. The op
  is known by the storage that it fills.
* Of others (the broadcast of DDP's buffers, whose wait lies in the same call of C++) the post is all that can be seen:
  ``NEVER_WAITED``.

Neither the ``Work`` (of ``register_post_hook``) nor its future is used: the one keeps tensors alive, and a callback of
the other takes the interpreter's lock on the thread that communicates.

A hook costs about a microsecond with every op of its group, messages too. A group through which only such ops went
that the wrappers record has none after ``TRIAL_STEPS`` steps.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import groups, guard, process_group
from ppdiag.hooks.collectives import Wait, new_tail
from ppdiag.hooks.patching import Patches
from ppdiag.hooks.recorder import RECORDER, Tail, known_thread, thread_state, with_flag
from ppdiag.model import Collective, Flag

if TYPE_CHECKING:
    from types import FrameType

PROBE = "issued_by_torch"
HOOK_ID = int.from_bytes(b"ppdiag", "big")
"""What a group keeps our hook by, unlikely to be another's."""
TRIAL_STEPS = 2
MOST_POSTED = 4096
"""Functional collectives of which no wait has been seen: more are not remembered."""
NAMES = {
    "ALLREDUCE": Collective.ALL_REDUCE,
    "ALLREDUCE_COALESCED": Collective.ALL_REDUCE,
    "ALLGATHER": Collective.ALL_GATHER,
    "ALLGATHER_BASE": Collective.ALL_GATHER,
    "ALLGATHER_COALESCED": Collective.ALL_GATHER,
    "ALLGATHER_INTO_TENSOR_COALESCED": Collective.ALL_GATHER,
    "REDUCE_SCATTER": Collective.REDUCE_SCATTER,
    "REDUCE_SCATTER_BASE": Collective.REDUCE_SCATTER,
    "REDUCE_SCATTER_TENSOR_COALESCED": Collective.REDUCE_SCATTER,
    "ALLTOALL": Collective.ALL_TO_ALL,
    "ALLTOALL_BASE": Collective.ALL_TO_ALL,
    "BROADCAST": Collective.BROADCAST,
    "REDUCE": Collective.REDUCE,
    "GATHER": Collective.GATHER,
    "SCATTER": Collective.SCATTER,
    "BARRIER": Collective.BARRIER,
}
"""Of ``HookOpName`` in 2.14 and 2.15, where some have names of their own."""
NO_COLLECTIVES = ("SEND", "RECV", "SPLIT", "NEW_WINDOW", "UNKNOWN")
"""What it has besides; a name that neither has is a collective of another kind."""
_STEP_AT = 2
"""Position in a tail."""

_patches = Patches()
_operator_patches = Patches()
_ops: dict[Any, Collective] = {}
_watches: dict[int, _Watch] = {}
"""By ``id`` of the group."""
_in_backward: dict[int, list[Tail]] = {}
"""Number of the autograd engine's task -> what DDP has issued in it."""
_posted: dict[int, list[Tail]] = {}
"""Storage that a functional collective fills -> its tail; an empty list where it has been recorded."""


def install() -> None:
    """Hook into all groups, present and future. ``torch.distributed`` must have been imported."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    owner = getattr(distributed, "ProcessGroup", None)
    if distributed is None or _patches or not hasattr(owner, "register_pre_hook"):
        return
    guard.register(PROBE, _switch_off)
    names = sys.modules["torch._C._distributed_c10d"].HookOpName
    known = {value: NAMES.get(name, Collective.OTHER) for name, value in names.__members__.items()}
    _ops.update({value: op for value, op in known.items() if value.name not in NO_COLLECTIVES})
    _patches.replace(owner, "_set_group_name", _set_group_name(vars(owner)["_set_group_name"]))
    RECORDER.on_step.append(_next_step)
    RECORDER.on_finish.append(_write_all)
    atexit.register(_take_all_off)  # a group may be freed when there is no interpreter to free a hook any more
    _watch_all()


def uninstall() -> None:
    """Take all off; what no wait has been seen of is recorded so."""
    _switch_off()
    atexit.unregister(_take_all_off)
    for watch in list(_watches.values()):
        watch.take_off()


def _switch_off() -> None:
    """All but the hooks, which do nothing from now on: one that fails cannot be taken off while it runs."""
    _write_all()
    _patches.restore()
    _operator_patches.restore()
    for listeners, function in ((RECORDER.on_step, _next_step), (RECORDER.on_finish, _write_all)):
        if function in listeners:
            listeners.remove(function)


def _take_all_off() -> None:
    for watch in list(_watches.values()):
        watch.take_off(ended=True)


class _Watch:
    """The hook of one group."""

    def __init__(self, group: Any) -> None:
        key = id(group)
        self._group = weakref.ref(group, lambda _: _watches.pop(key, None))
        self._is_on = False
        self._is_useful: bool | None = None
        """Whether C++ issues ops of this group; None while that is not known."""
        self._others = False
        """Whether an op that the wrappers record went through the group in this step."""
        self._steps_of_others = 0
        self._threads: set[int] = set()

    def put_on(self) -> None:
        """Hook into the group, unless that has been found to be useless."""
        group = self._group()
        if group is not None and not self._is_on and self._is_useful is not False:
            group.register_pre_hook(HOOK_ID, self.before)
            self._is_on = True

    def take_off(self, *, ended: bool = False) -> None:
        """Take the hook off, unless another thread may be using it just now."""
        group = self._group()
        if group is not None and self._is_on and (ended or self._threads <= {get_ident()}):
            group.unregister_pre_hook(HOOK_ID)
            self._is_on = False

    def next_step(self) -> None:
        """A step has ended."""
        self._steps_of_others += self._others
        self._others = False
        if self._is_useful is None and self._steps_of_others >= TRIAL_STEPS:
            self._is_useful = False
            self.take_off()

    def before(self, args: Any) -> None:
        """The group is about to issue an op. Must not raise: the op would."""
        if not _patches or not (RECORDER.active or RECORDER.start()):
            return
        try:
            self._see(args, sys._getframe().f_back)
        except Exception as error:
            guard.failed(PROBE, error)

    def _see(self, args: Any, caller: FrameType | None) -> None:
        self._threads.add(get_ident())
        op = _ops.get(args.name)
        if op is None or _is_recorded_by_wrapper(caller):
            self._others = True
            return
        self._is_useful = True
        group = self._group()
        if group is not None and not guard.has_failed(process_group.PROBE):
            tensors = args.output_tensors or args.input_tensors
            tail = new_tail(groups.find(group), op, sum(tensor.nbytes for tensor in tensors), args.root)
            if not _post_in_backward(tail, caller):
                _post(tail, tensors)


def _set_group_name(original: Any) -> Any:
    """Wrapper of what each new group is named by."""

    def set_group_name(self: Any, *args: Any, **named: Any) -> Any:
        result = original(self, *args, **named)
        try:
            _watch(self)
        except Exception as error:
            guard.failed(PROBE, error)
        return result

    set_group_name._torchdynamo_disable = True  # type: ignore[attr-defined]
    return set_group_name


def _watch_all() -> None:
    for group in list(sys.modules["torch.distributed.distributed_c10d"]._world.pg_map):
        _watch(group)


def _watch(group: Any) -> None:
    """Hook into a group, unless it is one of this rank alone."""
    watch = _watches.get(id(group))
    if watch is None:
        if group.size() == 1:
            return
        watch = _watches[id(group)] = _Watch(group)
    watch.put_on()


def _next_step() -> None:
    """A step begins."""
    try:
        for watch in list(_watches.values()):
            watch.next_step()
        _watch_all()  # a group split off in C++ is given no name from Python
        _write_never_waited(RECORDER.step - 1)
    except Exception as error:
        guard.failed(PROBE, error)


def _is_recorded_by_wrapper(caller: FrameType | None) -> bool:
    while caller is not None:
        if caller.f_code is process_group.CODE_OF_COLLECTIVES:
            return True
        caller = caller.f_back
    return False


def _post_in_backward(tail: Tail, caller: FrameType | None) -> bool:
    """Remember what the autograd engine itself has had issued; says whether it has."""
    task = sys.modules["torch"]._C._current_graph_task_id()
    if task == -1 or not _is_engine(caller):
        return False
    tails = _in_backward.get(task)
    if tails is None:
        _in_backward[task] = tails = []
        _queue_callback(partial(_wait_begins, task))
    tails.append(tail)
    return True


def _is_engine(caller: FrameType | None) -> bool:
    """Whether the engine is what Python called last: an operator that a backward calls has a frame of its own."""
    if caller is None:  # the engine's own thread
        return True
    return "run_backward" in (caller.f_code.co_name, *caller.f_code.co_names)


def _queue_callback(callback: Any) -> None:
    """Have it called when all gradients of the running backward are there, after what has been queued before."""
    sys.modules["torch.autograd.variable"].Variable._execution_engine.queue_callback(callback)


def _wait_begins(task: int) -> None:
    """The reducer's own callback is the next one."""
    try:
        tails = _in_backward.pop(task, None)
        if tails and RECORDER.active:
            _queue_callback(partial(_wait_ends, Wait(tuple(tails))))
    except Exception as error:
        guard.failed(PROBE, error)


def _wait_ends(wait: Wait) -> None:
    try:
        wait.end()
    except Exception as error:
        guard.failed(PROBE, error)


def _post(tail: Tail, tensors: list[Any]) -> None:
    """Remember what a functional collective fills."""
    if not _operator_patches:
        operator = sys.modules["torch"].ops._c10d_functional.wait_tensor
        for owner in (operator, operator.default):
            _operator_patches.replace(owner, "_op", _wait_tensor(owner._op))
    if not tensors or len(_posted) >= MOST_POSTED:
        _never_waited(tail)
        return
    open_tail = [tail]
    for storage in {tensor.untyped_storage()._cdata for tensor in tensors}:
        left = _posted.pop(storage, None)
        if left:
            _never_waited(left.pop())
        _posted[storage] = open_tail


def _waited_for(tensor: Any) -> tuple[Tail, ...]:
    """The collective that fills this tensor, if it has not been recorded."""
    try:
        open_tail = _posted.pop(tensor.untyped_storage()._cdata, None)
    except Exception:  # one of the compiler's, without a storage
        return ()
    return (open_tail.pop(),) if open_tail else ()


def _wait_tensor(original: Any) -> Any:
    """Wrapper of what the operator ``wait_tensor(tensor)`` calls."""

    def wait_tensor(*args: Any, **named: Any) -> Any:
        wait = None
        tails: tuple[Tail, ...] = ()
        try:
            tails = _waited_for(args[0]) if _posted and args else ()
            wait = Wait(tails) if tails else None
        except Exception as error:
            guard.failed(PROBE, error)
        if wait is None:
            return original(*args, **named)
        try:
            result = original(*args, **named)
        except BaseException:
            wait.fail()
            raise
        try:
            _tell(wait.end(), tails)
        except Exception as error:
            guard.failed(PROBE, error)
        return result

    return wait_tensor


def _tell(end_ns: int, tails: tuple[Tail, ...]) -> None:
    """What listens to the ends of waits listens to these too."""
    if process_group.after_wait and not (known_thread() or thread_state()).named:
        for function in process_group.after_wait:
            function(end_ns, tails)


def _write_all() -> None:
    _write_never_waited(RECORDER.step + 1)


def _write_never_waited(step: int) -> None:
    """Record what was issued before this step, and no wait has been seen of."""
    for storage, open_tail in list(_posted.items()):
        if not open_tail:
            _posted.pop(storage, None)
        elif open_tail[0][_STEP_AT] < step:
            _posted.pop(storage, None)
            _never_waited(open_tail.pop())
    for task, tails in list(_in_backward.items()):
        if tails[0][_STEP_AT] < step and _in_backward.pop(task, None) is not None:  # the backward raised
            for tail in tails:
                _never_waited(tail)


def _never_waited(tail: Tail) -> None:
    RECORDER.append((tail[0], tail[0], with_flag(tail, Flag.NEVER_WAITED)))
