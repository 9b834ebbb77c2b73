"""The adapter of Megatron-Core on stand-ins for its modules: what its jobs on CPU (``tests/e2e``) cannot reach."""

# ruff: noqa: ARG001, FBT002  (parameters as Megatron-Core has them)
from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.hooks import process_group
from ppdiag.hooks.adapters import brackets, megatron
from ppdiag.hooks.recorder import RECORDER
from ppdiag.model import SPAN_FIELDS, Flag, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = [name for name, _, _ in SPAN_FIELDS]
PACKAGE = "megatron.core.pipeline_parallel"
RANK, RANKS = 1, 2
FIRST, SECOND = SimpleNamespace(config=None), SimpleNamespace(config=None)
"""Two chunks of a model: stages 1 and 3 of 4."""


class Group:
    """A process group of two."""

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        self._rank, self.ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.ranks)


def parallel_state() -> ModuleType:
    module: Any = ModuleType("megatron.core.parallel_state")
    places = {"pipeline_model_parallel": (RANK, RANKS), "tensor_model_parallel": (0, 1), "data_parallel": (3, 4)}
    for words, (rank, size) in places.items():
        setattr(module, f"get_{words}_rank", lambda rank=rank: rank)
        setattr(module, f"get_{words}_world_size", lambda size=size: size)
    module.get_pipeline_model_parallel_group = lambda: Group(RANK, (6, 7))
    return module


def schedules() -> ModuleType:
    """Schedules that do what ``plan`` says with the functions of their module."""
    module: Any = ModuleType(f"{PACKAGE}.schedules")
    module.forward_step = lambda _function, _data, _model, *_args, output, **_kwargs: (output, 0)
    module.backward_step = lambda _input, _output, gradient, *_args: gradient
    for name in megatron.SCHEDULES:
        setattr(module, name, lambda *, plan, **_kwargs: plan(module))
    return module


def combined() -> ModuleType:
    module: Any = ModuleType(f"{PACKAGE}.combined_1f1b")

    def combined_forward_backward_step(*args: Any, output: Any, post_forward: Any = None, **_kwargs: Any) -> Any:
        gradient = object() if args[6] is not None else None
        return (post_forward(output) if post_forward else output), 0, gradient

    module.combined_forward_backward_step = combined_forward_backward_step
    return module


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    distributed = SimpleNamespace(get_process_group_ranks=lambda group: group.ranks)
    found = SimpleNamespace(schedules=schedules(), combined=combined(), state=parallel_state())
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", distributed)
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    for module in vars(found).values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(RECORDER, "active", True)
    monkeypatch.setattr(RECORDER, "step_ended", False)
    monkeypatch.setattr(RECORDER, "_facts", {})
    monkeypatch.setattr(megatron, "_wrappers", brackets.Wrappers(megatron.PROBE))
    yield found
    megatron.ADAPTER.uninstall()
    RECORDER.spans.clear()
    RECORDER.lines.clear()
    process_group.labels.clear()


def run(modules: SimpleNamespace, plan: Any, *, pipelining: str = "with_interleaving", **kwargs: Any) -> None:
    schedule = getattr(modules.schedules, f"forward_backward_pipelining_{pipelining}")
    schedule(plan=plan, model=kwargs.pop("model", [FIRST, SECOND]), num_microbatches=4, **kwargs)


def found() -> list[tuple[Kind, int, int, int]]:
    """(kind, stage, chunk, microbatch) of what was recorded, without the bracket of the schedule."""
    spans = [dict(zip(NAMES, span, strict=True)) for span in RECORDER.spans]
    rows = [(Kind(span["kind"]), span["stage"], span["chunk"], span["microbatch"]) for span in spans]
    assert rows[-1][0] == Kind.SCHEDULE
    return rows[:-1]


def facts() -> dict[str, Any]:
    return {line["name"]: line["value"] for line in RECORDER.lines if line["type"] == "fact"}


def test_a_backward_has_the_label_of_the_forward_whose_output_it_is_given(modules: SimpleNamespace) -> None:
    megatron.ADAPTER.install(modules.schedules.__name__)
    outputs = [object(), object()]

    def plan(module: Any) -> None:
        for microbatch, model in ((0, FIRST), (2, SECOND)):
            module.forward_step(None, None, model, current_microbatch=microbatch, output=outputs[model is SECOND])
        for output in reversed(outputs):
            module.backward_step([None], [output], object(), None)

    run(modules, plan)
    rows = [(Kind.FORWARD, 1, 0, 0), (Kind.FORWARD, 3, 1, 2), (Kind.BACKWARD, 3, 1, 2), (Kind.BACKWARD, 1, 0, 0)]
    assert found() == rows
    assert process_group.labels[id(outputs[0])] == (0, 1, 0, int(Payload.ACTIVATION), 0)
    assert id(outputs[1]) not in process_group.labels  # the loss is not sent


def forward_of_0_8(
    forward_step_func,
    data_iterator,
    model,
    num_microbatches,
    input_tensor,
    forward_data_store,
    config,
    collect_non_loss_data=False,
    checkpoint_activations_microbatch=None,
    is_first_microbatch=False,
    current_microbatch=None,
):
    return input_tensor, (num_microbatches, is_first_microbatch)


def forward_of_0_19(
    forward_step_func,
    data_iterator,
    model,
    num_microbatches,
    input_tensor,
    forward_data_store,
    config,
    cp_group_size,
    collect_non_loss_data=False,
    checkpoint_activations_microbatch=None,
    is_first_microbatch=False,
    current_microbatch=None,
    vp_stage=None,
    is_last_stage=True,
):
    return input_tensor, (num_microbatches, is_first_microbatch, cp_group_size, vp_stage, is_last_stage)


def backward_of_0_19(input_tensor, output_tensor, output_tensor_grad, config):
    return input_tensor


FIRST_OUTPUT, SECOND_OUTPUT, GRADIENT = object(), object(), object()


@pytest.mark.parametrize(
    ("forward", "extra", "rest"),
    [(forward_of_0_8, (), (4, True)), (forward_of_0_19, (1,), (4, True, 1, None, True))],
)
def test_the_arguments_of_each_version_reach_the_framework_as_they_were_given(
    modules: SimpleNamespace, forward: Any, extra: tuple[Any, ...], rest: tuple[Any, ...]
) -> None:
    modules.schedules.forward_step = forward
    modules.schedules.backward_step = backward_of_0_19
    megatron.ADAPTER.install(modules.schedules.__name__)

    def plan(module: Any) -> None:
        args = (None, None, SECOND, 4, [FIRST_OUTPUT], [], None, *extra)
        found = module.forward_step(*args, is_first_microbatch=True, current_microbatch=2)
        assert found == ([FIRST_OUTPUT], rest)
        assert module.backward_step([GRADIENT], [FIRST_OUTPUT], None, None) == [GRADIENT]

    run(modules, plan)
    assert found() == [(Kind.FORWARD, 3, 1, 2), (Kind.BACKWARD, 3, 1, 2)]
    assert process_group.labels[id(GRADIENT)] == (2, 3, 1, int(Payload.GRADIENT), 0)


@pytest.mark.parametrize(
    "outputs",
    [
        [FIRST_OUTPUT, SECOND_OUTPUT],
        [None, FIRST_OUTPUT, SECOND_OUTPUT],
        {"encoder": FIRST_OUTPUT, "decoder": SECOND_OUTPUT},
        [{"encoder": FIRST_OUTPUT, "decoder": [SECOND_OUTPUT]}],
    ],
)
def test_an_output_of_several_tensors_is_named_in_all_of_them(modules: SimpleNamespace, outputs: Any) -> None:
    megatron.ADAPTER.install(modules.schedules.__name__)

    def plan(module: Any) -> None:
        module.forward_step(None, None, FIRST, current_microbatch=3, output=outputs)
        labels = {process_group.labels.pop(id(tensor)) for tensor in (FIRST_OUTPUT, SECOND_OUTPUT)}
        assert labels == {(3, 1, 0, int(Payload.ACTIVATION), 0)}
        module.backward_step([None], outputs, outputs, None)

    run(modules, plan)
    assert found() == [(Kind.FORWARD, 1, 0, 3), (Kind.BACKWARD, 1, 0, 3)]
    labels = {process_group.labels[id(tensor)] for tensor in (FIRST_OUTPUT, SECOND_OUTPUT)}
    assert labels == {(3, 1, 0, int(Payload.GRADIENT), 0)}


def test_receives_are_named_in_the_order_of_the_forwards_and_of_the_backwards_of_the_rank(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    p2p: Any = ModuleType(f"{PACKAGE}.p2p_communication")
    p2p._p2p_ops = p2p._batched_p2p_ops = lambda **_kwargs: None
    monkeypatch.setitem(sys.modules, p2p.__name__, p2p)
    megatron.ADAPTER.install(modules.schedules.__name__)
    megatron.ADAPTER.install(p2p.__name__)
    tensors = [(object(), object()) for _ in range(9)]  # one more than there are

    def plan(_module: Any) -> None:
        for activation, gradient in tensors:
            p2p._p2p_ops(tensor_recv_prev=activation, tensor_recv_next=gradient)

    run(modules, plan)
    named = [tuple(process_group.labels[id(tensor)] for tensor in pair) for pair in tensors]
    # rank 1 of 2: all of its forwards receive, its chunk 0 is stage 1, its chunk 1 stage 3, the last
    order = [(m, chunk) for group in ((0, 1), (2, 3)) for chunk in (0, 1) for m in group]
    activations = [(m, (1, 3)[chunk], chunk, int(Payload.ACTIVATION), 0) for m, chunk in order]
    assert [activation for activation, _ in named] == [*activations, (-1, -1, -1, int(Payload.ACTIVATION), 0)]
    gradients = [(m, 1, 0, int(Payload.GRADIENT), 0) for m in range(4)]
    assert [gradient for _, gradient in named] == [*gradients, *[(-1, -1, -1, int(Payload.GRADIENT), 0)] * 5]


def test_a_combined_step_is_a_forward_and_a_backward_of_one_time(modules: SimpleNamespace) -> None:
    megatron.ADAPTER.install(modules.schedules.__name__)
    megatron.ADAPTER.install(modules.combined.__name__)
    sent: list[Any] = []
    outputs = [object(), object()]

    def send(output: Any) -> Any:
        sent.append(process_group.labels.get(id(output)))
        return output

    def plan(_module: Any) -> None:
        step = modules.combined.combined_forward_backward_step
        nothing = [None] * 6
        step(None, None, FIRST, 4, None, [], *nothing, current_microbatch=0, output=outputs[0], post_forward=send)
        both = (SECOND, None, outputs[0], None, None)
        step(None, None, FIRST, 4, None, [], *both, current_microbatch=1, output=outputs[1], post_forward=send)

    run(modules, plan)
    assert found() == [(Kind.FORWARD, 1, 0, 0), (Kind.FORWARD, 1, 0, 1), (Kind.BACKWARD, 1, 0, 0)]
    assert sent == [(microbatch, 1, 0, int(Payload.ACTIVATION), 0) for microbatch in (0, 1)]
    forward, backward = RECORDER.spans[1:3]
    assert forward[1] == backward[1]  # the same end


def test_an_evaluation_is_flagged(modules: SimpleNamespace) -> None:
    megatron.ADAPTER.install(modules.schedules.__name__)

    def plan(module: Any) -> None:
        module.forward_step(None, None, FIRST, current_microbatch=0, output=object())

    run(modules, plan, forward_only=True)
    assert [span[NAMES.index("flags")] for span in RECORDER.spans] == [Flag.EVALUATION, Flag.EVALUATION]


def test_the_grid_is_read_from_parallel_state(modules: SimpleNamespace) -> None:
    megatron.ADAPTER.install(modules.schedules.__name__)
    run(modules, lambda _module: None)
    said = facts()
    assert (said["pp"], said["vpp"], said["tp"], said["dp"]) == (2, 2, 1, 4)
    assert said["coordinates"] == {"pp": 1, "tp": 0, "dp": 3}
    assert (said["stages"], said["stage_ranks"]) == ([1, 3], [6, 7, 6, 7])


def test_groups_that_the_caller_gives_win_over_parallel_state(modules: SimpleNamespace) -> None:
    megatron.ADAPTER.install(modules.schedules.__name__)
    groups = SimpleNamespace(tp=Group(1, (2, 3)), dp=Group(0, (3,)), pp=Group(0, (3, 5)))
    communicator = SimpleNamespace(pp_group=groups.pp)
    given = {"pg_collection": groups, "p2p_communicator": communicator}
    run(modules, lambda _module: None, pipelining="without_interleaving", model=FIRST, **given)
    said = facts()
    assert (said["schedule"], said["pp"], said["vpp"], said["tp"], said["dp"]) == ("1F1B", 2, 1, 2, 1)
    assert said["coordinates"] == {"pp": 0, "tp": 1, "dp": 0}
    assert said["stage_ranks"] == [3, 5]


def test_a_schedule_that_raises_leaves_the_adapter_as_it_was(modules: SimpleNamespace) -> None:
    megatron.ADAPTER.install(modules.schedules.__name__)

    def plan(_module: Any) -> None:
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        run(modules, plan)
    assert RECORDER.spans[-1][NAMES.index("flags")] == Flag.FAILED
    assert RECORDER.threads.state.named == 0
    assert not megatron._calls


def test_a_function_that_is_gone_switches_the_adapter_off_and_the_job_runs_as_without_it(
    modules: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    del modules.schedules.backward_step
    before = dict(vars(modules.schedules))
    megatron.ADAPTER.install(modules.schedules.__name__)
    assert dict(vars(modules.schedules)) == before
    assert "schedules has no backward_step" in capsys.readouterr().err


def test_a_grid_that_cannot_be_read_costs_the_names_only(
    modules: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron.ADAPTER.install(modules.schedules.__name__)
    del modules.state.get_data_parallel_rank
    ran: list[bool] = []
    run(modules, lambda _module: ran.append(True))
    run(modules, lambda _module: ran.append(True))
    assert ran == [True, True]
    assert not RECORDER.spans
    assert capsys.readouterr().err.count("ppdiag: megatron.core: AttributeError") == 1
