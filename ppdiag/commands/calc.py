"""``ppdiag calc``: the single formulas, with their derivation and source."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ppdiag.options import NumberRange, WholeSentences, size_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppdiag.analyzers.planning.formulas import Answer

    Command = Callable[..., Any]
    Decorator = Callable[[Command], Command]

COUNT = click.IntRange(1, 10**9)
PARAMETERS = click.IntRange(1, 10**15)
SIZE = click.IntRange(1, 10**6)
"""Of a layout; products of three of them stay within 64 bits."""
MODEL = "A model that ppdiag plan knows, instead of its numbers."


def _number(*names: str, default: int | None = None, kind: click.IntRange = COUNT, text: str) -> Decorator:
    if default is None:  # click takes a default of None for a value
        return click.option(*names, type=kind, required=True, help=text)
    return click.option(*names, type=kind, default=default, show_default=True, help=text)


def _pipeline(command: Command) -> Command:
    """-P and -V."""
    command = _number("-V", "--chunks", default=1, text="Stages a rank, V.")(command)
    return _number("-P", "--ranks", text="Ranks along the pipeline, P.")(command)


def _layout(command: Command) -> Command:
    """--tp and --pp."""
    command = _number("--pp", default=1, kind=SIZE, text="Pipeline-parallel size.")(command)
    return _number("--tp", default=1, kind=SIZE, text="Tensor-parallel size.")(command)


def _json(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


@click.group(cls=WholeSentences)
def calc() -> None:
    """Work out one formula: bubble, message, microbatches, accumulation, parameters, memory, volume."""


@calc.command()
@_pipeline
@_number("-M", "--microbatches", text="Microbatches of a step, M.")
@_json
def bubble(ranks: int, chunks: int, microbatches: int, *, as_json: bool) -> None:
    """How much of a step the schedule leaves idle."""
    from ppdiag.analyzers.planning import formulas  # noqa: PLC0415

    _print(formulas.bubble(ranks, chunks, microbatches), as_json=as_json)


@calc.command()
@_number("--micro-batch", default=1, text="Sequences of a microbatch.")
@_number("--seq", text="Tokens of a sequence.")
@_number("--hidden", text="Width of the model.")
@_number("--value-bytes", default=2, text="Bytes of one value.")
@_number("--tp", default=1, text="Tensor-parallel size; with sequence parallelism each rank sends its part.")
@click.option("--bandwidth", metavar="SIZE", type=size_bytes, default="25G", show_default=True, help="Bytes a second.")
@_json
def message(  # noqa: PLR0913  (one argument an option)
    *, micro_batch: int, seq: int, hidden: int, value_bytes: int, tp: int, bandwidth: int, as_json: bool
) -> None:
    """How large an activation is at a stage boundary, and how long it travels."""
    from ppdiag.analyzers.planning import formulas  # noqa: PLC0415

    if bandwidth < 1:
        raise click.BadParameter("must be at least 1 byte a second", param_hint="--bandwidth")
    answer = formulas.message(
        micro_batch=micro_batch, seq=seq, hidden=hidden, value_bytes=value_bytes, tensor=tp, bytes_per_s=bandwidth
    )
    _print(answer, as_json=as_json)


@calc.command()
@_pipeline
@click.option(
    "--bubble",
    "limit",
    type=NumberRange(1e-6, 1, max_open=True),
    default=0.1,
    show_default=True,
    help="Largest bubble, as a fraction of the total time.",
)
@click.option("--memory", metavar="SIZE", type=size_bytes, help="Bytes that a rank has for activations, e.g. 40G.")
@click.option(
    "--activation", metavar="SIZE", type=size_bytes, help="Bytes of one microbatch's activations on a rank, e.g. 2G."
)
@_json
def microbatches(  # noqa: PLR0913  (one argument an option)
    *, ranks: int, chunks: int, limit: float, memory: int | None, activation: int | None, as_json: bool
) -> None:
    """How many microbatches: enough for a small bubble, few enough for the memory."""
    from ppdiag.analyzers.planning import formulas  # noqa: PLC0415

    if (memory is None) != (activation is None) or activation == 0:
        raise click.UsageError("--memory and --activation go together, and an activation has at least 1 byte")
    answer = formulas.microbatches(
        ranks=ranks, chunks=chunks, bubble_limit=limit, budget_bytes=memory, per_microbatch_bytes=activation
    )
    _print(answer, as_json=as_json)


@calc.command()
@_number("--gpus", text="GPUs of the job.")
@_layout
@_number("--global-batch", text="Sequences of a step, over all GPUs.")
@_number("--micro-batch", default=1, text="Sequences of a microbatch.")
@_json
def accumulation(  # noqa: PLR0913  (one argument an option)
    *, gpus: int, tp: int, pp: int, global_batch: int, micro_batch: int, as_json: bool
) -> None:
    """Data-parallel size and accumulation steps of a layout."""
    from ppdiag.analyzers.planning import formulas  # noqa: PLC0415

    answer = formulas.accumulation(
        gpus=gpus, tensor=tp, pipeline=pp, global_batch=global_batch, micro_batch=micro_batch
    )
    _print(answer, as_json=as_json)


@calc.command()
@click.option("--model", help=MODEL)
@click.option("--count", type=PARAMETERS, help="Parameters of the model, e.g. 175000000000.")
@_layout
@_number("--dp", default=1, text="Data-parallel size.")
@_json
def parameters(  # noqa: PLR0913  (one argument an option)
    *, model: str | None, count: int | None, tp: int, pp: int, dp: int, as_json: bool
) -> None:
    """What weights, gradients and optimizer take, whole and on one rank."""
    from ppdiag.analyzers.planning import formulas  # noqa: PLC0415
    from ppdiag.analyzers.planning.models import MODELS  # noqa: PLC0415

    if (model is None) == (count is None):
        raise click.UsageError("give --model or --count")
    if model is not None and model not in MODELS:
        raise click.BadParameter(f"{model!r} is none of {', '.join(MODELS)}", param_hint="--model")
    number = MODELS[model].parameters if model is not None else count or 0
    _print(formulas.parameters(parameter_count=number, tensor=tp, pipeline=pp, data=dp), as_json=as_json)


@calc.command()
@_number("--layers", text="Layers of the model.")
@_number("--micro-batch", default=1, text="Sequences of a microbatch.")
@_number("--seq", text="Tokens of a sequence.")
@_number("--hidden", text="Width of the model.")
@_layout
@_json
def volume(  # noqa: PLR0913  (one argument an option)
    *, layers: int, micro_batch: int, seq: int, hidden: int, tp: int, pp: int, as_json: bool
) -> None:
    """How much tensor and pipeline parallelism send."""
    from ppdiag.analyzers.planning import formulas  # noqa: PLC0415

    answer = formulas.volume(layers=layers, micro_batch=micro_batch, seq=seq, hidden=hidden, tensor=tp, pipeline=pp)
    _print(answer, as_json=as_json)


@calc.command()
@click.option("--model", required=True, help="A model that ppdiag plan knows.")
@_layout
@_number("--dp", default=1, kind=SIZE, text="Data-parallel size.")
@_number("--ep", default=1, kind=SIZE, text="Data-parallel ranks over which the experts are spread.")
@_number("-V", "--chunks", default=1, kind=SIZE, text="Stages a rank, V.")
@_number("--micro-batch", default=1, kind=SIZE, text="Sequences of a microbatch.")
@_number("-M", "--microbatches", kind=SIZE, text="Microbatches of a step, M.")
@click.option("--schedule", help="Name of the schedule (default: 1f1b, or interleaved where V is above 1).")
@click.option("--recompute", is_flag=True, help="Every layer is computed again in its backward.")
@click.option("--zero1", is_flag=True, help="The optimizer's state is divided over DP.")
@click.option("--fsdp", is_flag=True, help="All of the state is divided over DP, as in torchtitan.")
@_json
def memory(*, model: str, schedule: str | None, fsdp: bool, as_json: bool, **sizes: int) -> None:
    """What the ranks of a pipeline hold at their peak, part by part."""
    from ppdiag.analyzers.planning import memory as ranks  # noqa: PLC0415
    from ppdiag.analyzers.planning.hardware import DEVICES, NETWORKS, Cluster  # noqa: PLC0415
    from ppdiag.analyzers.planning.layout import PLANNED, Job  # noqa: PLC0415
    from ppdiag.analyzers.planning.models import MODELS  # noqa: PLC0415
    from ppdiag.analyzers.planning.plan import wish  # noqa: PLC0415
    from ppdiag.analyzers.planning.rules import broken_rules  # noqa: PLC0415

    name = schedule or ("interleaved" if sizes["chunks"] > 1 else "1f1b")
    for option, value, table in (("--model", model, MODELS), ("--schedule", name, PLANNED)):
        if value not in table:
            raise click.BadParameter(f"{value!r} is none of {', '.join(table)}", param_hint=option)
    if MODELS[model].layers < sizes["pp"] * sizes["chunks"]:
        raise click.BadParameter(f"{MODELS[model].layers} layers do not fill them", param_hint="--pp x --chunks")
    # No device and no network hold a byte here.
    cluster = Cluster(sizes["tp"] * sizes["pp"] * sizes["dp"], 8, DEVICES["h100"], NETWORKS["ndr"])
    job = Job(MODELS[model], cluster, sizes["microbatches"] * sizes["micro_batch"] * sizes["dp"])
    layout = wish(
        tensor=sizes["tp"],
        pipeline=sizes["pp"],
        data=sizes["dp"],
        chunks=sizes["chunks"],
        micro=sizes["micro_batch"],
        schedule=name,
        expert=sizes["ep"],
        recompute=sizes["recompute"],
        zero1=sizes["zero1"],
    )
    # Devices and nodes are made up above: what depends on them is no news.
    broken = [words for rule, words in broken_rules(job, layout) if rule not in ("node", "memory")]
    _print(ranks.answer(job, layout, fsdp=fsdp, notes=broken), as_json=as_json)


def _print(answer: Answer, *, as_json: bool) -> None:
    from ppdiag.reports.calculation import render  # noqa: PLC0415

    click.echo(json.dumps(answer.to_dict(), indent=1) if as_json else render(answer))
