"""The adapter of DeepSpeed on a stand-in for its engine: what its jobs on CPU (``tests/e2e``) cannot reach."""

from __future__ import annotations

import sys
from types import MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.hooks import process_group
from ppdiag.hooks.adapters import brackets, deepspeed
from ppdiag.hooks.recorder import RECORDER
from ppdiag.model import SPAN_FIELDS, Flag, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NAMES = [name for name, _, _ in SPAN_FIELDS]


class Instruction:
    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs


class ForwardPass(Instruction):
    pass


class BackwardPass(Instruction):
    pass


class SendActivation(Instruction):
    pass


class UserInstruction(Instruction):
    """One that only a subclass of the engine knows."""


class PipelineEngine:
    """As DeepSpeed's: the map holds the functions that were in the class when it was made."""

    def __init__(self) -> None:
        grid = SimpleNamespace(stage_to_global=lambda stage: 2 * stage)
        for axis, (rank, size) in {"slice": (0, 1), "data": (1, 2)}.items():
            setattr(grid, f"get_{axis}_parallel_rank", lambda rank=rank: rank)
            setattr(grid, f"get_{axis}_parallel_world_size", lambda size=size: size)
        self.grid, self.stage_id, self.num_stages, self.micro_batches = grid, 1, 4, 8
        self.posted: list[Any] = []

    def _exec_forward_pass(self, buffer_id: int) -> None:
        self.posted.append(RECORDER.threads.state.message)
        assert buffer_id >= 0

    def _exec_backward_pass(self, buffer_id: int) -> None:
        if buffer_id > 1:
            raise ValueError("of the user")

    def _exec_send_activations(self, buffer_id: int) -> None:
        self._send_tensor_meta(buffer_id, 2)
        self.posted.append(RECORDER.threads.state.message)

    def _send_tensor_meta(self, _buffer: Any, _stage: int) -> None:
        self.posted.append(RECORDER.threads.state.message)

    def _recv_tensor_meta(self, _stage: int) -> None:
        pass

    def train_batch(self, instructions: Sequence[Instruction]) -> str:
        for instruction in instructions:
            MethodType(self._INSTRUCTION_MAP[type(instruction)], self)(**instruction.kwargs)
        return "loss"

    def eval_batch(self, instructions: Sequence[Instruction]) -> str:
        return self.train_batch(instructions)

    _INSTRUCTION_MAP: dict[type, Any] = {  # noqa: RUF012  (as DeepSpeed has it)
        ForwardPass: _exec_forward_pass,
        BackwardPass: _exec_backward_pass,
        SendActivation: _exec_send_activations,
    }


class UserEngine(PipelineEngine):
    def _exec_user_instruction(self) -> None:
        self.posted.append("user")

    _INSTRUCTION_MAP: dict[type, Any] = {**PipelineEngine._INSTRUCTION_MAP, UserInstruction: _exec_user_instruction}  # noqa: RUF012


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    made: Any = ModuleType(deepspeed.ENGINE_MODULE)
    made.PipelineEngine = PipelineEngine
    monkeypatch.setitem(sys.modules, deepspeed.ENGINE_MODULE, made)
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setattr(RECORDER, "active", True)
    monkeypatch.setattr(RECORDER, "step_ended", False)
    monkeypatch.setattr(RECORDER, "_facts", {})
    monkeypatch.setattr(deepspeed, "_wrappers", brackets.Wrappers(deepspeed.PROBE))
    yield made
    deepspeed.ADAPTER.uninstall()
    RECORDER.spans.clear()
    RECORDER.lines.clear()
    process_group.labels.clear()


def found() -> list[tuple[Kind, int, int, int]]:
    """(kind, stage, microbatch, flags) of what was recorded."""
    spans = [dict(zip(NAMES, span, strict=True)) for span in RECORDER.spans]
    return [(Kind(span["kind"]), span["stage"], span["microbatch"], span["flags"]) for span in spans]


def test_microbatches_are_counted_though_buffers_are_used_again(module: ModuleType) -> None:
    deepspeed.ADAPTER.install(module.__name__)
    plan = [instruction(buffer_id=0) for _ in range(2) for instruction in (ForwardPass, BackwardPass)]
    assert PipelineEngine().train_batch(plan) == "loss"
    kinds = [(kind, 1, microbatch, 0) for microbatch in (0, 1) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    assert found() == [*kinds, (Kind.SCHEDULE, -1, -1, 0)]


def test_a_message_is_named_while_it_is_posted_and_shapes_carry_no_payload(module: ModuleType) -> None:
    deepspeed.ADAPTER.install(module.__name__)
    engine = PipelineEngine()
    engine.train_batch([ForwardPass(buffer_id=0), SendActivation(buffer_id=0)])
    shapes, activation = (0, 1, 0, int(Payload.UNKNOWN), 0), (0, 1, 0, int(Payload.ACTIVATION), 0)
    assert engine.posted == [None, shapes, activation]
    assert RECORDER.threads.state.message is None


def test_instructions_and_maps_of_subclasses_are_kept(module: ModuleType) -> None:
    deepspeed.ADAPTER.install(module.__name__)
    engine = UserEngine()
    engine.train_batch([UserInstruction(), ForwardPass(buffer_id=0)])
    assert engine.posted == ["user", None]
    assert found()[0] == (Kind.FORWARD, 1, 0, 0)
    assert "_INSTRUCTION_MAP" not in vars(engine)


def test_an_evaluation_is_flagged(module: ModuleType) -> None:
    deepspeed.ADAPTER.install(module.__name__)
    PipelineEngine().eval_batch([ForwardPass(buffer_id=0)])
    assert [flags for *_, flags in found()] == [Flag.EVALUATION, Flag.EVALUATION]


def test_an_instruction_that_raises_leaves_engine_and_adapter_as_they_were(module: ModuleType) -> None:
    deepspeed.ADAPTER.install(module.__name__)
    engine = PipelineEngine()
    plan = [ForwardPass(buffer_id=2), BackwardPass(buffer_id=2)]
    with pytest.raises(ValueError, match="of the user"):
        engine.train_batch(plan)
    assert [flags for *_, flags in found()] == [0, Flag.FAILED, Flag.FAILED]
    assert "_INSTRUCTION_MAP" not in vars(engine)
    assert RECORDER.threads.state.named == 0
    engine.train_batch(plan[:1])
    assert found()[-2:] == [(Kind.FORWARD, 1, 0, 0), (Kind.SCHEDULE, -1, -1, 0)]


def test_the_grid_is_read_from_the_engine(module: ModuleType) -> None:
    deepspeed.ADAPTER.install(module.__name__)
    PipelineEngine().train_batch([])
    said = {line["name"]: line["value"] for line in RECORDER.lines}
    assert (said["pp"], said["vpp"], said["tp"], said["dp"], said["microbatches"]) == (4, 1, 1, 2, 8)
    assert said["coordinates"] == {"pp": 1, "tp": 0, "dp": 1}
    assert (said["stages"], said["stage_ranks"]) == ([1], [0, 2, 4, 6])


def test_an_engine_without_its_map_switches_the_adapter_off(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(PipelineEngine, "_INSTRUCTION_MAP")
    deepspeed.ADAPTER.install(module.__name__)
    assert not hasattr(PipelineEngine.train_batch, "_ppdiag")
    assert "PipelineEngine has no _INSTRUCTION_MAP" in capsys.readouterr().err


def test_an_instruction_with_other_arguments_costs_the_names_only(
    module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    deepspeed.ADAPTER.install(module.__name__)
    ran: list[int] = []
    engine = PipelineEngine()
    engine._INSTRUCTION_MAP = {ForwardPass: lambda _engine, slot: ran.append(slot)}
    engine.train_batch([ForwardPass(slot=3)])
    assert ran == [3]
    assert "ppdiag: deepspeed: KeyError" in capsys.readouterr().err
