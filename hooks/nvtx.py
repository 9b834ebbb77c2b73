"""NVTX ranges around what is recorded, in the domain ``ppdiag``: users of nsys see stage, microbatch and what it was.

The package nvtx may be missing in the training environment, or older than 0.2.13: then there are no ranges. Without an
attached tool it gives a domain that does nothing, and there are none either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ppdiag.model import NONE, Kind

if TYPE_CHECKING:
    from ppdiag.hooks.recorder import Tail

DOMAIN = "ppdiag"
MOST_PREPARED = 1 << 13
"""More than stages x microbatches x kinds of any rank; beyond it, the attributes are prepared anew."""
WORDS = {
    int(Kind.FORWARD): ("F", "green"),
    int(Kind.BACKWARD): ("B", "blue"),
    int(Kind.WEIGHT): ("W", "cyan"),
    int(Kind.SEND): ("send-wait", "orange"),
    int(Kind.RECV): ("recv-wait", "red"),
    int(Kind.COLLECTIVE): ("collective-wait", "magenta"),
    int(Kind.OPTIMIZER): ("optimizer", "purple"),
    int(Kind.SCHEDULE): ("schedule", "white"),
}
_OTHER = ("other", "white")
_DIRECTION = {int(Kind.SEND): "to", int(Kind.RECV): "from"}


class Ranges:
    """Pushes and pops ranges of one domain; the attributes of each kind of range are prepared once."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._push = domain.push_range
        self.pop = domain.pop_range
        """End the range that this thread began last."""
        self._prepared: dict[tuple[int, int, int, int], Any] = {}
        self._step: Any = None

    def push(self, tail: Tail) -> None:
        """Begin the range of an op on this thread."""
        _, _, _, _, peer, _, microbatch, stage, _, _, _, _, kind, _ = tail
        key = (kind, stage, microbatch, peer)
        attributes = self._prepared.get(key)
        self._push(self._prepare(key) if attributes is None else attributes)

    def next_step(self, step: int) -> None:
        """End the range of the last step and begin that of this one; it may lie across threads."""
        if self._step is not None:
            self._domain.end_range(self._step)
        self._step = self._domain.start_range(
            self._domain.get_event_attributes(message=f"step {step}", color="yellow", category="step")
        )

    def _prepare(self, key: tuple[int, int, int, int]) -> Any:
        if len(self._prepared) >= MOST_PREPARED:
            self._prepared.clear()
        word, color = WORDS.get(key[0], _OTHER)
        attributes = self._domain.get_event_attributes(message=message(key), color=color, category=word)
        self._prepared[key] = attributes
        return attributes


def message(key: tuple[int, int, int, int]) -> str:
    """The text of a range, from (kind, stage, microbatch, peer).

    >>> message((1, 2, 5, -1)), message((5, 2, 5, 1))
    ('F stage 2 mb 5', 'recv-wait stage 2 mb 5 from rank 1')
    """
    kind, stage, microbatch, peer = key
    parts = [WORDS.get(kind, _OTHER)[0]]
    if stage != NONE:
        parts.append(f"stage {stage}")
    if microbatch != NONE:
        parts.append(f"mb {microbatch}")
    if kind in _DIRECTION and peer != NONE:
        parts.append(f"{_DIRECTION[kind]} rank {peer}")
    return " ".join(parts)


def open_ranges() -> Ranges | None:
    """The ranges; None where nobody would see them."""
    try:
        import nvtx

        domain = nvtx.get_domain(DOMAIN)
        # Without a tool (or with NVTX_DISABLE) the domain is a dummy, whose attributes are None.
        return Ranges(domain) if domain.get_event_attributes(message=DOMAIN) is not None else None
    except Exception:  # no package, or one before 0.2.13, which lacks some of this: the device is timed all the same
        return None
