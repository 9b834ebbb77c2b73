"""Which op of a pipeline a range of a profile is: names as torch.profiler has them, and what NVTX adds to them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ppdiag.analyzers.sources.kineto.labels import Label, labels_of
from ppdiag.model import NONE, PIPELINE_KINDS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

_SUFFIX = re.compile(r", (?:op_id|seq|sizes|input_op_ids)\b.*", re.DOTALL)
"""What torch's emit_nvtx appends to a name."""
_OPTIMIZER = re.compile(r"optimizer|(?:.*[./: ])?(?:_exec_)?optimizer[-_]?(?:inner[-_])?step")
"""As ppdiag's own ranges, Megatron's timers and DeepSpeed's instructions call it."""
NO_OPS = 3
"""Worse than the :func:`detail` of any op."""


def ops_named(text: str) -> tuple[Label, ...]:
    """The ops that a range of this name is around: none, one, or a forward and a backward that overlap.

    >>> [(op.kind.name, op.stage, op.microbatch) for op in ops_named("PP:1I3, op_id = 9")]
    [('BACKWARD', 1, 3)]
    >>> len(ops_named("PP:(4F4;3B0)OVERLAP_F_B")), len(ops_named("aten::add, op_id = 3"))
    (2, 0)
    """
    name = _SUFFIX.sub("", text).strip()
    if _OPTIMIZER.fullmatch(name):
        return (Label(Kind.OPTIMIZER),)
    found = labels_of(name)
    return found if all(label.kind in (*PIPELINE_KINDS, Kind.OPTIMIZER) for label in found) else ()


def detail(label: Label) -> int:
    """How little a label says of its op: 0 with its stage, 1 with its microbatch alone, 2 with neither."""
    return 0 if label.stage != NONE else 1 if label.microbatch != NONE else 2


def best_detail(labels: Iterable[Label]) -> int:
    """The best that is said of any forward: ranges of several writers may lie around one op. ``NO_OPS`` for none."""
    return min((detail(label) for label in labels if label.kind is Kind.FORWARD), default=NO_OPS)
