"""Which modules are layers, and that their calls are recorded; on the real torch."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.hooks import guard, layer_times
from ppdiag.hooks.device import DeviceClock
from ppdiag.hooks.instruments import Instruments
from ppdiag.hooks.layer_times import LAYER_TIMES, SAMPLED_STEPS, SKIPPED_STEPS, layers_of
from ppdiag.hooks.recorder import RECORDER
from ppdiag.model import NONE, SPAN_FIELDS, Flag, Kind
from ppdiag.rundir import LAYER_TIMES_VARIABLE
from tests.hooks.fake_device import FakeDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

torch: Any = pytest.importorskip("torch")
nn = torch.nn
Module: Any = nn.Module
NAMES = [name for name, _, _ in SPAN_FIELDS]


class Block(Module):
    """A layer that has a list of plain parts, and one of experts, of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x: Any) -> Any:
        return x + self.mlp(self.norm(x))


class Model(Module):
    def __init__(self, layers: Any, *, ends: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4) if ends else None
        self.layers = layers
        self.head = nn.Linear(4, 4) if ends else None

    def forward(self, x: Any) -> Any:
        blocks = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        for part in (self.embedding, *blocks, self.head):
            x = x if part is None else part(x)
        return x


class Wrapper(Module):
    """As DistributedDataParallel and the like hold a model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        return self.module(x)


def blocks(count: int) -> list[Any]:
    return [Block() for _ in range(count)]


@pytest.mark.parametrize(
    ("root", "names"),
    [
        pytest.param(Model(nn.ModuleList(blocks(2))), ["layers.0", "layers.1"], id="a list between embedding and head"),
        pytest.param(
            Model(nn.ModuleDict({"8": Block(), "9": Block()}), ends=False), ["layers.8", "layers.9"], id="a dict"
        ),
        pytest.param(nn.Sequential(nn.Linear(4, 4), *blocks(2), nn.Linear(4, 4)), ["1", "2"], id="ends in the list"),
        pytest.param(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "2"], id="plain parts"),
        pytest.param(
            Wrapper(Wrapper(Model(nn.ModuleList(blocks(1))))), ["module.module.layers.0"], id="inside of wrappers"
        ),
        pytest.param(Block(), [""], id="one block, and its parts are no layers"),
        pytest.param(nn.MSELoss(), [], id="nothing to learn"),
    ],
)
def test_the_layers_of_a_stage(root: Any, names: list[str]) -> None:
    assert [layer.name for layer in layers_of(root)] == names


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All hooks on, in the first step that is sampled."""
    monkeypatch.setenv(LAYER_TIMES_VARIABLE, "1")
    monkeypatch.setattr(RECORDER, "active", True)
    monkeypatch.setattr(RECORDER, "lines", [])
    call = vars(nn.Module)["__call__"]
    layer_times.install()
    for _ in range(SKIPPED_STEPS):
        LAYER_TIMES.new_step()
    yield
    layer_times.uninstall()
    assert vars(nn.Module)["__call__"] is call
    LAYER_TIMES.__init__()  # type: ignore[misc]
    RECORDER.spans.clear()


def recorded() -> list[tuple[Kind, int]]:
    """(direction, number) of the layers, in order."""
    spans = [dict(zip(NAMES, span, strict=True)) for span in RECORDER.spans]
    assert all(span["kind"] == Kind.LAYER and span["start_ns"] <= span["end_ns"] for span in spans)
    return [(Kind(span["op"]), span["seq"]) for span in spans]


F, B = Kind.FORWARD, Kind.BACKWARD


@pytest.mark.usefixtures("sampling")
def test_forwards_come_in_order_and_backwards_turned_with_the_end_of_the_first() -> None:
    model = Model(nn.ModuleList(blocks(2)))
    model(torch.ones(1, 4)).sum().backward()
    assert recorded() == [(F, 0), (F, 1), (B, 1), (B, 0), (B, NONE)]
    assert RECORDER.lines == [{"type": "layers", "first": 0, "root": "Model", "names": ["layers.0", "layers.1"]}]


@pytest.mark.usefixtures("sampling")
def test_a_received_input_has_no_moment_of_its_own() -> None:
    model = Model(nn.ModuleList(blocks(2)), ends=False)
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert recorded() == [(F, 0), (F, 1), (B, 1), (B, 0)]


@pytest.mark.usefixtures("sampling")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_layer_is_called_once(*, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    block = Block()

    class Checkpointed(Model):
        def forward(self, x: Any) -> Any:
            return checkpoint(block, x, use_reentrant=reentrant)

    Checkpointed(nn.ModuleList([block]), ends=False)(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert recorded() == ([(F, 0)] if reentrant else [(F, 0), (B, 0)])


@pytest.mark.usefixtures("sampling")
def test_layers_called_one_by_one_are_layers() -> None:
    x = torch.ones(1, 4, requires_grad=True)
    for layer in blocks(3):
        x = layer(x)
    nn.MSELoss()(x, torch.zeros(1, 4)).backward()
    assert recorded() == [(F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (B, 0)]


@pytest.mark.usefixtures("sampling")
def test_an_error_of_the_users_layer_comes_out_and_the_next_call_is_seen() -> None:
    model = Model(nn.ModuleList(blocks(1)), ends=False)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(1, 5))
    model(torch.ones(1, 4))
    assert recorded() == [(F, 0)]


@pytest.mark.usefixtures("sampling")
def test_a_fault_of_ours_switches_this_probe_off_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(layer_times, "layers_of", broken)
    model = Model(nn.ModuleList(blocks(1)))
    assert model(torch.ones(1, 4)).shape == (1, 4)
    assert guard.has_failed(layer_times.PROBE)
    assert LAYER_TIMES.sampling is False


@pytest.mark.usefixtures("sampling")
def test_with_a_device_layers_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    clock = DeviceClock(device, RECORDER.append, now_ns=device.clock, sleep=device.sleep)
    monkeypatch.setattr(RECORDER, "instruments", Instruments(clock, None, None))
    monkeypatch.setattr(layer_times, "perf_counter_ns", device.clock)

    class Launch(torch.autograd.Function):
        """5 ms on the device, and 9 backward, of which the host sees nothing."""

        @staticmethod
        def forward(_ctx: Any, x: Any) -> Any:
            device.launch(5_000_000)
            return x.view_as(x)

        @staticmethod
        def backward(_ctx: Any, gradient: Any) -> Any:
            device.launch(9_000_000)
            return gradient

    class Launching(Block):
        def forward(self, x: Any) -> Any:
            return Launch.apply(super().forward(x))

    Model(nn.ModuleList([Launching(), Launching()]))(torch.ones(1, 4)).sum().backward()
    device.pass_time(1e9)
    clock.finish()
    spans = [dict(zip(NAMES, span, strict=False)) for span in RECORDER.spans]
    assert all(span["flags"] & Flag.DEVICE for span in spans)
    took_ms = [(span["end_ns"] - span["start_ns"]) / 1e6 for span in spans if span["op"] == F]
    begun_ms = [span["start_ns"] / 1e6 for span in spans if span["op"] == B]
    assert took_ms == pytest.approx([5, 5], abs=0.01)
    assert [late - early for early, late in pairwise(begun_ms)] == pytest.approx([9, 9], abs=0.01)


@pytest.mark.usefixtures("sampling")
def test_after_the_sampled_steps_nothing_is_patched_or_recorded() -> None:
    model = Model(nn.ModuleList(blocks(1)))
    late = model(torch.ones(1, 4)).sum()
    for _ in range(SAMPLED_STEPS):
        assert LAYER_TIMES.sampling
        LAYER_TIMES.new_step()
    before = recorded()
    late.backward()
    model(torch.ones(1, 4))
    assert recorded() == before
    assert not layer_times._patches


@pytest.mark.usefixtures("sampling")
def test_put_to_sleep_and_woken_it_samples_the_rest_with_the_numbers_it_had() -> None:
    model = Model(nn.ModuleList(blocks(1)), ends=False)
    model(torch.ones(1, 4))
    layer_times.uninstall()
    model(torch.ones(1, 4))
    layer_times.install()
    LAYER_TIMES.new_step()
    model(torch.ones(1, 4))
    assert recorded() == [(F, 0), (F, 0)]
    assert len(RECORDER.lines) == 1
    layer_times.uninstall()
    layer_times.install()
    for _ in range(SAMPLED_STEPS):
        LAYER_TIMES.new_step()
    assert LAYER_TIMES._kept == []  # the modules may go


def test_nothing_is_done_where_it_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAYER_TIMES_VARIABLE, raising=False)
    layer_times.install()
    assert LAYER_TIMES.new_step not in RECORDER.on_step
