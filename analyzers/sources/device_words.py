"""What a rank's record says in words of its device: memory at the ends of ops, and samples of NVML."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdiag.analyzers.validation import whole
from ppdiag.model import COMPUTE_KINDS, WAIT_KINDS, Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

SLOWED = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Bits of ``nvmlClocksEventReason*`` that cost speed; idling and clocks that somebody has set are none of them."""
RETURNED_AT_ONCE_NS = 100_000
"""A wait shorter than this did not block the host."""
WORTH_SAYING = 0.1
"""Share of the samples from which a slowed clock is worth a warning."""
_ON_THE_STREAM = (*COMPUTE_KINDS, *WAIT_KINDS)


class DeviceWords:
    """Collects words of type ``memory`` and ``sample`` of one rank."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self._last: tuple[int, int] | None = None
        """Step and bytes of the last reading."""
        self._growth: dict[int, list[int]] = defaultdict(list)
        """Bytes by which the forwards of each stage grew what is allocated."""
        self._samples: dict[str, list[int]] = defaultdict(list)

    def take_memory(self, word: Mapping[str, Any]) -> None:
        """A reading of the allocator.

        Raises:
            ValueError, KeyError: it is none.
        """
        self.peak_bytes = max(whole(word["peak_bytes"]), self.peak_bytes or 0)
        if "step" not in word or "kind" not in word:
            return
        step, current = whole(word["step"]), whole(word["current_bytes"])
        if word["kind"] == Kind.FORWARD and self._last is not None and self._last[0] == step:
            self._growth[whole(word["stage"], low=-1)].append(current - self._last[1])
        self._last = step, current

    def take_sample(self, word: Mapping[str, Any]) -> None:
        """A sample of NVML.

        Raises:
            ValueError: a value is no whole number.
        """
        for name, value in word.items():
            if name not in ("type", "local_ns"):
                self._samples[name].append(whole(value))

    def facts(self) -> dict[str, Any]:
        """Facts of the rank: its peak of memory, its activations of one microbatch, and the means of what NVML gave.

        The activations are the medians of what the forwards of its stages added, the first of a step left out: what is
        allocated before it is not known.
        """
        found: dict[str, Any] = {}
        if self.peak_bytes is not None:
            found["peak_memory_bytes"] = self.peak_bytes
        grown = sum(float(np.median(growth)) for growth in self._growth.values())
        if grown > 0:
            found["activation_bytes"] = int(grown)
        means = {name: float(np.mean(values)) for name, values in self._samples.items() if name != "throttle_reasons"}
        return {**found, "nvml": means} if means else found

    def warnings(self, rank: int) -> list[str]:
        """Says where the device's clocks were held back."""
        reasons = np.array(self._samples.get("throttle_reasons", []), np.int64)
        if not len(reasons):
            return []
        shares = {text: float(((reasons & bit) != 0).mean()) for bit, text in SLOWED.items()}
        named = [f"{text} {share:.0%}" for text, share in shares.items() if share >= WORTH_SAYING]
        text = f"rank {rank}: its device's clocks were held back in part of the {len(reasons)} samples"
        return [f"{text} ({', '.join(named)})"] if named else []


def move_posts(spans: np.ndarray) -> None:
    """Puts the posts of messages onto the device's time, in place, on a rank whose ops were timed there.

    NCCL begins a message when the stream of its post has done all that was launched before: not when the host posted
    it, which may be long before. A message that was never waited for ends there too. A wait that the host timed and
    that returned at once (it was on another stream) is moved likewise; one that blocked the host is where it was.

    Source: ProcessGroupNCCL, which lets its stream wait for an event of the current one (``syncStream``).
    """
    on_device = (spans["flags"] & np.uint16(Flag.DEVICE)) != 0
    messages = np.isin(spans["kind"], WAIT_KINDS)
    for thread in np.unique(spans["thread"][on_device & messages]):
        own = spans["thread"] == thread
        ops = np.flatnonzero(own & on_device & np.isin(spans["kind"], _ON_THE_STREAM))
        ops = ops[np.argsort(spans["launch_ns"][ops], kind="stable")]
        done = np.append(0, np.maximum.accumulate(spans["end_ns"][ops]))
        posted = np.flatnonzero(own & messages)

        def reached(host_ns: np.ndarray) -> np.ndarray:
            """When the stream is done with all that was launched before this time of the host."""
            return np.maximum(host_ns, done[np.searchsorted(spans["launch_ns"][ops], host_ns, "left")])  # noqa: B023

        start, end = spans["start_ns"][posted], spans["end_ns"][posted]
        blocked = ~on_device[posted] & (end - start > RETURNED_AT_ONCE_NS)
        start = np.where(on_device[posted] | blocked, start, reached(start))
        # an op around its own message was launched before it and ends after it: the wait bounds that post
        post = np.where(blocked, spans["post_ns"][posted], np.minimum(reached(spans["post_ns"][posted]), start))
        spans["end_ns"][posted] += start - spans["start_ns"][posted]
        spans["start_ns"][posted], spans["post_ns"][posted] = start, post
