"""``ppdiag plan``: which layouts of a model on a cluster fit, and how fast each would be."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ppdiag.errors import BadShape
from ppdiag.options import NumberRange, pick, size_bytes
from ppdiag.outputs import writing

if TYPE_CHECKING:
    from ppdiag.analyzers.planning.hardware import Cluster
    from ppdiag.analyzers.planning.layout import Job, Layouts
    from ppdiag.analyzers.planning.models import Model
    from ppdiag.analyzers.planning.plan import Found

SCHEMA = "ppdiag.plan/1"
NOTHING_FITS = 3
"""Exit code where no layout, or not the wished-for one, is possible."""
COUNT = click.IntRange(1, 10**7)
RATE = NumberRange(1, 1e18)
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "experts", "experts_per_token")
NEEDED = ("layers", "hidden", "heads", "vocab", "seq")
WISHES = {"tp": "tensor", "pp": "pipeline", "dp": "data", "v": "chunks", "ep": "expert", "micro": "micro"}


@click.command()
@click.option("--model", help="A known model; --models lists them. Its sizes may be changed by the options below.")
@click.option("--models", "list_models", is_flag=True, help="List the known models, devices and networks.")
@click.option("--layers", type=COUNT, help="Transformer layers.")
@click.option("--hidden", type=COUNT, help="Width of the model.")
@click.option("--heads", type=COUNT, help="Attention heads.")
@click.option("--kv-heads", type=COUNT, help="Key/value heads (default: as many as heads).")
@click.option("--ffn", type=COUNT, help="Inner width of the MLP (default: 4 times the width, without a gate).")
@click.option("--vocab", type=COUNT, help="Tokens of the vocabulary.")
@click.option("--seq", type=COUNT, help="Tokens of a sequence.")
@click.option("--experts", type=click.IntRange(0, 10**5), help="Experts of a layer.")
@click.option("--experts-per-token", type=COUNT, help="Experts that a token goes through (default: 2).")
@click.option("--gpus", type=click.IntRange(1, 10**6), help="GPUs of the job.")
@click.option("--gpus-per-node", type=click.IntRange(1, 1024), default=8, show_default=True, help="GPUs of a node.")
@click.option("--device", default="h100", show_default=True, help="A known GPU.")
@click.option("--device-memory", metavar="SIZE", type=size_bytes, help="Its memory, e.g. 80G (10^9 bytes).")
@click.option("--device-flops", type=RATE, help="Its dense bf16 peak in flop/s.")
@click.option("--nvlink", metavar="SIZE", type=size_bytes, help="Bytes a second between GPUs of a node, one way.")
@click.option("--network", default="ndr", show_default=True, help="A known network between nodes.")
@click.option("--bandwidth", metavar="SIZE", type=size_bytes, help="Its bytes a second, one way, for each GPU.")
@click.option("--global-batch", type=COUNT, help="Sequences of a step.")
@click.option("--micro-batch", type=COUNT, help="Sequences of a microbatch (default: 1, 2, 4, 8 and 16 are tried).")
@click.option("--schedule", "schedules", multiple=True, help="Schedules to plan with (default: 1f1b and interleaved).")
@click.option("--efficiency", type=NumberRange(0.01, 1), default=0.6, show_default=True,
              help="Share of the peak that kernels reach while they run.")  # fmt: skip
@click.option(
    "--reserve",
    metavar="SIZE",
    type=size_bytes,
    default="4G",
    show_default=True,
    help="Memory that is not for tensors.",
)
@click.option("--no-flash", is_flag=True, help="Attention keeps its score matrices.")
@click.option("--any-split", is_flag=True, help="Stages may differ by a layer anywhere, as torchtitan allows.")
@click.option("--try", "wished", metavar="tp=8,pp=4,…", help="One layout: what it costs, or each rule that it breaks.")
@click.option("--top", type=click.IntRange(1, 16), default=8, show_default=True, help="Plans to show.")
@click.option("--figure", type=click.Path(dir_okay=False, path_type=Path), help="Draw memory against time as SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(  # noqa: PLR0913  (one argument an option)
    *,
    list_models: bool,
    wished: str | None,
    top: int,
    figure: Path | None,
    as_json: bool,
    schedules: tuple[str, ...],
    micro_batch: int | None,
    **options: Any,  # noqa: ANN401  (the sizes, each of its own type)
) -> None:
    """List the layouts of a model on a cluster that fit, the fastest first.

    It begins with whether a pipeline is needed at all. A layout is TP x PP x DP with V stages a rank.

    \b
        ppdiag plan --model llama3-70b --gpus 512 --global-batch 1024
    """  # noqa: D301  (\b: click does not wrap what follows)
    if list_models:
        click.echo(_known())
        return
    job = _job(options)
    if wished is not None:
        sys.exit(_try(job, wished, as_json=as_json))
    found = _search(job, schedules, micro_batch)
    if figure is not None:
        _draw(job, found, figure)
    click.echo(_json(job, found, top) if as_json else _text(job, found, top))
    if not found.plans:
        sys.exit(NOTHING_FITS)


def _known() -> str:
    from ppdiag.analyzers.planning.hardware import DEVICES, NETWORKS  # noqa: PLC0415
    from ppdiag.analyzers.planning.models import MODELS  # noqa: PLC0415

    lines = [f"{name:<18}{model.parameters / 1e9:8.1f} B parameters" for name, model in MODELS.items()]
    return "\n".join([*lines, "", f"devices   {', '.join(DEVICES)}", f"networks  {', '.join(NETWORKS)}"])


def _job(options: dict[str, Any]) -> Job:
    from ppdiag.analyzers.planning.layout import Job  # noqa: PLC0415

    missing = [f"--{name.replace('_', '-')}" for name in ("gpus", "global_batch") if options[name] is None]
    if missing:
        model = [] if options["model"] or options["layers"] else ["--model"]
        raise click.UsageError(f"give {' and '.join(model + missing)}; the example is in --help")
    return Job(
        model=_model(options),
        cluster=_cluster(options),
        global_batch=options["global_batch"],
        efficiency=options["efficiency"],
        reserve_bytes=options["reserve"],
        flash=not options["no_flash"],
        any_split=options["any_split"],
    )


def _model(options: dict[str, Any]) -> Model:
    from ppdiag.analyzers.planning.models import MODELS, Model  # noqa: PLC0415

    model: Model
    given = {name: options[name] for name in SIZES if options[name] is not None}
    name = options["model"]
    if name is not None:
        base = pick(MODELS, name, "model")
        model = dataclasses.replace(base, **given)
    else:
        missing = [f"--{size}" for size in NEEDED if size not in given]
        if missing:
            raise click.UsageError(f"give --model, or also {', '.join(missing)}")
        sizes = {"kv_heads": given["heads"], "ffn": 4 * given["hidden"], **given}
        model = Model(head_dim=given["hidden"] // given["heads"], gated="ffn" in given, **sizes)
    if model.experts and not model.experts_per_token:
        model = dataclasses.replace(model, experts_per_token=min(2, model.experts))
    _check_model(model)
    return model


def _check_model(model: Model) -> None:
    if model.heads % model.kv_heads:
        raise BadShape(f"{model.heads} heads cannot share {model.kv_heads} key/value heads evenly")
    if model.head_dim < 1:
        raise BadShape(f"{model.heads} heads are more than the width of {model.hidden}")
    if model.experts_per_token > model.experts:
        raise BadShape(f"a token cannot go through {model.experts_per_token} of {model.experts} experts")


def _cluster(options: dict[str, Any]) -> Cluster:
    from ppdiag.analyzers.planning.hardware import DEVICES, NETWORKS, Cluster  # noqa: PLC0415
    from ppdiag.reports.words import size  # noqa: PLC0415

    device = pick(DEVICES, options["device"], "device")
    changes = {"memory_bytes": "device_memory", "flops_per_s": "device_flops", "nvlink_bytes_per_s": "nvlink"}
    device = dataclasses.replace(
        device, **{own: options[name] for own, name in changes.items() if options[name] is not None}
    )
    network = pick(NETWORKS, options["network"], "network")
    if options["bandwidth"] is not None:
        network = dataclasses.replace(network, bytes_per_s=float(options["bandwidth"]), per_gpu=True)
    if min(device.memory_bytes, device.nvlink_bytes_per_s, network.bytes_per_s) <= 0:
        raise BadShape("memory and bandwidths must be above 0")
    if device.memory_bytes <= options["reserve"]:
        memory, reserve = size(device.memory_bytes), size(options["reserve"])
        raise BadShape(f"a device of {memory} has no room beside the {reserve} of --reserve; 80 GB are written 80G")
    return Cluster(options["gpus"], min(options["gpus"], options["gpus_per_node"]), device, network)


def _search(job: Job, schedules: tuple[str, ...], micro_batch: int | None) -> Found:
    from ppdiag.analyzers.planning.layout import PLANNED  # noqa: PLC0415
    from ppdiag.analyzers.planning.plan import search  # noqa: PLC0415

    for name in schedules:
        pick(dict.fromkeys(PLANNED), name, "schedule to plan with")
    return search(job, schedules=schedules or ("1f1b", "interleaved"), micro=micro_batch)


def _try(job: Job, text: str, *, as_json: bool) -> int:
    """Say what one layout costs, or which rules it breaks.

    Returns:
        The exit code.
    """
    from ppdiag.analyzers.planning.plan import evaluate, search  # noqa: PLC0415
    from ppdiag.analyzers.planning.rules import broken_rules  # noqa: PLC0415
    from ppdiag.reports.plan_table import compared, details, table  # noqa: PLC0415

    layout = _wish(job, text)
    broken = broken_rules(job, layout)
    plans = [] if broken else evaluate(job, layout)
    if as_json:
        rows = [{"rule": name, "why": words} for name, words in broken]
        click.echo(json.dumps({"schema": SCHEMA, "broken": rows, "plans": [one.to_dict() for one in plans]}, indent=1))
    elif broken:
        click.echo(f"{text} is not possible:")
        click.echo("\n".join(f"  {name}: {words}" for name, words in broken))
    else:
        first = search(job).plans
        place = [compared(plans[0], first[0])] if first else []
        click.echo("\n\n".join([table(plans), details(plans[0]), *place]))
    return NOTHING_FITS if broken else 0


def _wish(job: Job, text: str) -> Layouts:
    from ppdiag.analyzers.planning.layout import PLANNED  # noqa: PLC0415
    from ppdiag.analyzers.planning.plan import LONGEST, MOST_STAGES_IN_ALL, wish  # noqa: PLC0415

    sizes: dict[str, Any] = {"tensor": 1, "pipeline": 1, "chunks": 1, "micro": 1, "recompute": False, "zero1": True}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key == "schedule":
            pick(dict.fromkeys(PLANNED), value, "schedule to plan with")
            sizes["schedule"] = value
        elif key in ("recompute", "zero1") and value in ("0", "1"):
            sizes[key] = value == "1"
        elif key in WISHES and value.isdecimal() and 0 < int(value) < 10**7:
            sizes[WISHES[key]] = int(value)
        else:
            keys = ", ".join([*WISHES, "schedule", "recompute", "zero1"])
            raise BadShape(f"cannot read {part!r} of --try; write KEY=NUMBER, KEY one of {keys}")
    if sizes["pipeline"] > LONGEST or sizes["pipeline"] * sizes["chunks"] > MOST_STAGES_IN_ALL:
        raise BadShape(f"pipelines of up to {LONGEST} ranks and {MOST_STAGES_IN_ALL} stages are planned")
    sizes.setdefault("schedule", "interleaved" if sizes["chunks"] > 1 else "1f1b")
    sizes.setdefault("data", max(1, job.cluster.gpus // (sizes["tensor"] * sizes["pipeline"])))
    return wish(**sizes)


def _draw(job: Job, found: Found, path: Path) -> None:
    from ppdiag.analyzers.planning.rules import usable_bytes  # noqa: PLC0415
    from ppdiag.reports.plan_figure import draw  # noqa: PLC0415

    with writing(path):
        path.write_text(draw(found.plans, usable_bytes=usable_bytes(job)), encoding="utf-8")


def _json(job: Job, found: Found, top: int) -> str:
    return json.dumps(
        {
            "schema": SCHEMA,
            "model": dataclasses.asdict(job.model),
            "parameters": job.model.parameters,
            "cluster": dataclasses.asdict(job.cluster),
            "global_batch": job.global_batch,
            "efficiency": job.efficiency,
            "candidates": found.candidates,
            "feasible": found.feasible,
            "without_pipeline": [dataclasses.asdict(one) for one in found.alternatives],
            "plans": [one.to_dict() for one in found.plans[:top]],
        },
        indent=1,
    )


def _text(job: Job, found: Found, top: int) -> str:
    from ppdiag.reports import plan_table  # noqa: PLC0415

    model, cluster = job.model, job.cluster
    nodes = f"{cluster.gpus} GPUs, {cluster.gpus_per_node} a node"
    head = f"{model.parameters / 1e9:.1f} B parameters, {nodes}; global batch {job.global_batch} of {model.seq} tokens"
    blocks = [head, plan_table.alternatives(found)]
    blocks.append(f"{found.feasible} of {found.candidates} layouts are possible.")
    if found.plans:
        blocks += [
            plan_table.table(found.plans[:top]),
            plan_table.legend(experts=bool(model.experts)),
            plan_table.details(found.plans[0]),
        ]
    else:
        blocks.append("Try --try tp=…,pp=… to see which rules a layout breaks.")
    return "\n\n".join(blocks)
