"""Network namespaces that all reach each other, over links of which each can have a delay and a rate of its own.

Namespace number i has the address 10.99.0.(i+1). Needs root and a TUN device. Makes the namespaces, prints READY, runs
until it is ended by SIGTERM or its parent has gone, and removes them. A link that is not named is as fast as this loop
can be.

    tunmesh.py NAMESPACES A-B:DELAY_MS:RATE_MBIT ...        (NAMESPACES: their names, joined by commas)
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from tunlink import Line, be_prompt, device, packets  # type: ignore[import-not-found]  # beside this file

TARGET = 19
"""The byte of an IPv4 header that ends its destination."""
FAST = (0.0, float("inf"))


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
    for packet in packets(device):
        line = lines.get((source, packet[TARGET] - 1)) if packet[0] >> 4 == 4 else None
        if line is not None:
            line.put(packet)


def main() -> None:
    namespaces = sys.argv[1].split(",")
    stop: list[int] = []
    parent = os.getppid()
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    be_prompt()
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
