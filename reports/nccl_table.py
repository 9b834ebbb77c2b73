"""What NCCL's logs say, for a terminal: the verdict, the facts, the transport of each pair, time-outs, warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ppdiag.reports.words import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, RenderableType

MAX_ROWS = 40
"""Rows of a table in the terminal; the JSON has all."""
MAX_NAMES = 12

_VERDICTS = {
    "fallback": ("bold red", "TCP FALLBACK: channels use NET/Socket although RDMA is there, or was switched off."),
    "possible": ("bold yellow", "TCP: channels use NET/Socket, and NCCL saw no RDMA device."),
    "socket": ("bold yellow", "TCP: channels use NET/Socket; the log says nothing about RDMA."),
    "none": ("bold green", "No TCP fallback: no channel uses NET/Socket."),
    "unknown": ("bold yellow", "Undecided: no line of the log proves a transport (run with NCCL_DEBUG=INFO)."),
}
_STYLES = {"error": "bold red", "warning": "bold yellow"}


def render(report: Any, pairs: Sequence[Any], console: Console) -> None:  # noqa: ANN401
    """Print what was found.

    Args:
        report: an ``NcclReport`` of the analyzers.
        pairs: the transport of each pair of ranks, from the same.
        console: where to.
    """
    for part in (
        _verdict(report.fallback),
        _facts(report),
        _pairs(report, pairs),
        _watchdog(report.watchdog),
        _messages(report),
    ):
        for line in part:
            console.print(line)


def _text(text: str, style: str = "") -> RenderableType:
    """A record's text: it can neither steer the terminal nor be taken for markup."""
    return Text(visible(text), style)


def _rows(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    return [_text(""), _text(title, "bold"), Padding(table, (0, 0, 0, 2), expand=False)]


def _verdict(fallback: Any) -> list[RenderableType]:  # noqa: ANN401
    style, text = _VERDICTS[fallback.status.value]
    rows = [("hosts", _listed(fallback.hosts)), ("connections", str(fallback.connections))] if fallback.hosts else []
    rows += [("reason", reason) for reason in fallback.reasons]
    rows += [("do", fallback.advice)] if fallback.advice else []
    return [_text(text, style), *(_rows("", ("", ""), rows)[2:] if rows else [])]


def _facts(report: Any) -> list[RenderableType]:  # noqa: ANN401
    counts = report.counts
    hcas = [f"{hca.name}:{hca.port} {hca.link} on {hca.host}{_gdr(hca.gdr)}" for hca in report.hcas]
    interfaces = [f"{each.name} {each.address} ({each.use}, {each.host})" for each in report.interfaces]
    plugins = [f"{each.kind} {each.name} {each.detail}".strip() for each in report.plugins if each.status == "loaded"]
    rows = [
        ("NCCL", _listed(report.versions) or "not said"),
        ("loaded", f"{_listed(report.networks_loaded) or 'not said'} (no proof of use)"),
        ("RDMA devices", _listed(hcas) or "none listed"),
        ("interfaces", _listed(interfaces) or "not said"),
        ("plug-ins", _listed(plugins) or "none loaded"),
        ("read", f"{counts.nccl_lines} entries of NCCL in {counts.lines} lines, {counts.torn} torn"),
    ]
    if report.providers:
        rows.insert(2, ("Libfabric", _listed(report.providers)))
    if counts.dropped:
        rows.append(("left out", f"{counts.dropped} records beyond the limit on memory"))
    return _rows("Facts", ("", ""), rows)


def _gdr(enabled: bool | None) -> str:  # noqa: FBT001  (three values)
    return "" if enabled is None else ", GPU Direct RDMA" if enabled else ", no GPU Direct RDMA"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _pairs(report: Any, found: Sequence[Any]) -> list[RenderableType]:  # noqa: ANN401
    unknown = report.counts.unknown_connections
    lines: list[RenderableType] = []
    if found:
        lines += _rows(
            f"Transport by pair of ranks, as the channel lines prove it{_left_out(len(found))}",
            ("from", "to", "transport", "channels", "communicator"),
            [_pair(pair) for pair in found[:MAX_ROWS]],
        )
    nvls = sorted({each.id for each in report.communicators if each.nvls})
    if nvls:
        lines += _rows("NVLink SHARP (NVLS)", ("", ""), [("communicators", _listed(nvls))])
    if unknown:
        lines += [
            _text(f"  {unknown} channel lines are torn or of an unknown form: their transport is unknown.", "dim")
        ]
    return lines


def _pair(pair: Any) -> tuple[str, ...]:  # noqa: ANN401
    def end(job_rank: int | None, own: int | None) -> str:
        if own is None:
            return "network"
        return f"rank {job_rank}" if job_rank is not None else f"{own} in its communicator"

    source, destination = pair.ends
    return (
        end(pair.source, source),
        end(pair.destination, destination),
        pair.transport,
        str(pair.channels),
        pair.communicator or "not said",
    )


def _left_out(count: int) -> str:
    return f" ({count - MAX_ROWS} more in the JSON)" if count > MAX_ROWS else ""


def _watchdog(reports: Sequence[Any]) -> list[RenderableType]:
    if not reports:
        return []
    rows = [
        (
            str(each.rank),
            each.group,
            each.op or (f"told by rank {each.told_by}" if each.told_by is not None else ""),
            *("?" if number is None else str(number) for number in (each.seq, each.last_enqueued, each.last_completed)),
        )
        for each in reports[:MAX_ROWS]
    ]
    columns = ("rank", "group", "op", "at", "enqueued", "completed")
    return _rows(f"Time-outs of torch's watchdog{_left_out(len(reports))}", columns, rows)


def _messages(report: Any) -> list[RenderableType]:  # noqa: ANN401
    shown = [message for message in report.messages if message.severity.value in _STYLES]
    quiet = len(report.messages) - len(shown)
    lines: list[RenderableType] = [_text("")]
    for message in shown[:MAX_ROWS]:
        lines += _message(message)
    if len(shown) > MAX_ROWS:
        lines.append(_text(f"{len(shown) - MAX_ROWS} more warnings are in the JSON.", "dim"))
    if quiet:
        lines.append(_text(f"{quiet} further messages are harmless or notes; the JSON has them.", "dim"))
    return lines if len(lines) > 1 else []


def _message(message: Any) -> list[RenderableType]:  # noqa: ANN401
    times = f" ({message.count} times)" if message.count > 1 else ""
    head = f"{message.severity.value.upper()}: {message.text}{times} [{message.slug}]"
    rows = [("where", message.where), ("hosts", _listed(message.hosts)), ("do", message.advice)]
    return [
        _text(head, _STYLES[message.severity.value]),
        *_rows("", ("", ""), [row for row in rows if row[1]])[2:],
    ]
