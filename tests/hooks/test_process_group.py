"""The patched classes, on a group of two whose other rank is this process's imagination."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.hooks import groups, process_group
from ppdiag.hooks.recorder import RECORDER
from ppdiag.model import NONE, SPAN_FIELDS, Collective, Flag, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = [name for name, _, _ in SPAN_FIELDS]


class Tensor:
    nbytes = 64

    def is_floating_point(self) -> bool:
        return True


class Work:
    def wait(self, *_: Any) -> bool:
        return True

    def _source_rank(self) -> int:
        return 1


class Group:
    """Stands in for ProcessGroup: members are the global ranks 4 and 9, and we are the first."""

    group_name = "pipe"
    works = True
    refuses = False

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def _work(self, *_: Any, **__: Any) -> Any:
        if self.refuses:
            raise RuntimeError("of the user")
        return Work() if self.works else None

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Any:  # noqa: ARG002
        return self._work()

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Any:  # noqa: ARG002
        return self._work()

    recv_anysource = allreduce = broadcast = _work

    def barrier(self) -> Any:
        raise RuntimeError("of the user")

    def _start_coalescing(self, _device: str) -> None: ...

    def _end_coalescing(self, _device: str) -> Any:
        return self._work()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    distributed = SimpleNamespace(
        ProcessGroup=Group, Work=Work, get_process_group_ranks=lambda _: [4, 9], get_world_size=lambda: 16
    )
    monkeypatch.setitem(__import__("sys").modules, "torch.distributed.distributed_c10d", distributed)
    before = dict(vars(Group)), dict(vars(Work))
    monkeypatch.setattr(RECORDER, "active", True)
    monkeypatch.setattr(RECORDER, "step", 3)
    process_group.install()
    yield Group()
    process_group.uninstall()
    RECORDER.spans.clear()
    RECORDER.lines.clear()
    assert (dict(vars(Group)), dict(vars(Work))) == before


def recorded() -> list[dict[str, int]]:
    return [dict(zip(NAMES, span, strict=True)) for span in RECORDER.spans]


def test_a_message_is_one_span_from_its_post_to_the_end_of_its_wait(group: Group) -> None:
    work = group.send([Tensor()], 1, 5)
    assert recorded() == []
    work.wait()
    (span,) = recorded()
    assert span["post_ns"] <= span["start_ns"] <= span["end_ns"]
    wanted = {"kind": Kind.SEND, "peer": 9, "tag": 5, "seq": 0, "size_bytes": 64, "step": 3, "flags": 0}
    assert {name: span[name] for name in wanted} == wanted
    assert (span["microbatch"], span["stage"], span["chunk"]) == (NONE, NONE, NONE)
    assert RECORDER.inside is None


def test_messages_are_numbered_for_each_direction_peer_and_tag(group: Group) -> None:
    for call in (
        lambda: group.send([Tensor()], 1, 0),
        lambda: group.send([Tensor()], 1, 0),
        lambda: group.send([Tensor()], 1, 7),
        lambda: group.recv([Tensor()], 1, 0),
        lambda: group.send(tensors=[Tensor()], dstRank=1, tag=0),
    ):
        call().wait()
    assert [(span["kind"], span["tag"], span["seq"]) for span in recorded()] == [
        (Kind.SEND, 0, 0),
        (Kind.SEND, 0, 1),
        (Kind.SEND, 7, 0),
        (Kind.RECV, 0, 0),
        (Kind.SEND, 0, 2),
    ]


def test_a_second_wait_is_no_second_span(group: Group) -> None:
    work = group.recv([Tensor()], 1, 0)
    work.wait()
    work.wait()
    assert len(recorded()) == 1


def test_an_adapters_label_is_used_for_one_message(group: Group) -> None:
    tensor = Tensor()
    process_group.labels[id(tensor)] = (11, 2, 1, int(Payload.GRADIENT), int(Flag.EVALUATION))
    group.send([tensor], 1, 0).wait()
    group.send([tensor], 1, 0).wait()
    named, plain = recorded()
    assert (named["microbatch"], named["stage"], named["chunk"], named["op"]) == (11, 2, 1, Payload.GRADIENT)
    assert named["flags"] == Flag.EVALUATION
    assert plain["microbatch"] == NONE


def test_the_wait_for_a_coalesced_batch_ends_all_its_messages(group: Group) -> None:
    group._start_coalescing("cuda")
    inner = [group.send([Tensor()], 1, 0), group.recv([Tensor()], 1, 0)]
    work = group._end_coalescing("cuda")
    assert recorded() == []
    work.wait()
    sent, received = recorded()
    assert [sent["kind"], received["kind"]] == [Kind.SEND, Kind.RECV]
    assert (sent["start_ns"], sent["end_ns"]) == (received["start_ns"], received["end_ns"])
    assert sent["post_ns"] <= received["post_ns"]
    for inner_work in inner:  # nobody waits for them; if somebody does, they are not recorded twice
        inner_work.wait()
    assert len(recorded()) == 2


def test_a_post_without_a_work_is_synchronous(group: Group) -> None:
    group.works = False
    group.allreduce([Tensor()])
    group._start_coalescing("cuda")
    group.send([Tensor()], 1, 0)
    group._end_coalescing("cuda")
    assert [span["flags"] for span in recorded()] == [Flag.SYNCHRONOUS] * 2
    assert all(span["start_ns"] == span["post_ns"] <= span["end_ns"] for span in recorded())


def test_collectives_are_numbered_for_the_group_and_carry_op_size_and_root(group: Group) -> None:
    group.allreduce([Tensor(), Tensor()]).wait()
    group.broadcast([Tensor()], SimpleNamespace(rootRank=1)).wait()
    first, second = recorded()
    assert (first["kind"], first["op"], first["seq"], first["size_bytes"]) == (
        Kind.COLLECTIVE,
        Collective.ALL_REDUCE,
        0,
        128,
    )
    assert (first["peer"], second["op"], second["seq"], second["peer"]) == (NONE, Collective.BROADCAST, 1, 9)


def test_a_message_that_nobody_can_wait_for_any_more_is_written_as_never_waited(group: Group) -> None:
    kept = group.send([Tensor()], 1, 0)
    group.send([Tensor()], 1, 0)
    process_group.write_abandoned()
    (span,) = recorded()
    assert (span["seq"], span["flags"]) == (1, Flag.NEVER_WAITED)
    assert span["start_ns"] == span["end_ns"] == span["post_ns"]
    kept.wait()
    assert recorded()[1]["flags"] == 0


def test_what_is_pending_at_the_exit_is_written_as_never_waited(group: Group) -> None:
    kept = group.send([Tensor()], 1, 0)
    process_group.write_pending()
    (span,) = recorded()
    assert span["flags"] == Flag.NEVER_WAITED
    kept.wait()
    assert len(recorded()) == 1


def test_the_sender_of_a_receive_from_anyone_is_known_after_the_wait(group: Group) -> None:
    group.recv_anysource([Tensor()], 3).wait()
    (span,) = recorded()
    assert (span["kind"], span["peer"], span["seq"], span["tag"]) == (Kind.RECV, 9, 0, 3)


def test_a_receive_from_anyone_that_is_dropped_leaves_no_trace_on_the_next_work_of_its_id(group: Group) -> None:
    group.recv_anysource([Tensor()], 3)
    process_group.write_abandoned()
    (span,) = recorded()
    assert (span["peer"], span["flags"]) == (NONE, Flag.NEVER_WAITED)
    assert not process_group._any_source


def test_a_receive_from_anyone_that_raises_is_flagged(group: Group) -> None:
    group.refuses = True
    with pytest.raises(RuntimeError):
        group.recv_anysource([Tensor()], 3)
    assert [span["flags"] for span in recorded()] == [Flag.FAILED]


def test_an_exception_of_the_user_passes_untouched_and_its_span_is_flagged(group: Group) -> None:
    with pytest.raises(RuntimeError, match="of the user"):
        group.barrier()
    (span,) = recorded()
    assert (span["op"], span["flags"]) == (Collective.BARRIER, Flag.FAILED)


def test_a_failure_of_ours_costs_the_record_and_not_the_call(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(group.send([object()], 1, 0), Work)  # type: ignore[list-item]
    assert "ppdiag: process_group: AttributeError" in capsys.readouterr().err
    assert "send" in vars(Group)
    assert vars(Group)["send"].__module__ == __name__  # the probe has taken itself off


def test_the_group_is_named_once_with_its_global_ranks(group: Group) -> None:
    for _ in range(2):
        group.send([Tensor()], 1, 0).wait()
    (line,) = [line for line in RECORDER.lines if line["type"] == "group"]
    assert (line["name"], line["ranks"]) == ("pipe", [4, 9])


def test_a_group_of_one_is_passed_over(group: Group) -> None:
    group.size = lambda: 1  # type: ignore[method-assign]
    group.allreduce([Tensor()]).wait()
    assert recorded() == []


def test_nothing_is_recorded_asleep(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RECORDER, "active", False)
    monkeypatch.setattr(RECORDER, "stopped", True)
    group.send([Tensor()], 1, 0).wait()
    assert recorded() == []


def test_an_op_after_an_optimizer_step_begins_a_step(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RECORDER, "step_ended", True)
    group.send([Tensor()], 1, 0).wait()
    group.send([Tensor()], 1, 0).wait()
    assert [span["step"] for span in recorded()] == [4, 4]


def test_a_call_by_name_in_any_order_is_recorded_and_one_that_the_group_refuses_is_refused_by_it(group: Group) -> None:
    group.send(tag=5, tensors=[Tensor()], dstRank=1).wait()
    (span,) = recorded()
    assert (span["peer"], span["tag"]) == (9, 5)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {}), (([], 1), {}), (([], 1, 0), {"color": 1})]
    for arguments, named in calls:
        with pytest.raises(TypeError, match="send"):
            group.send(*arguments, **named)
    assert len(recorded()) == 1


@pytest.mark.usefixtures("group")
def test_a_group_that_takes_the_id_of_a_destroyed_one_starts_its_own_count() -> None:
    other = Group()
    other.send([Tensor()], 1, 0).wait()
    key = id(other)
    assert any(place[0] == key for place in groups.CHANNELS[int(Kind.SEND)])
    del other
    gc.collect()
    assert not any(place[0] == key for place in groups.CHANNELS[int(Kind.SEND)])
    assert key not in groups.KNOWN


def test_a_work_of_the_users_that_cannot_be_compared_is_waited_for(group: Group) -> None:
    class Odd(Work):
        __hash__ = None  # type: ignore[assignment]

    kept = group.send([Tensor()], 1, 0)
    assert Odd().wait()
    kept.wait()
    assert len(recorded()) == 1
