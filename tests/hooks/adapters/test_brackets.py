"""Wrapping a framework's functions: equal and opposite, and off where the framework is not what it was."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from ppdiag.hooks.adapters.brackets import Wrappers


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
