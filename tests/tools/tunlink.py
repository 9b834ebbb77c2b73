"""A slow link between two network namespaces: two TUN devices, and a loop that delays and paces what passes.

Each direction has its own delay and rate, is first in, first out, and loses nothing. Needs root and a TUN device. Makes
the namespaces, prints READY, runs until it is ended by SIGTERM, and removes them.

    tunlink.py NAMESPACE_A NAMESPACE_B DELAY_MS RATE_MBIT
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
ADDRESSES = ("10.99.0.1", "10.99.0.2")
MTU = 1500
PACKETS_A_TURN = 64


class Line:
    """One direction of a link: what is put in comes out at the device ``target``."""

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


def packets(device: int) -> Iterator[bytes]:
    """What has been sent to a device, a turn's worth of it."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(PACKETS_A_TURN):
            yield os.read(device, 65536)


def shell(*command: str) -> None:
    subprocess.run(command, check=True)


def device(namespace: str, address: str) -> int:
    """A new namespace with a TUN device in it; returns the device's file descriptor."""
    name = f"tun{namespace[-8:]}"
    shell("ip", "netns", "add", namespace)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    shell("ip", "link", "set", name, "netns", namespace)
    inside = ("ip", "-n", namespace)
    shell(*inside, "addr", "add", f"{address}/24", "dev", name)
    shell(*inside, "link", "set", name, "mtu", str(MTU), "txqueuelen", "5000", "up")
    shell(*inside, "link", "set", "lo", "up")
    return fd


def be_prompt() -> None:
    """Run before others: this loop stands for hardware."""
    with contextlib.suppress(PermissionError):
        os.nice(-10)


def main() -> None:
    namespaces, delay_s, bytes_per_s = sys.argv[1:3], float(sys.argv[3]) / 1e3, float(sys.argv[4]) * 1e6 / 8
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    be_prompt()
    try:
        a, b = map(device, namespaces, ADDRESSES)
        lines = {a: Line(b, delay_s, bytes_per_s), b: Line(a, delay_s, bytes_per_s)}
        print("READY", flush=True)
        while not stop:
            pause_s = min(line.deliver() for line in lines.values())
            ready, _, _ = select.select(list(lines), [], [], max(0.0, pause_s))
            for source in ready:
                for packet in packets(source):
                    lines[source].put(packet)
    finally:
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False)


if __name__ == "__main__":
    main()
