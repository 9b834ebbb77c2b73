"""Two network namespaces and a slow link between them: the link is named, with its direction, bytes and bandwidth.

The second namespace also has a clock of its own, 1000 s ahead, where the kernel has time namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ppdiag.analyzers.diagnose import diagnose
from ppdiag.model import Kind
from tests.e2e.conftest import JOBS, job_environment, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ppdiag.diagnosis import Diagnosis, LinkResult
    from ppdiag.trace import Trace

TUNLINK = Path(__file__).parents[1] / "tools" / "tunlink.py"
ADDRESS, PORT = "10.99.0.1", 29431
TIMEOUT_S = 200.0
MICROBATCHES, STEPS, ROW_BYTES = 4, 6, 32
SMALL_MESSAGES = ("--rows", "512", "--forward-ms", "40", "--backward-ms", "80")
"""Ops so long that the pauses of a busy machine are little beside them."""
AHEAD_S = 1000

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
    pytest.mark.skipif(not os.access("/dev/net/tun", os.W_OK), reason="the slow link needs /dev/net/tun"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="making network namespaces needs the ip program"),
]


@contextlib.contextmanager
def slow_link(delay_ms: float, rate_mbit: float) -> Iterator[tuple[str, str]]:
    """Two namespaces with a link between them."""
    names = (f"ppa{os.getpid()}", f"ppb{os.getpid()}")
    command = [sys.executable, str(TUNLINK), *names, str(delay_ms), str(rate_mbit)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as link:
        try:
            assert link.stdout is not None
            if link.stdout.readline().strip() != "READY":
                pytest.skip("this kernel lets us make no namespace with a TUN device")
            yield names
        finally:
            link.send_signal(signal.SIGTERM)
            link.wait(20)


def own_clock() -> list[str]:
    """The program that gives a command a clock of its own; nothing where the kernel has none to give."""
    command = ["unshare", "--time", "--fork", "--kill-child", "--monotonic", str(AHEAD_S), "--boottime", str(AHEAD_S)]
    works = shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if works and works.returncode == 0 else []


def node_command(namespace: str, node: int, arguments: list[str]) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--node-rank"]
    where = ["--master-addr", ADDRESS, "--master-port", str(PORT)]
    inside = ["ip", "netns", "exec", namespace, *(own_clock() if node else [])]
    return [*inside, *launcher, str(node), *where, str(JOBS / "sleeping_pipeline.py"), *arguments]


def run_over(run_dir: Path, delay_ms: float, rate_mbit: float, *options: str) -> Trace:
    """The record of a job of two ranks, one in each namespace."""
    arguments = ["--steps", str(STEPS), "--microbatches", str(MICROBATCHES), *options]
    with slow_link(delay_ms, rate_mbit) as names, contextlib.ExitStack() as stack:
        nodes = []
        for node, name in enumerate(names):
            environment = job_environment(run_dir) | {"GLOO_SOCKET_IFNAME": f"tun{name[-8:]}"}
            output = stack.enter_context((run_dir.parent / f"output{node}").open("wb"))
            command = node_command(name, node, arguments)
            nodes.append(stack.enter_context(subprocess.Popen(command, env=environment, stdout=output, stderr=output)))
        try:
            codes = [process.wait(TIMEOUT_S) for process in nodes]
        finally:
            for process in nodes:
                process.kill()
    assert codes == [0, 0], (run_dir.parent / "output1").read_text()[-4000:]
    return read_trace(run_dir)


def link_of(found: Diagnosis, direction: str) -> LinkResult:
    return next(link for link in found.links if link.direction == direction)


@pytest.mark.slow
@pytest.mark.parametrize("rate_mbit", [10.0, 40.0, 100.0])
def test_a_link_of_little_bandwidth_is_named_with_its_bytes_and_rate(tmp_path: Path, rate_mbit: float) -> None:
    rows = 1600 * int(rate_mbit)  # a message takes 0.4 s at each rate
    trace = run_over(tmp_path / "run", 1.0, rate_mbit, "--rows", str(rows), "--forward-ms", "5", "--backward-ms", "10")
    found = diagnose(trace)
    assert (found.verdict.cause, found.verdict.link) == ("communication", (0, 1)), found.verdict.text
    for direction, ends in (("forward", (0, 1)), ("backward", (1, 0))):
        link = link_of(found, direction)
        assert (link.src_stage, link.dst_stage) == ends
        assert link.bytes == rows * ROW_BYTES
        assert link.bandwidth_bytes_per_s == pytest.approx(rate_mbit * 1e6 / 8, rel=0.15)


@pytest.mark.slow
def test_a_link_of_long_delay_is_named(tmp_path: Path) -> None:
    found = diagnose(run_over(tmp_path / "run", 50.0, 100.0, *SMALL_MESSAGES))
    assert (found.verdict.cause, found.verdict.link) == ("communication", (0, 1)), found.verdict.text
    # gloo is a rendezvous: a receiver that is ready costs a message the way there and back, and then its bytes
    assert 0.05 <= link_of(found, "forward").transfer_s <= 0.25


@pytest.mark.slow
def test_the_same_link_without_delay_is_not_blamed(tmp_path: Path) -> None:
    trace = run_over(tmp_path / "run", 0.0, 10_000.0, *SMALL_MESSAGES)
    found = diagnose(trace)
    assert found.verdict.cause != "communication"
    assert found.why.communication < 0.05
    if own_clock():
        assert trace.ranks[0].clock != trace.ranks[1].clock
        assert trace.clock_error_s < 2e-3
        spans = trace.spans
        first = [spans["start_ns"][(spans["rank"] == rank) & (spans["kind"] == Kind.FORWARD)].min() for rank in (0, 1)]
        assert abs(first[1] - first[0]) < 5e9  # and not 1000 s
