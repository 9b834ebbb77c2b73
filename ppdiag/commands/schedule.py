"""``ppdiag schedule``: draw any schedule, and say what it costs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ppdiag.diagnosis import percent
from ppdiag.errors import BadShape
from ppdiag.options import NumberRange, size_bytes
from ppdiag.outputs import writing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppdiag.analyzers.planning.simulate import Program, Times
    from ppdiag.reports.schedule_drawing import Picture

SCHEMA = "ppdiag.schedule/1"
MOST_OPS = 300_000
"""A schedule of more ops than this would take a minute to draw."""
COUNT = click.IntRange(1, 100_000)
RANKS = click.IntRange(1, 1024)
TIME = NumberRange(0, 1e9)


class Wish(NamedTuple):
    """What the options ask for, in the units of the user."""

    ranks: int
    chunks: int | None
    microbatches: int
    forward: float
    backward: float
    weight: float
    transfer: float
    factors: tuple[tuple[int, float], ...]
    layers: int | None
    boundary_bytes: int | None


class Drawn(NamedTuple):
    """One schedule that was simulated."""

    name: str
    title: str
    chunks: int
    work: Program
    times: Times
    layers: list[list[tuple[int, int]]] | None


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("-P", "--ranks", type=RANKS, default=4, show_default=True, help="Ranks along the pipeline, P.")
@click.option("-V", "--chunks", type=COUNT, help="Stages a rank, V, of the schedules that leave it open (default: 2).")
@click.option("-M", "--microbatches", type=COUNT, default=8, show_default=True, help="Microbatches of a step, M.")
@click.option("-F", "--forward", type=TIME, default=1.0, show_default=True, help="Time of a rank's forward.")
@click.option("-B", "--backward", type=TIME, default=2.0, show_default=True, help="Time of its whole backward.")
@click.option("-W", "--weight", type=TIME, help="The weight gradient's part of the backward (default: half).")
@click.option("--transfer", type=TIME, default=0.0, show_default=True, help="Time of a message between ranks.")
@click.option("--stage-factor", multiple=True, metavar="STAGE:FACTOR", help="A stage that takes FACTOR times as long.")
@click.option("--layers", type=COUNT, help="Layers of the model: say which of them each rank holds.")
@click.option(
    "--message-size", metavar="SIZE", type=size_bytes, help="Bytes of one activation at a boundary, e.g. 64M."
)
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Draw as SVG.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw as PNG.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Draw on a page on which they run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the drawing.")
def schedule(  # noqa: PLR0913  (one argument an option)
    names: tuple[str, ...],
    *,
    ranks: int,
    chunks: int | None,
    microbatches: int,
    forward: float,
    backward: float,
    weight: float | None,
    transfer: float,
    stage_factor: tuple[str, ...],
    layers: int | None,
    message_size: int | None,
    svg: Path | None,
    png: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Draw pipeline schedules side by side: who runs what when, and what stays idle.

    NAME is one or more of naive, gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-v, dualpipe-v, or all.
    """
    from ppdiag.reports import schedule_drawing  # noqa: PLC0415  (numpy and matplotlib load here)

    wish = Wish(ranks, chunks, microbatches, forward, backward, backward / 2 if weight is None else weight, transfer,
                _factors(stage_factor), layers, message_size)  # fmt: skip
    drawn = [_simulate(name, wish) for name in _chosen(names, wish)]
    pictures = [_picture(one, wish) for one in drawn]
    wanted = ((svg, schedule_drawing.svg), (png, schedule_drawing.png), (html, schedule_drawing.page))
    for path, draw in wanted:
        if path is not None:
            _check_size(pictures, schedule_drawing.MOST_BOXES)
            _write(path, draw(pictures))
    if as_json:
        click.echo(json.dumps({"schema": SCHEMA, "schedules": [_plain(one, wish) for one in drawn]}, indent=1))
    else:
        click.echo(schedule_drawing.text(pictures, width=shutil.get_terminal_size((100, 24)).columns))


def _chosen(names: Sequence[str], wish: Wish) -> list[str]:
    """The schedules to draw; of ``all`` those that have this shape."""
    from ppdiag.analyzers.planning import orders  # noqa: PLC0415

    names = [name.lower() for name in names]
    for name in names:
        if name not in (*orders.SCHEDULES, "all"):
            raise BadShape(f"{name!r} is no schedule; choose from {', '.join(orders.SCHEDULES)}, all")
    if "all" not in names:
        return list(dict.fromkeys(names)) or ["1f1b"]
    return [name for name in orders.SCHEDULES if not _refusal(name, wish)]


def _chunks(name: str, wish: Wish) -> int:
    from ppdiag.analyzers.planning import orders  # noqa: PLC0415

    return orders.SCHEDULES[name].chunks or wish.chunks or 2


def _refusal(name: str, wish: Wish) -> str | None:
    from ppdiag.analyzers.planning import orders  # noqa: PLC0415

    chunks = _chunks(name, wish)
    if wish.ranks * chunks * wish.microbatches * 3 > MOST_OPS:
        return f"P x V x M = {wish.ranks * chunks * wish.microbatches} is too large to draw"
    if wish.layers is not None and wish.layers < wish.ranks * chunks:
        return f"{wish.layers} layers do not fill {wish.ranks * chunks} stages"
    return orders.refusal(name, ranks=wish.ranks, chunks=chunks, microbatches=wish.microbatches)


def _factors(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for text in texts:
        stage, colon, factor = text.partition(":")
        try:
            pairs.append((int(stage), float(factor)))
        except ValueError:
            raise BadShape(f"cannot read {text!r}; write STAGE:FACTOR, for instance 2:1.5") from None
        if not colon or pairs[-1][0] < 0 or not 0 < pairs[-1][1] < 1e6:
            raise BadShape(f"{text!r}: stages count from 0, and a factor is above 0")
    return tuple(pairs)


def _simulate(name: str, wish: Wish) -> Drawn:
    import numpy as np  # noqa: PLC0415

    from ppdiag.analyzers.planning import orders, simulate  # noqa: PLC0415

    problem = _refusal(name, wish)
    if problem:
        raise BadShape(problem)
    if wish.forward + wish.backward <= 0 or wish.weight > wish.backward:
        raise BadShape("ops must take some time, and the weight gradient is a part of the backward")
    chunks, known = _chunks(name, wish), orders.SCHEDULES[name]
    stages = wish.ranks * chunks
    scale_SW = np.full((stages, 1), 1.0 / chunks)
    for stage, factor in wish.factors:
        if stage >= stages:
            raise BadShape(f"{known.title} of this shape has stages 0 to {stages - 1}, not {stage}")
        scale_SW[stage] *= factor
    backward, transfer_W = wish.backward - wish.weight, np.array([wish.transfer])
    durations = simulate.Durations(wish.forward * scale_SW, backward * scale_SW, wish.weight * scale_SW, transfer_W)
    work = simulate.program(name, ranks=wish.ranks, chunks=chunks, microbatches=wish.microbatches)
    counts = orders.layers_of_stages(wish.layers, stages) if wish.layers else None
    held = orders.layer_map(counts, orders.stage_ranks(name, wish.ranks, chunks)) if counts else None
    title = f"{known.title}: P={wish.ranks} V={chunks} M={wish.microbatches}"
    return Drawn(name, title, chunks, work, simulate.run(work, durations), held)


def _picture(one: Drawn, wish: Wish) -> Picture:
    from ppdiag.reports.schedule_drawing import Box, Picture  # noqa: PLC0415
    from ppdiag.reports.words import rank_list  # noqa: PLC0415

    starts, ends = one.times.start_OW[:, 0].tolist(), one.times.end_OW[:, 0].tolist()
    boxes = tuple(
        Box(rank, op.kind.name[0], op.stage // wish.ranks, op.microbatch, start, end)
        for op, rank, start, end in zip(one.work.ops, one.work.rank_O.tolist(), starts, ends, strict=True)
    )
    layers = tuple(rank_list([n for a, b in own for n in range(a, b + 1)]) for own in one.layers or ())
    return Picture(one.title, wish.ranks, one.chunks, boxes, tuple(_facts(one, wish)), layers)


def _facts(one: Drawn, wish: Wish) -> list[tuple[str, str]]:
    from ppdiag.reports.words import size  # noqa: PLC0415

    times = one.times
    facts = [
        ("length", f"{times.makespan_W[0]:g}"),
        ("bubble / total", percent(times.bubble_fraction_W[0])),
        ("bubble / ideal", percent(times.bubble_over_ideal_W[0])),
    ]
    if abs(times.span_bubble_fraction_W[0] - times.bubble_fraction_W[0]) > 1e-9:
        facts.append(("from a rank's own first op to its last", percent(times.span_bubble_fraction_W[0])))
    facts.append(("activations kept, in microbatches of a rank", _kept(one.work.peak_R, one.chunks)))
    if one.work.peak_until_weight_R != one.work.peak_R:
        facts.append(("with those that wait for their W", _kept(one.work.peak_until_weight_R, one.chunks)))
    facts.append(("messages", f"{one.work.messages}"))
    if wish.boundary_bytes is not None:
        facts.append(("bytes sent", size(one.work.messages * wish.boundary_bytes)))
    return facts


def _kept(peak_R: Sequence[int], chunks: int) -> str:
    """Peaks of the ranks, in microbatches of all their stages."""
    return ", ".join(f"{peak / chunks:g}" for peak in peak_R)


def _plain(one: Drawn, wish: Wish) -> dict[str, Any]:
    times = one.times
    ops = zip(one.work.ops, one.work.rank_O.tolist(), times.start_OW[:, 0].tolist(), times.end_OW[:, 0].tolist(),
              strict=True)  # fmt: skip
    return {
        "name": one.name,
        "title": one.title,
        "ranks": wish.ranks,
        "chunks": one.chunks,
        "microbatches": wish.microbatches,
        "length": float(times.makespan_W[0]),
        "bubble_of_total": float(times.bubble_fraction_W[0]),
        "bubble_of_ideal": float(times.bubble_over_ideal_W[0]),
        "bubble_of_own_span": float(times.span_bubble_fraction_W[0]),
        "peak_stage_activations": list(one.work.peak_R),
        "peak_stage_activations_until_weight": list(one.work.peak_until_weight_R),
        "messages": one.work.messages,
        "bytes": None if wish.boundary_bytes is None else one.work.messages * wish.boundary_bytes,
        "layers": one.layers,
        "ops": [
            {"rank": rank, "kind": op.kind.name[0], "stage": op.stage, "microbatch": op.microbatch, "start": start,
             "end": end}
            for op, rank, start, end in ops
        ],
    }  # fmt: skip


def _check_size(pictures: Sequence[Picture], most: int) -> None:
    count = sum(len(picture.boxes) for picture in pictures)
    if count > most:
        raise BadShape(f"{count} ops are too many for one drawing; {most} are the most")


def _write(path: Path, content: str | bytes) -> None:
    data = content.encode() if isinstance(content, str) else content
    with writing(path):
        path.write_bytes(data)
