"""The plans of a search as text: first whether a pipeline is needed, then the table, then why a wish cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ppdiag.diagnosis import percent
from ppdiag.reports import fitting
from ppdiag.reports.words import duration, size

if TYPE_CHECKING:
    from collections.abc import Sequence

GIB = 1 << 30
COLUMNS = (
    ("TP", lambda plan: str(plan.tensor)),
    ("PP", lambda plan: str(plan.pipeline)),
    ("DP", lambda plan: str(plan.data)),
    ("V", lambda plan: str(plan.chunks)),
    ("micro", lambda plan: str(plan.micro_batch)),
    ("M", lambda plan: str(plan.microbatches)),
    ("schedule", lambda plan: plan.schedule),
    ("recompute", lambda plan: "all" if plan.recompute else "-"),
    ("ZeRO", lambda plan: "1" if plan.zero1 else "0"),
    ("memory", lambda plan: gib(max(plan.memory_bytes))),
    ("step", lambda plan: duration(plan.step_s)),
    ("MFU", lambda plan: percent(plan.mfu)),
    ("bubble", lambda plan: percent(plan.bubble_fraction)),
    ("imbalance", lambda plan: percent(plan.imbalance_fraction)),
    ("p2p", lambda plan: percent(plan.transfer_fraction)),
    ("TP comm", lambda plan: percent(plan.tensor_fraction)),
    ("DP comm", lambda plan: percent(plan.data_fraction)),
)
GIVES_UP = ("DP comm", "TP comm", "p2p", "imbalance", "bubble", "MFU", "ZeRO", "recompute", "micro")
"""Columns that a narrow terminal does without, in this order."""
WIDEST = 110
LEGEND = (
    "memory: of the fullest rank. bubble: of the pipeline phase, over the total. imbalance, p2p, TP comm and DP comm: "
    "shares of the step that go to unequal stages, waits for messages, tensor-parallel all-reduces, and gradient "
    "traffic that nothing hides."
)


def gib(count: float) -> str:
    """Bytes as memory is sold.

    >>> gib(85899345920)
    '80.0 GiB'
    """
    return f"{count / GIB:.1f} GiB"


def table(plans: Sequence[Any]) -> str:
    """The plans, one a line."""
    rows = [[name for name, _ in COLUMNS], *([shown(plan) for _, shown in COLUMNS] for plan in plans)]
    return "\n".join(fitting.table(rows, gives_up=GIVES_UP))


def legend() -> str:
    """What the columns of the table mean."""
    return fitting.paragraph(LEGEND, WIDEST)


def alternatives(found: Any) -> str:  # noqa: ANN401  (a result of the search; reports do not import it)
    """Whether a pipeline is needed at all."""
    lines = ["Is a pipeline needed?"]
    for one in found.alternatives:
        step = f", step {duration(one.step_s)}" if one.fits and one.step_s is not None else ""
        text = f"{one.name}: {gib(one.memory_bytes)} a GPU{step}: {one.words}"
        lines.append(fitting.paragraph(text, WIDEST, first="  ", rest="    "))
    flat = [one.step_s for one in found.alternatives if one.fits and one.step_s is not None]
    best = found.plans[0].step_s if found.plans else None
    if not flat:
        lines.append("  Yes: without one it does not fit." if best is not None else "  Nothing fits.")
    elif best is None or min(flat) <= best * 1.0005:
        lines.append("  No: the fastest layout has none.")
    else:
        gain = percent(1 - best / min(flat))
        text = f"Not to fit; the best pipeline takes {gain} less time than the best layout without one."
        lines.append(fitting.paragraph(text, WIDEST, first="  ", rest="  "))
    return "\n".join(lines)


def details(plan: Any) -> str:  # noqa: ANN401
    """One plan in full: layers and memory of its ranks, and what it sends."""
    layers = ", ".join(str(count) for count in plan.layers)
    kept = ", ".join(f"{count / GIB:.1f}" for count in plan.memory_bytes)
    sent = f"TP {size(plan.tensor_bytes)}, PP {size(plan.pipeline_bytes)}, DP {size(plan.data_bytes)}"
    inside = "a whole pipeline lies in one node" if plan.pipeline_in_node else "stages pass on over the network"
    rows = {
        "layers of the stages": layers,
        "memory of the ranks, GiB": kept,
        "one message": f"{size(plan.message_bytes)}; {inside}",
        "the first rank sends": f"{sent} a step",
    }
    head = f"TP={plan.tensor} PP={plan.pipeline} DP={plan.data} V={plan.chunks} {plan.schedule}:"
    lines = [fitting.paragraph(text, WIDEST, first=f"  {name:<25}", rest=" " * 27) for name, text in rows.items()]
    return "\n".join([head, *lines])
