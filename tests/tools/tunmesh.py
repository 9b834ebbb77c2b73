"""Network namespaces that all reach each other, over links of which each can have a delay and a rate of its own.

Namespace number i has the address 10.99.0.(i+1). Needs root and a TUN device. Makes the namespaces, prints READY, runs
until it is ended by SIGTERM or its parent has gone, and removes them. A link that is not named is as fast as this loop
can be.

    tunmesh.py NAMESPACES A-B:DELAY_MS:RATE_MBIT ...        (NAMESPACES: their names, joined by commas)
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import subprocess
import sys
import time

from tunlink import PACKETS_A_TURN, device  # type: ignore[import-not-found]  # beside this file

TARGET = 19
"""The byte of an IPv4 header that ends its destination."""
FAST = (0.0, float("inf"))


class Line:
    """One direction of a link: first in, first out, and nothing is lost."""

    def __init__(self, target: int, delay_s: float, bytes_per_s: float) -> None:
        self._target, self._delay_s, self._bytes_per_s = target, delay_s, bytes_per_s
        self._queue: collections.deque[tuple[float, bytes]] = collections.deque()
        self._free = 0.0
        """When the line has sent all that it was given."""

    def put(self, packet: bytes) -> None:
        self._free = max(time.monotonic(), self._free) + len(packet) / self._bytes_per_s
        self._queue.append((self._free + self._delay_s, packet))

    def deliver(self) -> float:
        """Put out what is due; returns the seconds until more will be, at most 1."""
        now = time.monotonic()
        while self._queue and self._queue[0][0] <= now:
            with contextlib.suppress(BlockingIOError):
                os.write(self._target, self._queue.popleft()[1])
        return min(1.0, self._queue[0][0] - now) if self._queue else 1.0


def lines_between(devices: list[int], links: list[str]) -> dict[tuple[int, int], Line]:
    """The line for each (source, target)."""
    slow = {}
    for link in links:
        ends, delay_ms, rate_mbit = link.split(":")
        a, b = map(int, ends.split("-"))
        slow[a, b] = slow[b, a] = (float(delay_ms) / 1e3, float(rate_mbit) * 1e6 / 8)
    count = range(len(devices))
    return {(a, b): Line(devices[b], *slow.get((a, b), FAST)) for a in count for b in count if a != b}


def take(source: int, device: int, lines: dict[tuple[int, int], Line]) -> None:
    """Take in what a namespace has sent, each packet on its line."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(PACKETS_A_TURN):
            packet = os.read(device, 65536)
            line = lines.get((source, packet[TARGET] - 1)) if packet[0] >> 4 == 4 else None
            if line is not None:
                line.put(packet)


def main() -> None:
    namespaces = sys.argv[1].split(",")
    stop: list[int] = []
    parent = os.getppid()
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # it stands for hardware
    try:
        devices = [device(name, f"10.99.0.{number + 1}") for number, name in enumerate(namespaces)]
        lines = lines_between(devices, sys.argv[2:])
        print("READY", flush=True)
        while not stop and os.getppid() == parent:
            pause_s = min(line.deliver() for line in lines.values())
            ready, _, _ = select.select(devices, [], [], max(0.0, pause_s))
            for source, descriptor in enumerate(devices):
                if descriptor in ready:
                    take(source, descriptor, lines)
    finally:
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False)


if __name__ == "__main__":
    main()
