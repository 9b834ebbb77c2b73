"""The wrappers of the stages' methods on a stand-in for the stage; real schedules are in ``tests/e2e``."""

# ruff: noqa: FBT002  (parameters as torch has them)
from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.hooks import guard, process_group
from ppdiag.hooks.adapters import torch_pipelining
from ppdiag.hooks.recorder import RECORDER, thread_state
from ppdiag.model import SPAN_FIELDS, Flag, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = [name for name, _, _ in SPAN_FIELDS]


class Stage:
    """Stage 2, the only one of this rank; its methods return what they were given."""

    stage_index, has_backward = 2, True

    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, save_forward_output=True):
        if args == "raise":
            raise RuntimeError("of the user")
        return fwd_chunk_id, args, kwargs, save_forward_output

    def forward_before_2_10(self, fwd_chunk_id, args, kwargs=None):
        return fwd_chunk_id, args, kwargs

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        return bwd_chunk_id, loss, full_backward, last_backward

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        return bwd_chunk_id, last_backward

    def get_fwd_send_ops(self, fwd_chunk_id):
        return [SimpleNamespace(tensor=fwd_chunk_id)]


@pytest.fixture(autouse=True)
def awake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(RECORDER, "active", True)
    monkeypatch.setattr(RECORDER, "step_ended", False)
    monkeypatch.setattr(RECORDER, "step", 3)
    torch_pipelining._chunks[2] = (1, False)
    yield
    torch_pipelining.ADAPTER.uninstall()
    RECORDER.spans.clear()
    process_group.labels.clear()


def recorded() -> list[dict[str, int]]:
    return [dict(zip(NAMES, span, strict=True)) for span in RECORDER.spans]


FORWARD = torch_pipelining._compute(Stage.forward_one_chunk, Kind.FORWARD)
OLD_FORWARD = torch_pipelining._compute(Stage.forward_before_2_10, Kind.FORWARD)
BACKWARD = torch_pipelining._compute(Stage.backward_one_chunk, Kind.BACKWARD)
WEIGHT = torch_pipelining._compute(Stage.backward_weight_one_chunk, Kind.WEIGHT)


@pytest.mark.parametrize(
    ("wrapper", "args", "kwargs", "returned", "kind"),
    [
        (FORWARD, (5, "x"), {}, (5, "x", None, True), Kind.FORWARD),
        (FORWARD, (5, "x", {"k": 1}), {"save_forward_output": False}, (5, "x", {"k": 1}, False), Kind.FORWARD),
        (FORWARD, (), {"args": "x", "fwd_chunk_id": 5}, (5, "x", None, True), Kind.FORWARD),
        (OLD_FORWARD, (5, "x"), {"kwargs": {}}, (5, "x", {}), Kind.FORWARD),
        (OLD_FORWARD, (), {"args": "x", "fwd_chunk_id": 5}, (5, "x", None), Kind.FORWARD),
        (BACKWARD, (5,), {"last_backward": True}, (5, None, True, True), Kind.BACKWARD),
        (BACKWARD, (), {"bwd_chunk_id": 5, "loss": 1.0}, (5, 1.0, True, False), Kind.BACKWARD),
        (WEIGHT, (5,), {"last_backward": True}, (5, True), Kind.WEIGHT),
    ],
)
def test_arguments_reach_the_stage_as_they_were_given_and_the_span_has_its_microbatch(
    wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: tuple[Any, ...], kind: Kind
) -> None:
    assert wrapper(Stage(), *args, **kwargs) == returned
    (span,) = recorded()
    wanted = {"kind": kind, "microbatch": 5, "stage": 2, "chunk": 1, "step": 3, "flags": 0}
    assert {name: span[name] for name in wanted} == wanted
    assert span["post_ns"] == span["start_ns"] <= span["end_ns"]
    assert RECORDER.inside is None


@pytest.mark.parametrize("name", ["forward_one_chunk", "backward_one_chunk"])
def test_the_wrapper_of_a_known_method_has_its_parameters(name: str) -> None:
    original, kind = getattr(Stage, name), Kind.FORWARD if name[0] == "f" else Kind.BACKWARD
    wrapper = torch_pipelining._compute(original, kind)
    assert [(p.name, p.default) for p in inspect.signature(wrapper).parameters.values()] == [
        (p.name, p.default) for p in inspect.signature(original).parameters.values()
    ]


def test_what_another_tools_wrapper_takes_more_than_the_method_that_it_wraps_reaches_it() -> None:
    @functools.wraps(Stage.forward_one_chunk)
    def theirs(self, *args, mine=None, **kwargs):
        return mine, Stage.forward_one_chunk(self, *args, **kwargs)

    wrapper = torch_pipelining._compute(theirs, Kind.FORWARD)
    assert wrapper(Stage(), 5, "x", mine="theirs") == ("theirs", (5, "x", None, True))


def test_a_call_that_the_stage_refuses_is_refused_by_the_stage() -> None:
    with pytest.raises(TypeError, match="bwd_chunk_id"):
        WEIGHT(Stage())
    assert guard._faults == []


def test_an_exception_of_the_user_passes_untouched_and_its_span_is_flagged() -> None:
    with pytest.raises(RuntimeError, match="of the user"):
        FORWARD(Stage(), 0, "raise")
    assert [span["flags"] for span in recorded()] == [Flag.FAILED]
    assert thread_state().named == 0


def test_the_forward_of_the_last_stage_ends_with_its_loss() -> None:
    torch_pipelining._chunks[2] = (1, True)
    FORWARD(Stage(), 0, "x")
    assert recorded() == []
    torch_pipelining._loss(lambda *_: None)("schedule")
    (span,) = recorded()
    assert (span["kind"], span["microbatch"]) == (Kind.FORWARD, 0)


@pytest.mark.parametrize("by_name", [False, True])
def test_the_tensors_of_an_operation_are_labelled(*, by_name: bool) -> None:
    get_ops, tensor = torch_pipelining._label(Stage.get_fwd_send_ops, Payload.ACTIVATION), 7
    operations = get_ops(Stage(), fwd_chunk_id=tensor) if by_name else get_ops(Stage(), tensor)
    assert [operation.tensor for operation in operations] == [tensor]
    assert process_group.labels == {id(tensor): (7, 2, 1, int(Payload.ACTIVATION), 0)}


class StageOfAnotherVersion(Stage):
    """As after an upgrade that has renamed what the adapter reads."""

    @property
    def has_backward(self) -> bool:  # type: ignore[override]
        raise AttributeError("has_backward")

    @property
    def stage_index(self) -> int:  # type: ignore[override]
        raise AttributeError("stage_index")


@pytest.mark.parametrize(("wrapper", "args"), [(FORWARD, (5, "x")), (BACKWARD, (5,)), (WEIGHT, (5,))])
def test_an_attribute_that_an_upgrade_took_away_costs_the_job_nothing(wrapper: Any, args: tuple[Any, ...]) -> None:
    guard.reset()
    returned = wrapper(StageOfAnotherVersion(), *args)
    assert returned[0] == 5
    assert RECORDER.spans == []
    assert guard.has_failed(torch_pipelining.PROBE)
    guard.reset()
