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
    ("EP", lambda plan: str(plan.expert)),
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
    ("EP comm", lambda plan: percent(plan.expert_fraction)),
    ("DP comm", lambda plan: percent(plan.data_fraction)),
)
OF_EXPERTS = ("EP", "EP comm")
"""Columns of models with experts only."""
GIVES_UP = ("DP comm", "EP comm", "TP comm", "p2p", "imbalance", "bubble", "MFU", "ZeRO", "recompute", "micro")
"""Columns that a narrow terminal does without, in this order."""
WIDEST = 110
LEGEND = (
    "memory: of the fullest rank. bubble: of the pipeline phase, over the total. imbalance, p2p, TP comm and DP comm: "
    "shares of the step that go to unequal stages, waits for messages, tensor-parallel all-reduces, and gradient "
    "traffic that nothing hides. Context parallelism is not searched."
)
LEGEND_OF_EXPERTS = (
    "EP: data-parallel ranks over which the experts are spread, each of them divided over TP too. EP comm: tokens to "
    "their experts and back, as if each expert got as many."
)
PARTS = {
    "bubble": "bubble_fraction",
    "unequal stages": "imbalance_fraction",
    "waits for messages": "transfer_fraction",
    "tensor-parallel sums": "tensor_fraction",
    "tokens to their experts": "expert_fraction",
    "gradient traffic": "data_fraction",
}
"""Parts of a step, by the fields of a plan."""
WORTH_NAMING = 0.01
"""Of the step."""


def gib(count: float) -> str:
    """Bytes as memory is sold.

    >>> gib(85899345920)
    '80.0 GiB'
    """
    return f"{count / GIB:.1f} GiB"


def table(plans: Sequence[Any]) -> str:
    """The plans, one a line."""
    experts = any(plan.expert > 1 for plan in plans)
    columns = [column for column in COLUMNS if experts or column[0] not in OF_EXPERTS]
    rows = [[name for name, _ in columns], *([shown(plan) for _, shown in columns] for plan in plans)]
    return "\n".join(fitting.table(rows, gives_up=GIVES_UP))


def legend(*, experts: bool = False) -> str:
    """What the columns of the table mean."""
    return fitting.paragraph(f"{LEGEND} {LEGEND_OF_EXPERTS}" if experts else LEGEND, WIDEST)


def compared(plan: Any, best: Any) -> str:  # noqa: ANN401
    """How a plan stands beside the fastest one, and in what they differ most."""
    first = f"TP={best.tensor} PP={best.pipeline} DP={best.data} V={best.chunks} micro={best.micro_batch}"
    more = plan.step_s - best.step_s
    if more < WORTH_NAMING * best.step_s:
        return "None of the plans that the search gives is faster by a percent or more."
    differences = {
        label: getattr(plan, name) * plan.step_s - getattr(best, name) * best.step_s for label, name in PARTS.items()
    }
    differences["computing layers again" if plan.recompute > best.recompute else "the rest"] = more - sum(
        differences.values()
    )
    named = sorted(differences.items(), key=lambda pair: -abs(pair[1]))
    words = [
        f"{label} {'+' if seconds > 0 else '-'}{duration(abs(seconds))}"
        for label, seconds in named
        if abs(seconds) >= WORTH_NAMING * best.step_s
    ]
    text = (
        f"The fastest plan, {first}, takes {duration(best.step_s)}; this one takes {percent(more / best.step_s)} more"
    )
    return fitting.paragraph(f"{text} ({', '.join(words)})." if words else f"{text}.", WIDEST)


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
        lines.append("  No: the fastest layout has none, if its traffic hides behind its compute as well as it can.")
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
    sent += f", EP {size(plan.expert_bytes)}" if plan.expert > 1 else ""
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
