"""Compares the clocks of hosts: ping-pong over a UDP socket of our own, with the kernel's time of arrival.

Rank 0 answers, on a thread that sleeps in the kernel. The first rank of every other clock asks, in bursts, on a thread
of its own. The training thread is never held up: it only looks into the job's store, without waiting, until it knows
where rank 0 listens. A packet's time of arrival is the kernel's (``SO_TIMESTAMPNS``), so that a thread which must wait
for the interpreter's lock (5 ms and more beside pure Python) spoils nothing.

Jobs on one host have one clock and open no socket. The socket is bound to the address of the job's own network, answers
only packets with the secret that is in the job's store, and never more than it was sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppdiag.hooks import guard
from ppdiag.hooks.recorder import RECORDER
from ppdiag.rundir import clock_identity

if TYPE_CHECKING:
    from collections.abc import Callable

PROBE = "clock"
KEY = "ppdiag/clock"
FIRST_PAUSES_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
PAUSE_S = 10.0
"""Between bursts, in the long run: 50 ppm of drift are 0.5 ms in this time, which the fitted line takes out."""
PROBES = 8
"""In a burst; with the kernel's times of arrival already the first are good."""
BURST_S = 0.5
"""A burst ends after this time: so on a link of 100 ms it has five probes."""
PATIENCE_S = 0.25
"""For an answer. A link with a longer round trip gives no bounds worth having."""
LAST_PATIENCE_S = 0.05
"""For the answers of the burst at the job's end, when rank 0 may be gone."""
LOOKS = 64
"""Times that the store is looked into, at ends of steps: rank 0 has written there before its own first step ended."""
_PING = struct.Struct("<16sQ")
_PONG = struct.Struct("<16sQqq")
_SO_TIMESTAMPNS = 35
"""Linux, asm-generic/socket.h; Python does not name it."""
_OLDEST_NS = 1_000_000_000
"""A time of arrival further back than this is not believed: somebody has set the clock of the host in between."""

_state: dict[str, Any] = {"server": None, "client": None, "looks": 0}


def install() -> None:
    """Have the recorder tell when it begins, at each step, and at the end."""
    for listeners, function in _pairs():
        if function not in listeners:
            listeners.append(function)
    guard.register(PROBE, uninstall)


def uninstall() -> None:
    """Close the sockets and stop listening to the recorder."""
    for listeners, function in _pairs():
        if function in listeners:
            listeners.remove(function)
    for name in ("server", "client"):
        thread, _state[name] = _state[name], None
        if thread is not None:
            thread.close()
    _state["looks"] = 0


def begin(rank: int, world_size: int) -> None:
    """The record has begun: rank 0 begins to answer, the others look for it."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        return  # one host
    if rank == 0:
        _guarded(_serve)
    else:
        _state["looks"] = LOOKS
        look()


def look() -> None:
    """Look once, without waiting, whether rank 0 has said where it listens."""
    if _state["looks"] > 0:
        _state["looks"] -= 1
        _guarded(_find)


def finish() -> None:
    """At the job's end: one more burst, so that the fitted line spans the whole run."""
    client = _state["client"]
    if client is not None:
        _guarded(client.last)


def _pairs() -> tuple[tuple[list[Any], Any], ...]:
    return (RECORDER.on_begin, begin), (RECORDER.on_step, look), (RECORDER.on_finish, finish)


def _guarded(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception as error:
        guard.failed(PROBE, error)


def _store() -> Any:
    return sys.modules["torch.distributed.distributed_c10d"]._get_default_store()


def _serve() -> None:
    server = _state["server"] = Server(secrets.token_bytes(16), addresses())
    said = {"clock": clock_identity(), "secret": server.secret.hex(), "addresses": server.addresses}
    _store().set(KEY, json.dumps(said))


def _find() -> None:
    store = _store()
    if not store.check([KEY]):
        return
    _state["looks"] = 0
    said = json.loads(store.get(KEY))
    own = clock_identity()
    # Only the first rank of each clock asks: the analysis lends its line to the others.
    if said["clock"] != own and store.add(f"{KEY}/{own}", 1) == 1:
        _state["client"] = Client(bytes.fromhex(said["secret"]), [tuple(pair) for pair in said["addresses"]])


def addresses() -> list[str]:
    """Addresses of this host under which the job's other hosts may reach it, the likeliest first."""
    master = os.environ.get("MASTER_ADDR", "")
    found = [master] if master else []
    for target in (master, "192.0.2.1"):  # TEST-NET-1: asks for the default route, sends nothing
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            found.append(probe.getsockname()[0])
    return list(dict.fromkeys(found))


class Server(threading.Thread):
    """Answers pings.

    Args:
        secret: 16 bytes that a ping must begin with.
        hosts: addresses to listen on; those that are not this host's are passed over.
    """

    def __init__(self, secret: bytes, hosts: list[str]) -> None:
        super().__init__(name="ppdiag-clock", daemon=True)
        self.secret = secret
        self._sockets = []
        for host in hosts:
            with contextlib.suppress(OSError):
                self._sockets.append(_timed_socket((host, 0)))
        self.addresses = [list(found.getsockname()[:2]) for found in self._sockets]
        self.start()

    def run(self) -> None:
        """Answer until the sockets are closed."""
        with contextlib.suppress(OSError, ValueError):  # closed under our feet, at the end
            while self._sockets:
                for ready in select.select(self._sockets, [], [])[0]:
                    self._answer(ready)

    def close(self) -> None:
        """Answer no more."""
        sockets, self._sockets = self._sockets, []
        for closing in sockets:
            closing.close()

    def _answer(self, ready: socket.socket) -> None:
        data, arrived_ns, sender = _receive(ready)
        if len(data) != _PONG.size or not secrets.compare_digest(data[:16], self.secret):
            return  # a stranger; and a ping is as long as its answer, so that nobody gains by a false address
        number = _PING.unpack_from(data)[1]
        ready.sendto(_PONG.pack(self.secret, number, arrived_ns, perf_counter_ns()), sender)


class Client(threading.Thread):
    """Pings rank 0 in bursts and writes the best probe of each into the record."""

    def __init__(self, secret: bytes, servers: list[tuple[Any, ...]]) -> None:
        super().__init__(name="ppdiag-clock", daemon=True)
        self._secret = secret
        self._servers = servers
        self._number = 0
        self._burst = 0
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        """A burst now and then."""
        try:
            self._connect()
            pauses = iter(FIRST_PAUSES_S)
            while self._socket is not None and not self._stopped.wait(next(pauses, PAUSE_S)):
                self.burst()
        except Exception as error:
            guard.failed(PROBE, error)

    def close(self) -> None:
        """Ask no more."""
        self._stopped.set()
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def last(self) -> None:
        """The burst at the job's end, on the thread that ends it; gives up at the first ping without an answer."""
        self._stopped.set()
        if self._lock.acquire(timeout=PATIENCE_S):
            self._lock.release()
            self.burst(patience_s=LAST_PATIENCE_S)
        self.close()

    def burst(self, patience_s: float = PATIENCE_S) -> None:
        """Ping until enough have come back; write the one with the shortest way."""
        with self._lock:
            found: list[tuple[int, int, int, int]] = []
            begin = time.monotonic()
            while self._socket is not None and len(found) < PROBES and time.monotonic() - begin < BURST_S:
                probe = self._ping(self._socket, patience_s)
                if probe is None:
                    break
                found.append(probe)
            if found:
                t0, t1, t2, t3 = min(found, key=lambda probe: probe[3] - probe[0] - (probe[2] - probe[1]))
                self._burst += 1
                RECORDER.lines.append({"type": "clock", "t0": t0, "t1": t1, "t2": t2, "t3": t3, "burst": self._burst})

    def _connect(self) -> None:
        """Find the address that answers."""
        for host, port in self._servers:
            with contextlib.suppress(OSError):
                connection = _timed_socket(None)
                connection.connect((host, port))
                if any(self._ping(connection, PATIENCE_S) for _ in range(3)):
                    self._socket = connection
                    return
                connection.close()
        hosts = ", ".join(str(server[0]) for server in self._servers)
        guard.say_once(PROBE, f"rank 0 does not answer at {hosts}", "clocks of hosts are compared by their wall clocks")

    def _ping(self, connection: socket.socket, patience_s: float) -> tuple[int, int, int, int] | None:
        """(sent here, arrived there, answered there, arrived here) in ns on the two clocks; None without an answer."""
        self._number += 1
        deadline = time.monotonic() + patience_s
        packet = _PING.pack(self._secret, self._number).ljust(_PONG.size, b"\0")
        t0 = perf_counter_ns()
        connection.send(packet)
        while (left_s := deadline - time.monotonic()) > 0:
            if not select.select([connection], [], [], left_s)[0]:
                return None
            data, t3, _ = _receive(connection)
            if len(data) == _PONG.size:
                secret, number, t1, t2 = _PONG.unpack(data)
                if secret == self._secret and number == self._number:  # else an answer that came too late
                    return t0, t1, t2, t3
        return None


def _timed_socket(address: tuple[str, int] | None) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        if sys.platform == "linux":
            made.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        if address is not None:
            made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _receive(ready: socket.socket) -> tuple[bytes, int, Any]:
    """(packet, when it arrived in ns on the rank's clock, sender).

    The kernel's time of arrival is Unix time; both clocks are read now to put it on the rank's own.
    """
    data, ancillary, _, sender = ready.recvmsg(_PONG.size + 1, 64)
    before = perf_counter_ns()
    unix_ns = time.time_ns()
    now = (before + perf_counter_ns()) // 2
    for level, kind, stamp in ancillary:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(stamp) == 16:
            seconds, nanoseconds = struct.unpack("=qq", stamp)
            age_ns = unix_ns - (seconds * 1_000_000_000 + nanoseconds)
            if 0 <= age_ns < _OLDEST_NS:
                return data, now - age_ns, sender
    return data, now, sender
