"""The trace in Chrome's JSON, which ui.perfetto.dev, chrome://tracing and most tools of its kind open.

Written as it is made, one rank at a time. The first line holds the record itself, so that ``ppdiag analyze`` reads the
file back without loss; viewers pass over it.
"""

from __future__ import annotations

import base64
import json
from itertools import count
from typing import TYPE_CHECKING, Any

from ppdiag.diagnosis import Cause
from ppdiag.portable import blocks_of, header_of
from ppdiag.reports.tracks import first_moment_ns, ranks_of
from ppdiag.reports.words import CAUSES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

    from ppdiag.exported import Exported
    from ppdiag.reports.tracks import Track

COLOURS = {
    CAUSES[Cause.BUBBLE].label: "grey",
    CAUSES[Cause.IMBALANCE].label: "yellow",
    CAUSES[Cause.COMMUNICATION].label: "terrible",
    CAUSES[Cause.HOST].label: "thread_state_iowait",
    CAUSES[Cause.UNEXPLAINED].label: "black",
}
"""Of idle time, by cause, as chrome://tracing calls them. Perfetto colours by the slice's name, which is the cause."""


def write(exported: Exported, stream: TextIO) -> None:
    """Write the trace; times are microseconds from the first post."""
    stream.write('{"ppdiag":{"header":')
    stream.write(header_of(exported.trace).decode("ascii"))
    stream.write(',"blocks":[')
    blocks = (base64.b64encode(block).decode("ascii") for block in blocks_of(exported.trace))
    stream.writelines(_separated((f'"{block}"' for block in blocks), ","))
    stream.write(']},\n"displayTimeUnit":"ms","traceEvents":[\n')
    events = (json.dumps(event, separators=(",", ":")) for event in _events(exported))
    stream.writelines(_separated(events, ",\n"))
    stream.write("\n]}\n")


def _separated(texts: Iterator[str], separator: str) -> Iterator[str]:
    for i, text in enumerate(texts):
        yield f"{separator}{text}" if i else text


def _events(exported: Exported) -> Iterator[dict[str, Any]]:
    zero_ns = first_moment_ns(exported)
    thread = count(1)  # of all processes: viewers take equal threads of two processes for one that has moved
    for place, (rank, name, tracks) in enumerate(ranks_of(exported)):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": place}}
        for number, track in enumerate(tracks):
            lane = f" ({track.lane + 1})" if track.lane else ""
            key = {"pid": rank, "tid": next(thread)}
            yield {"ph": "M", **key, "name": "thread_name", "args": {"name": f"{track.name}{lane}"}}
            yield {"ph": "M", **key, "name": "thread_sort_index", "args": {"sort_index": number}}
            yield from _slices(track, key, zero_ns)
    yield from _steps(exported, zero_ns, next(thread))


def _slices(track: Track, key: dict[str, int], zero_ns: int) -> Iterator[dict[str, Any]]:
    """The slices of a track, and the ends of arrows at them."""
    colours = COLOURS if track.name == "idle" else {}
    for name, start_ns, end_ns, notes, arrow in track.slices():
        start, end = (start_ns - zero_ns) / 1000, (end_ns - zero_ns) / 1000
        colour = {"cname": colours[name]} if name in colours else {}
        length = (end_ns - start_ns) / 1000
        yield {"ph": "X", **key, "ts": start, "dur": length, "name": name, "cat": track.name, "args": notes, **colour}
        if arrow:
            # The last moment of a receive: its first may be that of the send, and a viewer may come to it first.
            one_end = {"ph": "s", "ts": start} if track.name == "sends" else {"ph": "f", "bp": "e", "ts": end}
            yield {**one_end, **key, "id": arrow, "name": "message", "cat": "message"}


def _steps(exported: Exported, zero_ns: int, thread: int) -> Iterator[dict[str, Any]]:
    """The analysed steps, as a process of their own above all ranks."""
    if not len(exported.steps):
        return
    pid = int(exported.spans["rank"].max(initial=-1)) + 1
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": "steps"}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": -1}}
    for step, start_ns, end_ns in exported.steps.tolist():
        times = {"ts": (start_ns - zero_ns) / 1000, "dur": (end_ns - start_ns) / 1000}
        yield {"ph": "X", "pid": pid, "tid": thread, **times, "name": f"step {step}", "cat": "step", "args": {}}
