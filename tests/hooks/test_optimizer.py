from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.hooks import optimizer
from ppdiag.hooks.recorder import PATIENCE_NS, RECORDER
from ppdiag.model import SPAN_FIELDS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

KIND = [name for name, _, _ in SPAN_FIELDS].index("kind")


class Optimizers:
    """Stands in for torch.optim.optimizer and its global hooks."""

    def __init__(self) -> None:
        self.before: list[Any] = []
        self.after: list[Any] = []

    def register_optimizer_step_pre_hook(self, hook: Any) -> Any:
        self.before.append(hook)
        return SimpleNamespace(remove=lambda: self.before.remove(hook))

    def register_optimizer_step_post_hook(self, hook: Any) -> Any:
        self.after.append(hook)
        return SimpleNamespace(remove=lambda: self.after.remove(hook))

    def step(self, owner: object, inside: Any = lambda: None) -> None:
        for hook in self.before:
            hook(owner, (), {})
        inside()
        for hook in self.after:
            hook(owner, (), {})


@pytest.fixture
def optimizers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Optimizers]:
    module = Optimizers()
    monkeypatch.setitem(sys.modules, "torch.optim.optimizer", module)
    monkeypatch.setattr(RECORDER, "active", True)
    monkeypatch.setattr(RECORDER, "step", 0)
    monkeypatch.setattr(RECORDER, "step_ended", False)
    optimizer.install()
    yield module
    optimizer.uninstall()
    assert (module.before, module.after) == ([], [])
    RECORDER.spans.clear()


def test_a_step_ends_with_the_outermost_of_nested_optimizers(optimizers: Optimizers) -> None:
    seen = []

    def inside() -> None:
        optimizers.step("member")
        seen.append(RECORDER.step_ended)

    optimizers.step("container", inside)
    assert seen == [False]
    assert RECORDER.step_ended
    assert [span[KIND] for span in RECORDER.spans] == [Kind.OPTIMIZER] * 2


def test_several_optimizers_in_a_row_end_one_step(optimizers: Optimizers) -> None:
    for owner in ("first", "second"):
        optimizers.step(owner)
    RECORDER.begin_step()
    assert (RECORDER.step, RECORDER.step_ended) == (1, False)


def test_a_step_that_raised_leaves_nothing_open(optimizers: Optimizers) -> None:
    def inside() -> None:
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        optimizers.step("container", lambda: optimizers.step("member", inside))
    assert not RECORDER.step_ended
    optimizers.step("container", lambda: optimizers.step("member"))
    assert RECORDER.step_ended
    assert optimizer._open == []


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What had happened at each flush that was asked for; the writer wrote at that very moment."""
    asked: list[str] = []
    moment = {"now": "before"}

    def flush_soon() -> None:
        asked.append(moment["now"])
        RECORDER.flushed_ns = time.perf_counter_ns()

    monkeypatch.setattr(RECORDER, "flush_soon", flush_soon)
    monkeypatch.setattr(RECORDER, "pipeline_flushed", False)
    monkeypatch.setattr(optimizer, "after_step", [lambda _end_ns: moment.update(now="after")])
    return asked


def test_the_ops_of_a_step_are_written_while_the_optimizer_works(optimizers: Optimizers, flushes: list[str]) -> None:
    optimizers.step("one")
    optimizers.step("another of the same step")
    assert flushes == ["before"]


def test_a_frameworks_pipeline_is_written_at_its_end_once(optimizers: Optimizers, flushes: list[str]) -> None:
    RECORDER.pipeline_ended()
    optimizers.step("one")
    assert flushes == ["before"]
    RECORDER.begin_step()
    RECORDER.pipeline_ended()
    assert flushes == ["before", "after"]


def test_a_long_optimizer_is_written_at_its_end(optimizers: Optimizers, flushes: list[str]) -> None:
    optimizers.step("one", inside=lambda: time.sleep(PATIENCE_NS / 1e9))
    assert flushes == ["before", "after"]
