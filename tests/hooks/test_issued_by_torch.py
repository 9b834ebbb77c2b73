"""With stand-ins for groups, the autograd engine and ``wait_tensor``; the real ones are in ``tests/e2e``."""

from __future__ import annotations

import sys
import threading
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.hooks import groups, guard, issued_by_torch, process_group
from ppdiag.hooks.recorder import RECORDER
from ppdiag.model import SPAN_FIELDS, Collective, Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIELD_NAMES = [name for name, _, _ in SPAN_FIELDS]
Names = Enum("Names", " ".join([*issued_by_torch.NAMES, *issued_by_torch.NO_COLLECTIVES, "NEW"]))  # type: ignore[misc]


class Tensor:
    nbytes = 64

    def __init__(self, storage: int) -> None:
        self._storage = storage

    def untyped_storage(self) -> Any:
        return SimpleNamespace(_cdata=self._storage)


class Group:
    """Stands in for ProcessGroup: members are the global ranks 4 and 9. ``issue`` is what C++ does for an op."""

    def __init__(self, size: int = 2) -> None:
        self.members = size
        self.hooks: dict[int, Callable[[Any], None]] = {}

    def size(self) -> int:
        return self.members

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        self.hooks[hook_id] = hook

    def unregister_pre_hook(self, hook_id: int) -> None:
        del self.hooks[hook_id]

    def issue(self, name: str, inputs: list[Tensor], outputs: list[Tensor] | None = None, root: int = -1) -> None:
        for hook in list(self.hooks.values()):
            hook(SimpleNamespace(name=Names[name], input_tensors=inputs, output_tensors=outputs or [], root=root))

    def allreduce(self, tensors: list[Tensor]) -> None:
        self.issue("ALLREDUCE", tensors)

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> None:  # noqa: ARG002
        self.issue("SEND", tensors)


class Engine:
    """The autograd engine, and the reducer's own callback."""

    def __init__(self) -> None:
        self.task = -1
        self.callbacks: list[Callable[[], None]] = []

    def queue_callback(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def run_backward(self, work: Callable[[], None], reducer: Callable[[], None]) -> None:
        self.task += 1
        work()
        self.callbacks.append(reducer)
        while self.callbacks:
            self.callbacks.pop(0)()


class Torch:
    """The parts of torch that the probe looks up, and how they were before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = Engine()
        self.waits: list[Any] = []
        self.groups: dict[Group, None] = {}
        operator = SimpleNamespace(_op=self.waits.append)
        operator.default = SimpleNamespace(_op=self.waits.append)
        self.wait_tensor = operator
        task = SimpleNamespace(_current_graph_task_id=lambda: self.engine.task)
        functional = SimpleNamespace(wait_tensor=operator)
        modules: dict[str, Any] = {
            "torch": SimpleNamespace(_C=task, ops=SimpleNamespace(_c10d_functional=functional)),
            "torch._C._distributed_c10d": SimpleNamespace(HookOpName=Names),
            "torch.autograd.variable": SimpleNamespace(Variable=SimpleNamespace(_execution_engine=self.engine)),
            "torch.distributed.distributed_c10d": SimpleNamespace(
                ProcessGroup=Group,
                Work=type("Work", (), {"wait": lambda _: None}),
                get_process_group_ranks=lambda _: [4, 9],
                get_world_size=lambda: 16,
                _world=SimpleNamespace(pg_map=self.groups),
            ),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def group(self, size: int = 2) -> Group:
        group = Group(size)
        group._set_group_name("data")
        self.groups[group] = None
        return group


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    found = Torch(monkeypatch)
    before = dict(vars(Group))
    monkeypatch.setattr(RECORDER, "active", True)
    monkeypatch.setattr(RECORDER, "step", 0)
    process_group.install()
    issued_by_torch.install()
    yield found
    issued_by_torch.uninstall()
    process_group.uninstall()
    RECORDER.spans.clear()
    RECORDER.lines.clear()
    RECORDER.on_step.clear()
    assert dict(vars(Group)) == before
    assert found.wait_tensor._op == found.waits.append
    assert found.wait_tensor.default._op == found.waits.append
    assert not any(group.hooks for group in found.groups)


def recorded() -> list[dict[str, int]]:
    return [dict(zip(FIELD_NAMES, span, strict=True)) for span in RECORDER.spans]


def next_steps(count: int) -> None:
    for _ in range(count):
        RECORDER.begin_step()


def issue_from_engine(group: Group) -> None:
    """As from a thread of the engine's own, on which there is no Python."""
    hook: Any = group.hooks[issued_by_torch.HOOK_ID]
    op = SimpleNamespace(name=Names["ALLREDUCE"], input_tensors=[Tensor(1)], output_tensors=[], root=-1)
    hook.__self__._see(op, None)


def test_what_ddp_issues_in_a_backward_waits_while_the_reducer_does(torch: Torch) -> None:
    group = torch.group()
    inside: list[Any] = []

    def backward() -> None:
        issue_from_engine(group)
        issue_from_engine(group)

    torch.engine.run_backward(backward, lambda: inside.append(RECORDER.inside))
    first, second = recorded()
    assert inside == [tuple(first.values())[2:]]
    assert RECORDER.inside is None
    assert first["post_ns"] <= second["post_ns"] <= first["start_ns"] <= first["end_ns"]
    assert (first["start_ns"], first["end_ns"]) == (second["start_ns"], second["end_ns"])
    assert [(span["kind"], span["op"], span["seq"], span["size_bytes"], span["flags"]) for span in (first, second)] == [
        (Kind.COLLECTIVE, Collective.ALL_REDUCE, 0, 64, 0),
        (Kind.COLLECTIVE, Collective.ALL_REDUCE, 1, 64, 0),
    ]


def test_a_backward_that_raised_was_not_waited_for(torch: Torch) -> None:
    group = torch.group()

    def backward() -> None:
        issue_from_engine(group)
        raise RuntimeError("of the job")

    with pytest.raises(RuntimeError, match="of the job"):
        torch.engine.run_backward(backward, lambda: None)
    assert recorded() == []
    next_steps(2)
    assert [span["flags"] for span in recorded()] == [Flag.NEVER_WAITED]


def test_a_functional_collective_waits_in_wait_tensor_of_what_it_fills(torch: Torch) -> None:
    group, filled = torch.group(), Tensor(1)
    group.issue("ALLGATHER", [Tensor(2)], [filled])
    torch.wait_tensor._op(Tensor(2))
    assert recorded() == []
    torch.wait_tensor.default._op(filled)
    torch.wait_tensor._op(filled)
    (span,) = recorded()
    assert (span["op"], span["size_bytes"], span["flags"]) == (Collective.ALL_GATHER, 64, 0)
    assert span["post_ns"] <= span["start_ns"] <= span["end_ns"]
    assert len(torch.waits) == 3


def test_a_wait_that_raises_is_recorded_as_failed(torch: Torch) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("of the job")

    torch.wait_tensor._op = refuse
    torch.group().issue("ALLREDUCE", [Tensor(1)])
    with pytest.raises(RuntimeError, match="of the job"):
        torch.wait_tensor._op(Tensor(1))
    assert [span["flags"] for span in recorded()] == [Flag.FAILED]
    issued_by_torch.uninstall()
    torch.wait_tensor._op = torch.waits.append


def test_a_collective_of_several_tensors_is_one_span(torch: Torch) -> None:
    torch.group().issue("ALLREDUCE", [Tensor(1), Tensor(2)])
    for storage in (2, 1):
        torch.wait_tensor._op(Tensor(storage))
        assert [span["size_bytes"] for span in recorded()] == [128]


def test_what_nobody_is_seen_to_wait_for_is_its_post_alone(torch: Torch) -> None:
    group = torch.group()
    group.issue("BROADCAST", [Tensor(1)], root=1)
    group.issue("BROADCAST", [Tensor(1)], root=1)  # into the same storage
    next_steps(1)
    assert [span["peer"] for span in recorded()] == [9], "the other may be waited for in the next step"
    next_steps(1)
    first, second = recorded()
    for span in (first, second):
        assert span["flags"] == Flag.NEVER_WAITED
        assert span["start_ns"] == span["end_ns"] == span["post_ns"]


def test_an_op_of_a_new_name_is_a_collective_and_what_is_none_is_no_span(torch: Torch) -> None:
    for name in ("NEW", *issued_by_torch.NO_COLLECTIVES):
        torch.group().issue(name, [])
    assert [(span["op"], span["flags"]) for span in recorded()] == [(Collective.OTHER, Flag.NEVER_WAITED)]


def test_an_op_that_the_wrappers_record_is_no_second_span(torch: Torch) -> None:
    group = torch.group()
    group.allreduce([Tensor(1)])
    group.send([Tensor(1)], 1, 0)
    issued_by_torch.uninstall()  # which records what is still waited for
    assert [span["kind"] for span in recorded()] == [Kind.COLLECTIVE, Kind.SEND]
    assert [span["flags"] for span in recorded()] == [Flag.SYNCHRONOUS] * 2


def test_only_groups_that_pass_on_what_others_record_lose_their_hook(torch: Torch) -> None:
    messages, gradients, unused, alone = torch.group(), torch.group(), torch.group(), torch.group(1)
    for _ in range(issued_by_torch.TRIAL_STEPS):
        assert messages.hooks
        messages.send([Tensor(1)], 1, 0)
        gradients.allreduce([Tensor(1)])
        gradients.issue("ALLREDUCE", [Tensor(1)])
        next_steps(1)
    assert [bool(group.hooks) for group in (messages, gradients, unused, alone)] == [False, True, True, False]
    issued_by_torch.uninstall()
    issued_by_torch.install()
    assert [bool(group.hooks) for group in (messages, gradients, unused, alone)] == [False, True, True, False]


def test_groups_that_were_there_before_and_those_without_a_name_get_their_hook(torch: Torch) -> None:
    issued_by_torch.uninstall()
    before = torch.group()
    issued_by_torch.install()
    split = Group()
    torch.groups[split] = None
    assert (bool(before.hooks), bool(split.hooks)) == (True, False)
    next_steps(1)
    assert split.hooks


def test_a_hook_that_another_thread_may_be_in_stays_and_does_nothing(torch: Torch) -> None:
    group = torch.group()
    thread = threading.Thread(target=group.issue, args=("ALLREDUCE", [Tensor(1)]))
    thread.start()
    thread.join()
    issued_by_torch.uninstall()
    assert len(recorded()) == 1
    assert group.hooks
    group.issue("ALLREDUCE", [Tensor(1)])
    assert len(recorded()) == 1
    issued_by_torch._take_all_off()
    assert not group.hooks


def test_a_hook_that_fails_is_off_and_the_op_is_not_disturbed(
    torch: Torch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = torch.group()
    with monkeypatch.context() as broken:
        broken.setattr(groups, "find", lambda _: 1 / 0)
        for _ in range(2):
            group.issue("ALLREDUCE", [Tensor(1)])
    assert capsys.readouterr().err.count("issued_by_torch: ZeroDivisionError") == 1
    assert guard.has_failed(issued_by_torch.PROBE)
    assert group.hooks, "a hook that is taken off while it runs is memory that is used after it was freed"
    assert recorded() == []


def test_a_torch_without_such_hooks_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = type("ProcessGroup", (), {"_set_group_name": lambda *_: None})
    before = dict(vars(owner))
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", SimpleNamespace(ProcessGroup=owner))
    issued_by_torch.install()
    assert dict(vars(owner)) == before
