"""Understands the names that frameworks give to ranges of a profile: which op of the pipeline a range is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ppdiag.model import NONE, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Label(NamedTuple):
    """What a range is. ``family`` says who named it: ranges of several may lie around one op."""

    family: str
    kind: Kind
    stage: int = NONE
    microbatch: int = NONE


FAMILIES = ("ppdiag", "torch", "microbatch", "function")
"""Best first: with stage and microbatch, with them, with the microbatch alone, with neither."""
MOST_LABEL = 2**15 - 1
_LETTERS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD, "W": Kind.WEIGHT}
_WORDS = {"forward": Kind.FORWARD, "backward": Kind.BACKWARD}
_SUFFIX = re.compile(r", (?:op_id|seq|sizes|input_op_ids)\b.*", re.DOTALL)
"""What torch's emit_nvtx appends to a name."""


def _of_letters(match: re.Match[str]) -> Label:
    return Label("torch", _LETTERS[match[2]], int(match[1]), int(match[3]))


def _of_ppdiag(match: re.Match[str]) -> Label:
    stage, microbatch = (NONE if part is None else int(part) for part in (match[2], match[3]))
    return Label("ppdiag", _LETTERS[match[1]], stage, microbatch)


_RULES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Label]], ...] = (
    # ppdiag's own ranges: "F stage 2 mb 5"
    (re.compile(r"([FBW])(?: stage (\d{1,5}))?(?: mb (\d{1,5}))?"), _of_ppdiag),
    # an action of torch's pipelining runtime (since 2.9): "PP:0F1", "PP:3I2", "PP:3W2"
    (re.compile(r"PP:(\d{1,5})([FBIW])(\d{1,5})"), _of_letters),
    # torch's GPipe: "Forward 3"
    (re.compile(r"(Forward|Backward) (\d{1,5})"), lambda m: Label("microbatch", _WORDS[m[1].lower()], NONE, int(m[2]))),
    # functions and timers of Megatron ("forward_step", "backward-compute"), with what lies before them in the call
    (re.compile(r"(?:.*[./: ])?(forward|backward)[-_](?:step|compute)"), lambda m: Label("function", _WORDS[m[1]])),
    # instructions of DeepSpeed's pipeline engine
    (re.compile(r"(?:.*[./: ])?_exec_(forward|backward)_pass"), lambda m: Label("function", _WORDS[m[1]])),
)
_OPTIMIZER = re.compile(r"optimizer|Optimizer\.step#.*|(?:.*[./: ])?(?:_exec_)?optimizer[-_]?(?:inner[-_])?step")


def label_of(text: str) -> Label | None:
    """The op that a range of this name is; None where it is none of a pipeline.

    >>> label_of("PP:1I3")
    Label(family='torch', kind=<Kind.BACKWARD: 2>, stage=1, microbatch=3)
    >>> label_of("F stage 2 mb 5").stage, label_of("aten::add, op_id = 3")
    (2, None)
    """
    text = _SUFFIX.sub("", text).strip()
    if _OPTIMIZER.fullmatch(text):
        return Label("", Kind.OPTIMIZER)
    for pattern, label in _RULES:
        match = pattern.fullmatch(text)
        if match is not None:
            found = label(match)
            return found if max(found.stage, found.microbatch) <= MOST_LABEL else None
    return None


def best_family(labels: Iterable[Label]) -> str:
    """Which family to go by where the ranges of several lie around one op; empty where there is none."""
    found = {label.family for label in labels if label.kind is Kind.FORWARD}
    return next((family for family in FAMILIES if family in found), "")
