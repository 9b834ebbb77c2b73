"""What the names of annotations say: ops of a pipeline, its messages, steps and optimizer steps.

Known are the labels of torch.distributed.pipelining (``PP:1F0``, ``PP:1SEND_F0``, ``PP:(4F4;3B0)OVERLAP_F_B``,
``Forward 3``), of Megatron's and DeepSpeed's ranges, of ppdiag's own, and those that torch.profiler and
torch.optim make.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ppdiag.model import NONE, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_STAGE = 1 << 12
MOST_MICROBATCH = 1 << 20


class Label(NamedTuple):
    """One thing that an annotation names."""

    kind: Kind
    stage: int = NONE
    microbatch: int = NONE
    payload: Payload = Payload.UNKNOWN


_COMPUTE = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD, "W": Kind.WEIGHT}
_OP = r"(\d{1,7})([FBIW])(\d{1,7})"
_TORCH_OP = re.compile(rf"PP:{_OP}")
_TORCH_MESSAGE = re.compile(r"PP:(\d{1,7})(SEND|RECV)_([FB])(\d{1,7})")
_TORCH_OVERLAP = re.compile(rf"PP:\({_OP};{_OP}\)OVERLAP_F_B")
_TORCH_SINGLE = re.compile(r"(Forward|Backward) (\d{1,7})")
_OWN = re.compile(r"([FBW]) stage (\d{1,7})(?: mb (\d{1,7}))?")
_PLAIN = re.compile(r"(?:.*[._:# ])?(forward|backward)[-_](?:step|compute|pass|microstep)")
_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_OPTIMIZER = re.compile(r"Optimizer\.step#.*")


def labels_of(name: str) -> tuple[Label, ...]:
    """What an annotation of this name is around: one op or message, two where they overlap, nothing where unknown.

    >>> labels_of("PP:1F0")[0] == Label(Kind.FORWARD, 1, 0)
    True
    >>> [label.kind.name for label in labels_of("PP:(4F4;3B0)OVERLAP_F_B")]
    ['FORWARD', 'BACKWARD']
    """
    found = _labels_of(name)
    fits = all(label.stage < MOST_STAGE and label.microbatch < MOST_MICROBATCH for label in found)
    return found if fits else ()


def _labels_of(name: str) -> tuple[Label, ...]:
    for pattern, read in _READERS:
        if match := pattern.fullmatch(name):
            return read(match)
    return ()


def _op(stage: str, word: str, microbatch: str) -> Label:
    return Label(_COMPUTE[word], int(stage), int(microbatch))


def _message(match: re.Match[str]) -> tuple[Label, ...]:
    kind = Kind.SEND if match[2] == "SEND" else Kind.RECV
    payload = Payload.ACTIVATION if match[3] == "F" else Payload.GRADIENT
    return (Label(kind, int(match[1]), int(match[4]), payload),)


def _own(match: re.Match[str]) -> tuple[Label, ...]:
    return (Label(_COMPUTE[match[1]], int(match[2]), NONE if match[3] is None else int(match[3])),)


_READERS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], tuple[Label, ...]]], ...] = (
    (_TORCH_OP, lambda match: (_op(*match.groups()),)),
    (_TORCH_MESSAGE, _message),
    (_TORCH_OVERLAP, lambda match: (_op(*match.groups()[:3]), _op(*match.groups()[3:]))),
    (_TORCH_SINGLE, lambda match: (Label(_COMPUTE[match[1][0]], NONE, int(match[2])),)),
    (_OWN, _own),
    (_PLAIN, lambda match: (Label(_COMPUTE[match[1][0].upper()]),)),
    (_OPTIMIZER, lambda _: (Label(Kind.OPTIMIZER),)),
)


def step_number(name: str) -> int | None:
    """The number of the step that an annotation of the profiler is around.

    >>> step_number("ProfilerStep#12")
    12
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None
