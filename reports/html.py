"""The diagnosis as one self-contained page: no network, and nothing that the record says can run in it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from ppdiag.diagnosis import Place, Why, percent
from ppdiag.model import Kind
from ppdiag.reports import figures, timeline, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ppdiag.diagnosis import Diagnosis, RankResult, StageResult, Where
    from ppdiag.origins import Workers
    from ppdiag.reports.figures import Theme
    from ppdiag.reports.words import Word

MAX_ORIGINS = 12
"""Rows of the table of origins."""
MAX_REPLICAS, MAX_POSITIONS = 128, 64
"""Rows and columns of the map of slow ranks."""
DARKEST = 0.5
"""A rank that slows the step by this share or more has the map's darkest cell."""
MAX_RANKS = 1024
"""Rows of the table of ranks; of more ranks the most idle ones are shown."""
BAR_UNITS = 1000
FILTERS = (
    "duration",
    "known_duration",
    "size",
    "rough_percent",
    "expected_gain",
    "rank_list",
    "what_first",
    "count_of",
    "origin_name",
)
"""Words that the page's template uses."""
KINDS = {
    Kind.FORWARD: "F, forward",
    Kind.BACKWARD: "B, backward",
    Kind.WEIGHT: "W, weight gradient",
    Kind.OPTIMIZER: "optimizer",
}


class Cell(NamedTuple):
    """One rank in the map of slow ranks."""

    title: str
    text: str
    opacity: str


class Segment(NamedTuple):
    """A piece of a stacked bar, in ``BAR_UNITS`` of the whole step."""

    css: str
    start: float
    length: float
    title: str


def write(diagnosis: Diagnosis, path: str | os.PathLike[str]) -> None:
    """Write the page; ``path`` holds either the old file or the whole new one at any time.

    Raises:
        OSError: the file cannot be written.
    """
    text = page(diagnosis)
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def page(diagnosis: Diagnosis) -> str:
    """The page's HTML."""
    style, script = _asset("page.css"), _asset("timeline.js")
    facts, intervals = _timeline(diagnosis)
    # The most idle ranks; in order of rank again, because that is how one looks a rank up.
    ranks = sorted(sorted(diagnosis.ranks, key=lambda r: -r.idle_fraction)[:MAX_RANKS], key=lambda r: r.rank)
    return _environment().get_template("page.html").render(
        d=diagnosis,
        style=Markup(style),  # noqa: S704  (our own file)
        script=Markup(script),  # noqa: S704  (our own file)
        policy=_policy(style, script),
        facts=facts,
        intervals=intervals,
        drawn=_drawn(diagnosis),
        ranks=ranks,
        ranks_left_out=len(diagnosis.ranks) - len(ranks),
        charts=list(_charts(diagnosis)),
        heat=_heat(diagnosis.workers),
        origins=diagnosis.root_cause.origins[:MAX_ORIGINS] if diagnosis.root_cause else (),
        has_weight=any(stage.weight_s > 0 for stage in diagnosis.stages),
        has_memory=_has_memory(diagnosis.stages) or _has_memory(ranks),
    )  # fmt: skip


def _heat(workers: Workers | None) -> list[list[Cell]]:
    """The map of slow ranks, replicas by positions, as far as it is drawn; empty where there is one replica."""
    if workers is None or len(workers.ranks) < 2:
        return []
    return [
        [
            Cell(
                title=f"rank {rank}: replica {d}, position {p}, {slowdown:.2f}",
                text=f"{slowdown:.2f}",
                opacity=f"{min(1.0, max(0.0, (slowdown - 1) / DARKEST)):.2f}",
            )
            for p, (rank, slowdown) in enumerate(zip(ranks, slowdowns, strict=True))
        ][:MAX_POSITIONS]
        for d, (ranks, slowdowns) in enumerate(zip(workers.ranks, workers.slowdown, strict=True))
    ][:MAX_REPLICAS]


def _has_memory(rows: Iterable[StageResult | RankResult]) -> bool:
    return any(row.peak_memory_bytes is not None for row in rows)


def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(lambda name: files("ppdiag.reports").joinpath("templates", name).read_text("utf-8")),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({"percent": percent, **{name: getattr(words, name) for name in FILTERS}})
    environment.globals.update(
        causes=CAUSE_KEYS,
        places=PLACE_KEYS,
        kinds={int(kind): label for kind, label in KINDS.items()},
        glossary=words.GLOSSARY,
        confidence=words.CONFIDENCE,
        bar=_bar,
        BAR_UNITS=BAR_UNITS,
    )
    return environment


def _finalize(value: object) -> object:
    return words.visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _keyed(labels: Mapping[Any, Word]) -> dict[str, Word]:
    return {key.value: word for key, word in labels.items()}


CAUSE_KEYS = _keyed(words.CAUSES)
PLACE_KEYS = _keyed(words.PLACES)


def _bar(parts: Where | Why, busy: float) -> list[Segment]:
    """A step as a stacked bar: busy first, then each part."""
    labels, family = (CAUSE_KEYS, "cause") if isinstance(parts, Why) else (PLACE_KEYS, "place")
    shares = [("busy", "busy", busy)]
    shares += [(f"{family}-{key}", word.label, getattr(parts, key)) for key, word in labels.items()]
    segments: list[Segment] = []
    start = 0.0
    for css, label, share in shares:
        if share > 0:  # skips NaN too
            length = min(share * BAR_UNITS, BAR_UNITS - start)
            segments.append(Segment(css, round(start, 2), round(length, 2), f"{label} {percent(share)}"))
            start += length
    return segments


def _timeline(diagnosis: Diagnosis) -> tuple[Markup, str]:
    if diagnosis.timeline is None or not len(diagnosis.timeline.measured):
        return Markup(), ""
    facts, intervals = timeline.pack(diagnosis.timeline)
    hosts = {rank.rank: words.visible(rank.host) for rank in diagnosis.ranks}
    facts["hosts"] = [hosts.get(rank, "") for rank in facts["ranks"]]
    facts["kinds"] = {int(kind): label for kind, label in KINDS.items()}
    facts["places"] = [[place.value, words.PLACES[place].label] for place in Place]
    return _script_json(facts), intervals


def _drawn(diagnosis: Diagnosis) -> dict[str, set[Any]]:
    """The kinds and places that occur in the timeline: only they need a line in its legend."""
    if diagnosis.timeline is None:
        return {"kinds": set(), "places": set()}
    kinds = set(np.unique(diagnosis.timeline.measured["kind"]).tolist())
    places = np.unique(diagnosis.timeline.idle["place"]).tolist()
    return {"kinds": kinds, "places": {place.value for i, place in enumerate(Place) if i in places}}


def _script_json(data: Mapping[str, Any]) -> Markup:
    """JSON that cannot end the script element that holds it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))  # noqa: S704


def _charts(diagnosis: Diagnosis) -> Iterator[dict[str, str]]:
    """The charts as pictures: inside an image no script of theirs could run, and the page's policy stays strict."""
    yield _chart(
        "Compute time per stage", "Median time of one microbatch in each stage.", figures.compute_times, diagnosis
    )
    if diagnosis.step_times_s:
        yield _chart("Step times", "The analysed steps in order.", figures.step_times, diagnosis)


def _chart(title: str, caption: str, draw: Callable[[Diagnosis, Theme], str], diagnosis: Diagnosis) -> dict[str, str]:
    pictures = {"light": draw(diagnosis, figures.LIGHT), "dark": draw(diagnosis, figures.DARK)}
    urls = {
        name: f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}" for name, svg in pictures.items()
    }
    return {"title": title, "caption": caption, **urls}


def _asset(name: str) -> str:
    return files("ppdiag.reports").joinpath("assets", name).read_text("utf-8")


def _policy(style: str, script: str) -> str:
    """Nothing may load, and only our own style and script may apply: their hashes are named."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
