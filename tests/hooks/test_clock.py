"""Clocks of two hosts, acted by two processes of which one has a clock that is shifted and drifts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.analyzers.clock import fit_probes
from ppdiag.hooks import clock, guard
from ppdiag.hooks.recorder import RECORDER

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = bytes(range(16))
OFFSET_NS, DRIFT = 30_000_000_000, 50e-6
MOST_ERROR_NS = 20_000

# Each ends when its standard input is closed; a busy one is a main thread in pure Python, which keeps the interpreter's
# lock for 5 ms at a time.
HEAD = f"""
import json, sys, threading, time
from ppdiag.hooks import clock
from ppdiag.hooks.recorder import RECORDER
begin_ns, role, busy, pause_s = time.perf_counter_ns(), sys.argv[1], sys.argv[2] == "busy", float(sys.argv[3])
drift = {DRIFT} * (1 if sys.argv[4] == "+" else -1)
clock.PAUSE_S = pause_s
def shifted():
    now = time.perf_counter_ns()
    return now + {OFFSET_NS} + round(drift * (now - begin_ns))
if role == "client":
    clock.perf_counter_ns = shifted
ended = threading.Event()
def wait():
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    if not busy:
        ended.wait()
    number = 0
    while not ended.is_set():
        number += 1
"""
SERVER = f"""
server = clock.Server({SECRET!r}, ["127.0.0.1"])
print(json.dumps(server.addresses), flush=True)
wait()
"""
CLIENT = f"""
client = clock.Client({SECRET!r}, [tuple(address) for address in json.loads(sys.argv[5])])
print("asking", flush=True)
wait()
client.last()
now = time.perf_counter_ns()
print(json.dumps({{"probes": RECORDER.lines, "begin_ns": begin_ns, "end_ns": now}}))
"""


def actor(code: str, *arguments: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-S", "-c", HEAD + code, *arguments]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def compare(environment: dict[str, str], *, busy: bool, sign: str, run_s: float, pause_s: float) -> dict[str, Any]:
    """What the client wrote in a run of this length."""
    manner = "busy" if busy else "idle"
    with (
        actor(SERVER, "server", manner, str(pause_s), sign, environment=environment) as server,
        actor_of_client(server, manner, str(pause_s), sign, environment=environment) as client,
    ):
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(run_s)
        output, _ = client.communicate()
        server.communicate()
    return dict(json.loads(output.splitlines()[-1]))


def actor_of_client(server: subprocess.Popen[str], *arguments: str, environment: dict[str, str]) -> Any:
    assert server.stdout is not None
    return actor(CLIENT, "client", *arguments, server.stdout.readline(), environment=environment)


@pytest.mark.parametrize("sign", ["+", "-"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize(
    ("run_s", "pause_s"), [(3.0, 0.5), pytest.param(60.0, 5.0, marks=pytest.mark.slow)], ids=["short", "60s"]
)
def test_a_shifted_and_drifting_clock_is_known_to_20_us_and_within_the_stated_bound(
    checkout_environment: dict[str, str], *, busy: bool, sign: str, run_s: float, pause_s: float
) -> None:
    found = compare(checkout_environment, busy=busy, sign=sign, run_s=run_s, pause_s=pause_s)
    line = fit_probes(found["probes"])
    assert line is not None
    assert len(found["probes"]) >= 3
    drift = DRIFT if sign == "+" else -DRIFT
    for true_ns in (found["begin_ns"], (found["begin_ns"] + found["end_ns"]) // 2, found["end_ns"]):
        local_ns = true_ns + OFFSET_NS + round(drift * (true_ns - found["begin_ns"]))
        aligned_ns = local_ns + line.offset_ns + line.drift * (local_ns - line.origin_ns)
        error_ns = abs(aligned_ns - true_ns)
        assert error_ns <= MOST_ERROR_NS
        assert error_ns <= line.error_ns


@pytest.fixture
def server() -> Iterator[clock.Server]:
    guard.reset()
    made = clock.Server(SECRET, ["127.0.0.1"])
    yield made
    made.close()
    guard.reset()


def test_a_stranger_is_not_answered(server: clock.Server) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.2)
        stranger.connect(tuple(server.addresses[0]))
        for packet in (b"", b"hello", bytes(40), SECRET, SECRET + bytes(24 + 1)):
            stranger.send(packet)
        with pytest.raises(TimeoutError):
            stranger.recv(100)
        stranger.send(SECRET + bytes(24))
        assert len(stranger.recv(100)) == 40


def test_no_address_that_answers_is_said_and_nothing_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        client = clock.Client(SECRET, [silent.getsockname()])
        client.join(10)
    assert not client.is_alive()
    assert "rank 0 does not answer at 127.0.0.1" in capsys.readouterr().err


class Store(dict[str, str]):
    """The part of a store of torch.distributed that is used here."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def add(self, key: str, amount: int) -> int:
        self[key] = str(int(super().get(key, "0")) + amount)
        return int(self[key])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    found = Store()
    module = types.SimpleNamespace(_get_default_store=lambda: found)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", module)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    guard.reset()
    yield found
    clock.uninstall()
    RECORDER.lines.clear()


def test_a_job_on_one_host_opens_no_socket(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    clock.begin(0, 2)
    assert store == {}


def test_ranks_that_share_the_clock_of_rank_0_do_not_ask(store: Store) -> None:
    clock.begin(0, 2)
    assert list(store) == [clock.KEY]
    clock.begin(1, 2)
    assert clock._state["client"] is None


def test_one_rank_of_another_clock_asks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock.begin(1, 3)
    assert store == {}
    clock.begin(0, 3)
    monkeypatch.setattr(clock, "clock_identity", lambda: "another")
    clock.look()
    first, clock._state["client"] = clock._state["client"], None
    clock.begin(2, 3)
    assert clock._state["client"] is None
    first.join(0.1)
    first.last()
    assert {line["type"] for line in RECORDER.lines} == {"clock"}


def test_a_store_that_fails_costs_one_line(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store[clock.KEY] = "no JSON"
    clock.begin(1, 2)
    clock.look()
    assert capsys.readouterr().err.count("ppdiag: clock:") == 1
