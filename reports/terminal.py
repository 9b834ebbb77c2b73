"""The summary for a terminal: what is wrong, where, how much it costs, how sure that is, and what to change.

Every line reads without colour and at 80 columns; below 70 the tables give up columns instead of breaking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ppdiag.diagnosis import WORTH_SAYING, Cause, Place, percent
from ppdiag.reports.words import (
    CAUSES,
    CONFIDENCE,
    PLACES,
    count_of,
    duration,
    expected_gain,
    known_duration,
    origin_name,
    rank_list,
    rough_percent,
    size,
    step_time,
    visible,
    what_first,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from rich.console import Console, RenderableType

    from ppdiag.diagnosis import Advice, Diagnosis, RankResult, StageResult, Symptom, Verdict

MAX_ROWS = 12
"""Rows of a table before the rest is left out: the verdict has to stay on the screen."""
MAX_LINKS = 4
MAX_ORIGINS = 3
MAX_REPLICAS = 8
SHOWN = 0.0005
"""Below it a share prints as 0.0 %."""
WIDE = 70
BUSY_SYMBOL = "."
STYLES = {
    Cause.BUBBLE: "cyan",
    Cause.IMBALANCE: "yellow",
    Cause.COMMUNICATION: "red",
    Cause.HOST: "magenta",
    Cause.UNEXPLAINED: "bold",
}
SEVERITY_STYLES = {"critical": "bold red", "warning": "bold yellow"}
PLAIN = str.maketrans({"µ": "u"})


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Print the diagnosis."""
    writer = _Writer(console)
    parts = (_verdict, _facts, _stages, _idle, _origins, _workers, _rank, _links, _symptoms, _warnings, _trust)
    shown = [body for part in parts if (body := part(diagnosis, writer))]
    for i, body in enumerate(shown):
        if i:
            console.print()
        console.print(Group(*body), markup=False, highlight=False, emoji=False, soft_wrap=False)


class _Writer:
    """Makes rich texts that the console can show whatever its encoding and width, and whatever the text says."""

    def __init__(self, console: Console) -> None:
        self.width = console.width
        self.wide = console.width >= WIDE
        self._encoding = console.encoding

    def text(self, text: str, style: str = "") -> Text:
        """A text without markup, control characters, or characters that the stream cannot encode."""
        try:
            text.encode(self._encoding)
        except (UnicodeEncodeError, LookupError):
            text = visible(text).translate(PLAIN).encode("ascii", "backslashreplace").decode("ascii")
        return Text(visible(text), style=style, overflow="fold")

    def heading(self, text: str) -> Text:
        return self.text(text, "bold")

    def pairs(self, rows: Iterable[tuple[str, str | Text]], *, indent: int = 2) -> RenderableType:
        """Labels and what they say, aligned; continued lines stay in their column."""
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="dim")
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(self.text(label), value if isinstance(value, Text) else self.text(value))
        return Padding(table, (0, 0, 0, indent), expand=False)


def _verdict(diagnosis: Diagnosis, writer: _Writer) -> list[RenderableType]:
    verdict = diagnosis.verdict
    fine = verdict.cause is None and verdict.confidence != "undecided" and not diagnosis.stuck
    style, cost = "bold green" if fine else "bold red", "" if diagnosis.stuck else _cost(verdict)
    lines: list[RenderableType] = [writer.text(what_first(diagnosis), style)]
    lines += [Padding(writer.text(text), (0, 0, 0, 2), expand=False) for text in (cost, verdict.text) if text]
    return lines


def _cost(verdict: Verdict) -> str:
    sure = CONFIDENCE.get(verdict.confidence, verdict.confidence)
    if verdict.cause is None:
        return sure if verdict.confidence == "undecided" else ""
    return f"It takes {rough_percent(verdict.share)} of the step time, over all ranks. {sure}"


def _facts(diagnosis: Diagnosis, writer: _Writer) -> list[RenderableType]:
    job, phases = diagnosis.job, diagnosis.phases
    shape = [f"P={job.pp}", f"V={job.vpp}", f"M={job.microbatches}"]
    shape += [f"{name}={value}" for name, value in (("tp", job.tp), ("dp", job.dp)) if value is not None]
    match = f"{job.schedule_name} ({100 * job.schedule_match:.0f} % of ops in its order)"
    rows = [
        ("run", diagnosis.source),
        (
            "job",
            f"{count_of(job.world_size, 'rank')}, {' '.join(shape)}, {match}, {job.framework or 'unknown framework'}",
        ),
        ("step", step_time(diagnosis.steps)),
        (
            "phases",
            (
                f"pipeline {duration(phases.pipeline_s)}, tail {duration(phases.tail_s)}, "
                f"between steps {duration(phases.between_s)} (means over the steps)"
            ),
        ),
    ]
    return [writer.pairs(rows, indent=0)]


def _stages(diagnosis: Diagnosis, writer: _Writer) -> list[RenderableType]:
    named = _named_stages(diagnosis)
    stages = _worst(diagnosis.stages, named, MAX_ROWS)
    table = _table()
    table.add_column("stage", justify="right", no_wrap=True)
    if writer.wide:
        table.add_column("ranks", max_width=11, overflow="ellipsis", no_wrap=True)
        for name in _op_names(diagnosis):
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("busy", justify="right", no_wrap=True)
    table.add_column("where the step goes", overflow="crop", no_wrap=True)
    width = _bar_width(diagnosis, writer)
    for row in stages:
        cells = [f"{'>' if row.stage in named else ''}{row.stage}"]
        if writer.wide:
            cells += [rank_list(row.ranks), *_op_times(row, _op_names(diagnosis))]
        style = "bold" if row.stage in named else ""
        texts = [writer.text(cell, style) for cell in (*cells, percent(row.busy_fraction))]
        table.add_row(*texts, _bar(row, width))
    left_out = len(diagnosis.stages) - len(stages)
    note = f"{left_out} more stages are left out; shown are the slowest and the most idle."
    return [table, _legend(), *([writer.text(note, "dim")] if left_out else [])]


def _named_stages(diagnosis: Diagnosis) -> set[int]:
    """The stages that the verdict points at, itself or through a rank or link."""
    verdict = diagnosis.verdict
    named = {verdict.stage} if verdict.stage is not None else set()
    return named.union(verdict.link or (), *(rank.stage for rank in diagnosis.ranks if rank.rank == verdict.rank))


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", collapse_padding=False)


def _worst(stages: Sequence[StageResult], named: Collection[int], limit: int) -> list[StageResult]:
    """All stages in pipeline order; of too many the verdict's, then the slowest, then the most idle."""
    if len(stages) <= limit:
        return list(stages)
    slowest = sorted(stages, key=lambda s: (s.stage not in named, -_work_ms(s), s.stage))[: limit // 2]
    rest = [stage for stage in stages if stage not in slowest]
    return slowest + sorted(rest, key=lambda s: (-round(s.idle_fraction, 3), s.stage))[: limit - len(slowest)]


def _work_ms(stage: StageResult) -> float:
    """Rounded, so that ties stay in pipeline order."""
    return round(1000 * (stage.forward_s + stage.backward_s + stage.weight_s), 1)


def _op_names(diagnosis: Diagnosis) -> list[str]:
    return ["F", "B", "W"] if any(stage.weight_s > 0 for stage in diagnosis.stages) else ["F", "B"]


def _op_times(row: StageResult | RankResult, names: Sequence[str]) -> list[str]:
    times_s = {"F": row.forward_s, "B": row.backward_s, "W": row.weight_s}
    return [known_duration(times_s[name]) for name in names]


def _bar_width(diagnosis: Diagnosis, writer: _Writer) -> int:
    taken = 6 + 9  # stage and busy, each with its gap
    if writer.wide:
        ranks = min(11, max((len(rank_list(stage.ranks)) for stage in diagnosis.stages), default=0))
        taken += max(ranks, len("ranks")) + 2 + 9 * len(_op_names(diagnosis))
    return max(8, min(60, writer.width - taken - 1))


def _bar(row: StageResult | RankResult, width: int) -> Text:
    """The step as ``width`` characters: busy first, then each cause by its share."""
    shares = [(BUSY_SYMBOL, "", row.busy_fraction)]
    shares += [(word.symbol, STYLES[cause], getattr(row.why, cause.value)) for cause, word in CAUSES.items()]
    bar = Text(no_wrap=True)
    drawn, total = 0, 0.0
    for symbol, style, share in shares:
        total += share if share > 0 else 0.0  # also skips NaN
        end = min(width, round(total * width))
        bar.append(symbol * (end - drawn), style)
        drawn = max(drawn, end)
    return bar


def _legend() -> Text:
    legend = Text(f"{BUSY_SYMBOL} busy", style="")
    for cause, word in CAUSES.items():
        legend.append("  ")
        legend.append(word.symbol, STYLES[cause])
        legend.append(f" {word.label}")
    return legend


def _idle(diagnosis: Diagnosis, writer: _Writer) -> list[RenderableType]:
    why = _parts([(CAUSES[c].label, getattr(diagnosis.why, c.value)) for c in Cause], "why", writer)
    where = _parts([(PLACES[p].label, getattr(diagnosis.where, p.value)) for p in Place], "standing in", writer)
    lines: list[RenderableType] = [
        writer.heading(f"Idle: {percent(diagnosis.idle_fraction)} of the step time, over all ranks")
    ]
    if writer.wide:
        both = Table.grid(padding=(0, 6, 0, 0))
        both.add_row(why, where)
        lines.append(Padding(both, (0, 0, 0, 2), expand=False))
    else:
        lines += [Padding(why, (0, 0, 0, 2), expand=False), Padding(where, (0, 0, 0, 2), expand=False)]
    if diagnosis.why.imbalance >= WORTH_SAYING:
        lines.append(Padding(writer.text(_imbalance(diagnosis)), (0, 0, 0, 2), expand=False))
    if diagnosis.why.host >= WORTH_SAYING and (host := _host(diagnosis)):
        lines.append(Padding(writer.text(f"host: {host}"), (0, 0, 0, 2), expand=False))
    return lines


def _imbalance(diagnosis: Diagnosis) -> str:
    split = diagnosis.imbalance
    parts = (("between stages", split.stage), ("between microbatches", split.microbatch), ("a slow rank", split.rank))
    return "imbalance: " + ", ".join(f"{name} {percent(share)}" for name, share in parts if share >= SHOWN)


def _host(diagnosis: Diagnosis) -> str:
    split = diagnosis.host
    parts = (
        ("Python", split.python),
        ("waiting for data", split.data),
        ("garbage collection", split.gc),
        ("synchronising calls", split.synchronising),
        ("late launches", split.launch),
    )
    return ", ".join(f"{name} {percent(share)}" for name, share in parts if share >= SHOWN)


def _origins(diagnosis: Diagnosis, writer: _Writer) -> list[RenderableType]:
    """The places at which most of the idle time began."""
    if diagnosis.root_cause is None or diagnosis.idle_fraction < WORTH_SAYING:
        return []
    first = diagnosis.root_cause.origins[:MAX_ORIGINS]
    rows = [(percent(origin.fraction / diagnosis.idle_fraction), origin_name(origin)) for origin in first]
    return [writer.heading("Where idle time began, each wait followed back (share of idle)"), writer.pairs(rows)]


def _workers(diagnosis: Diagnosis, writer: _Writer) -> list[RenderableType]:
    """The slowest ranks of a job with data-parallel replicas: rows of replicas, columns along the pipeline."""
    workers = diagnosis.workers
    if workers is None or len(workers.ranks) < 2 or max(map(max, workers.slowdown)) < 1 + WORTH_SAYING:
        return []
    table = _table()
    shown = _slowest(workers.slowdown, MAX_REPLICAS)
    positions = _slowest(tuple(zip(*workers.slowdown, strict=True)), writer.width // 8 - 2)
    for name in ("replica", *map(str, positions)):
        table.add_column(name, justify="right", no_wrap=True)
    for replica in shown:
        table.add_row(str(replica), *(f"{workers.slowdown[replica][p]:.2f}" for p in positions))
    left_out = len(workers.ranks) - len(shown), len(workers.position_slowdown) - len(positions)
    note = "Length of a step in which only this rank works as it did, over one of equal work."
    note += (
        f" Left out: {left_out[0]} replicas and {left_out[1]} positions that are less slow." if any(left_out) else ""
    )
    title = "Slow ranks, by replica (rows) and position along the pipeline (columns)"
    body = Padding(Group(table, writer.text(note, "dim")), (0, 0, 0, 2), expand=False)
    return [writer.heading(title), body]


def _slowest(rows: Sequence[Sequence[float]], most: int) -> list[int]:
    """The rows with the largest values, so many at most, in their order."""
    return sorted(sorted(range(len(rows)), key=lambda i: (-round(max(rows[i]), 3), i))[:most])


def _parts(parts: Sequence[tuple[str, float]], name: str, writer: _Writer) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=13)
    table.add_column(justify="right", no_wrap=True, min_width=6)
    table.add_row(writer.text(name, "dim"), "")
    for label, share in sorted(parts, key=lambda part: -part[1]):
        table.add_row(writer.text(label), writer.text(percent(share)))
    return table


def _rank(diagnosis: Diagnosis, writer: _Writer) -> list[RenderableType]:
    """The rank that the verdict names, with its host: someone has to log in there."""
    for rank in diagnosis.ranks:
        if rank.rank == diagnosis.verdict.rank:
            times = zip(("F", "B", "W"), _op_times(rank, ("F", "B", "W")), strict=True)
            causes = ((CAUSES[c].label, getattr(rank.why, c.value)) for c in Cause)
            idle = ", ".join(f"{label} {percent(share)}" for label, share in causes if share >= WORTH_SAYING)
            rows = [
                ("host", rank.host or "unknown"),
                ("stages", rank_list(rank.stage)),
                ("times", ", ".join(f"{name} {value}" for name, value in times if value != "-")),
                ("busy", percent(rank.busy_fraction)),
                ("idle", f"{percent(rank.idle_fraction)}{f': {idle}' if idle else ''}"),
            ]
            return [writer.heading(f"Rank {rank.rank}"), writer.pairs(rows)]
    return []


def _links(diagnosis: Diagnosis, writer: _Writer) -> list[RenderableType]:
    verdict = diagnosis.verdict
    share = max(diagnosis.why.communication, diagnosis.where.transfer)
    if not diagnosis.links or (verdict.link is None and share < WORTH_SAYING):
        return []
    ends = verdict.link
    links = sorted(diagnosis.links, key=lambda x: ((x.src_stage, x.dst_stage) != ends, -x.transfer_s))[:MAX_LINKS]
    table = _table()
    names = ("link", "carries", "message", "transfer", "bandwidth", "transport")
    for name in names if writer.wide else names[:1] + names[3:5]:
        table.add_column(name, justify="left" if name in {"link", "carries", "transport"} else "right", overflow="fold")
    for link in links:
        bandwidth = link.bandwidth_bytes_per_s
        cells = (
            f"{link.src_stage} to {link.dst_stage}",
            {"forward": "activations", "backward": "gradients"}.get(link.direction, link.direction),
            size(link.bytes) if link.bytes else "-",
            known_duration(link.transfer_s),
            f"{size(bandwidth)}/s" if bandwidth is not None else "-",
            link.transport or "-",
        )
        table.add_row(*map(writer.text, cells if writer.wide else cells[:1] + cells[3:5]))
    left_out = len(diagnosis.links) - len(links)
    title = "Links between stages, slowest first" + (f" ({left_out} more left out)" if left_out else "")
    return [writer.heading(title), Padding(table, (0, 0, 0, 2), expand=False)]


def _symptoms(diagnosis: Diagnosis, writer: _Writer) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for i, symptom in enumerate(diagnosis.symptoms):
        if i:
            lines.append(Text())
        lines += _symptom(symptom, writer)
    return lines


def _symptom(symptom: Symptom, writer: _Writer) -> list[RenderableType]:
    title = writer.text(symptom.severity.upper(), SEVERITY_STYLES.get(symptom.severity, "bold"))
    title.append_text(writer.text(f": {symptom.title} ", "bold")).append_text(writer.text(f"[{symptom.id}]", "dim"))
    rows = [("seen" if not i else "", text) for i, text in enumerate(symptom.evidence)]
    for advice in symptom.advice:
        rows += [("", ""), *_advice(advice)]
    rows.append(("more", f"ppdiag explain {symptom.id}"))
    return [title, writer.pairs(rows)]


def _advice(advice: Advice) -> list[tuple[str, str]]:
    rows = [
        ("do", advice.action),
        ("how", advice.how),
        ("gain", expected_gain(advice)),
        ("measure", advice.measure_after),
        ("source", advice.source),
    ]
    return [(label, text) for label, text in rows if text]


def _warnings(diagnosis: Diagnosis, writer: _Writer) -> list[RenderableType]:
    if not diagnosis.warnings:
        return []
    rows = [("!", warning) for warning in diagnosis.warnings]
    return [writer.heading("Read this with care"), writer.pairs(rows)]


def _trust(diagnosis: Diagnosis, writer: _Writer) -> list[RenderableType]:
    clock = "none: one clock" if diagnosis.clock_error_s == 0 else f"up to {duration(diagnosis.clock_error_s)}"
    rows = [("replay error", f"{percent(diagnosis.replay_error_fraction)} of the step"), ("clock error", clock)]
    if diagnosis.overhead is not None:
        cost = diagnosis.overhead
        interval = f"({percent(cost.low)} to {percent(cost.high)})"
        rows.append(("cost of recording", f"{percent(cost.fraction)} of the step {interval}"))
    return [writer.heading("How far to trust this"), writer.pairs(rows)]
