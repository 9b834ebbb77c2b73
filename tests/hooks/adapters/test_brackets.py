"""Wrapping a framework's functions: equal and opposite, and off where the framework is not what it was."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.hooks import guard
from ppdiag.hooks.adapters import brackets
from ppdiag.hooks.adapters.brackets import Wrappers, with_parameters_of
from ppdiag.hooks.recorder import RECORDER, thread_state
from ppdiag.model import SPAN_FIELDS, Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = [name for name, _, _ in SPAN_FIELDS]
LABEL = (5, 2, 1, 0, int(Flag.EVALUATION))
"""Microbatch 5 of stage 2, which is chunk 1 of its rank."""


def noisy(original):
    def wrapper(*args):
        return ("wrapped", original(*args))

    return wrapper


@pytest.fixture
def module() -> Any:
    made: Any = ModuleType("framework.engine")
    made.forward = lambda x: x
    made.backward = lambda x: -x
    return made


def test_what_was_wrapped_is_put_back(module: Any) -> None:
    before, wrappers = dict(vars(module)), Wrappers("framework")
    wrappers.wrap(module, ["forward", "backward"], noisy)
    assert module.forward(1) == ("wrapped", 1)
    wrappers.restore()
    assert dict(vars(module)) == before


def test_wrapping_twice_is_wrapping_once(module: Any) -> None:
    wrappers = Wrappers("framework")
    wrappers.wrap(module, ["forward"], noisy)
    wrappers.wrap(module, ["forward"], noisy)
    assert module.forward(1) == ("wrapped", 1)


def test_a_function_that_is_gone_switches_the_adapter_off_and_says_so_once(
    module: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    wrappers = Wrappers("framework")
    wrappers.wrap(module, ["forward"], noisy)
    wrappers.wrap(module, ["backward", "optimize"], noisy)
    wrappers.wrap(module, ["forward", "schedule"], noisy)
    assert (module.forward(1), module.backward(1)) == (1, -1)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("ppdiag: framework: framework.engine has no optimize; its stages and microbatches are not")


def test_what_only_some_versions_have_may_be_missing(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    wrappers = Wrappers("framework")
    wrappers.wrap(module, ["forward"], noisy)
    wrappers.wrap(module, ["combined"], noisy, optional=True)
    assert module.forward(1) == ("wrapped", 1)
    assert capsys.readouterr().err == ""


@pytest.fixture
def awake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(RECORDER, "active", True)
    monkeypatch.setattr(RECORDER, "step_ended", False)
    monkeypatch.setattr(RECORDER, "step", 3)
    yield
    RECORDER.spans.clear()


def recorded() -> list[dict[str, int]]:
    return [dict(zip(NAMES, span, strict=True)) for span in RECORDER.spans]


def step(function, data, model, *, microbatch=None):
    return function, data, model, microbatch


def plain_step(function, data, model, microbatch=None, vp_stage=7):
    return function, data, model, microbatch, vp_stage


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, 2, "model", 4, 5), {}),
        ((1, 2, "model"), {"microbatch": 4, "vp_stage": 5}),
        ((), {"vp_stage": 5, "microbatch": 4, "model": "model", "data": 2, "function": 1}),
    ],
)
def test_a_wrapper_with_the_parameters_of_its_original_gets_all_arguments_however_they_are_given(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    made = with_parameters_of(plain_step, lambda *given: given, "model", "microbatch")
    assert made(*args, **kwargs) == ("model", 4, (1, 2, "model", 4, 5))


def test_a_wrapper_with_the_parameters_of_its_original_has_its_defaults_and_refuses_what_it_refuses() -> None:
    made = with_parameters_of(plain_step, lambda *given: given, "microbatch")
    assert made(1, 2, 3) == (None, (1, 2, 3, None, 7))
    with pytest.raises(TypeError, match="data"):
        made(1, model=3)


def other_tools(function):
    """Takes one argument more than what it wraps, whose signature it claims."""

    @functools.wraps(function)
    def wrapper(*args, mine=None, **kwargs):
        return mine, function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("original", [step, other_tools(plain_step), print, lambda model: model])
def test_of_parameters_that_are_not_plain_or_not_there_no_such_wrapper_is_made(original: Any) -> None:
    assert with_parameters_of(original, lambda *_: None, "model", "microbatch") is None


@pytest.mark.usefixtures("awake")
def test_an_op_is_recorded_with_its_label_and_returns_what_it_returns() -> None:
    assert brackets.run("framework", int(Kind.FORWARD), LABEL, plain_step, (1, 2, 3), {"vp_stage": 4}) == (
        1,
        2,
        3,
        None,
        4,
    )
    (span,) = recorded()
    wanted = {"kind": Kind.FORWARD, "microbatch": 5, "stage": 2, "chunk": 1, "step": 3, "flags": Flag.EVALUATION}
    assert {name: span[name] for name in wanted} == wanted
    assert span["post_ns"] == span["start_ns"] <= span["end_ns"]


@pytest.mark.usefixtures("awake")
def test_an_op_that_runs_is_the_one_that_its_rank_is_inside_of_and_nothing_is_inferred_in_it() -> None:
    seen: list[Any] = []
    brackets.run(
        "framework", int(Kind.BACKWARD), LABEL, lambda: seen.extend([RECORDER.inside, thread_state().named]), ()
    )
    inside, named = seen
    assert (inside[NAMES.index("microbatch") - 2], named) == (5, 1)
    assert (RECORDER.inside, thread_state().named) == (None, 0)


@pytest.mark.usefixtures("awake")
def test_an_exception_of_the_user_passes_untouched_and_its_span_is_flagged() -> None:
    def raising() -> None:
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        brackets.run("framework", int(Kind.FORWARD), LABEL, raising, ())
    assert [span["flags"] for span in recorded()] == [Flag.EVALUATION | Flag.FAILED]
    assert (RECORDER.inside, thread_state().named) == (None, 0)


@pytest.mark.usefixtures("awake")
def test_a_fault_of_ours_switches_the_adapter_off_and_the_op_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    off: list[bool] = []
    guard.register("framework", lambda: off.append(True))
    monkeypatch.setattr(RECORDER, "step_ended", True)
    monkeypatch.setattr(RECORDER, "on_step", [None])
    assert brackets.run("framework", int(Kind.FORWARD), LABEL, plain_step, (1, 2, 3)) == (1, 2, 3, None, 7)
    assert (off, recorded()) == ([True], [])
    assert capsys.readouterr().err.startswith("ppdiag: framework: TypeError")
