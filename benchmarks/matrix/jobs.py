"""Real gloo jobs, many in little time: all ranks are forked from one process that has imported torch.

A job is recorded by the checkout's own hooks, which arm each forked rank as the start-up file arms a new process. For a
slow link each rank lives in a network namespace of its own.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]
SCRIPTS, TOOLS = ROOT / "tests" / "jobs", ROOT / "tests" / "tools"
TIMEOUT_S = 180.0
"""A job takes some seconds; on a very busy machine many times as long."""
FIRST_ADDRESS = "10.99.0.1"
MARK = "job.json"
"""Beside a run directory that is whole: the job that made it."""


class JobFailed(Exception):
    """A job ended otherwise than it should, or not at all."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of ``sleeping_pipeline.py``.

    Attributes:
        ranks: world size.
        options: its command line.
        links: links that are not as fast as can be, each ``A-B:DELAY_MS:RATE_MBIT`` of two ranks.
    """

    ranks: int
    options: str
    links: tuple[str, ...] = ()


def options(about: str, folder: str) -> argparse.ArgumentParser:
    """What the benchmarks share: where their records are, and which of their jobs to run."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(folder), help=f"where the records are (default: {folder})")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rescore", action="store_true", help="run no jobs: judge the records that are there")
    which.add_argument("--again", action="store_true", help="run all jobs, also those whose record is there")
    return parser


def forge_of(args: argparse.Namespace) -> Forge | None:
    """The forge that the options ask for."""
    if args.again:
        shutil.rmtree(args.folder, ignore_errors=True)
    return None if args.rescore else Forge()


def can_shape_links() -> bool:
    """Whether this machine lets us make namespaces with TUN devices."""
    return os.geteuid() == 0 and os.access("/dev/net/tun", os.W_OK) and shutil.which("ip") is not None


class Forge:
    """Runs jobs, one at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)

    def close(self) -> None:
        """End the process from which the ranks are forked, and a job that hangs."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def run(self, job: Job, folder: Path) -> Path:
        """Runs a job to its end and returns its run directory, in ``folder``.

        Raises:
            JobFailed: a rank ended with another code than 0, or the job did not end.
        """
        shutil.rmtree(folder, ignore_errors=True)
        run_dir = folder / "run"
        run_dir.mkdir(parents=True)
        with mesh(job) as namespaces:
            codes = self._fork([_rank(job, rank, folder, namespaces) for rank in range(job.ranks)])
        if any(codes):
            errors = "\n".join((folder / f"stderr{rank}").read_text() for rank in range(job.ranks))
            raise JobFailed(f"exit codes {codes} of {job.options}\n{errors[-4000:]}")
        return run_dir

    def _fork(self, ranks: Sequence[dict[str, object]]) -> list[int]:
        process = self._process = self._process or _start()
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(ranks), file=process.stdin, flush=True)
        ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        line = process.stdout.readline() if ready else ""
        if not line:
            self.close()
            raise JobFailed(f"a job did not end within {TIMEOUT_S:.0f} s")
        return list(json.loads(line))


def recorded(job: Job, folder: Path, forge: Forge | None) -> Path | None:
    """The run directory of a job, made where it is not in the folder yet; None where it is not and there is no forge.

    Raises:
        JobFailed: the job had to run, and failed.
    """
    mark, text = folder / MARK, json.dumps(asdict(job))
    if not mark.exists() or mark.read_text() != text:
        if forge is None:
            return None
        forge.run(job, folder)
        mark.write_text(text)
    return folder / "run"


def _start() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PPDIAG_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPTS / "forking.py")]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def _rank(job: Job, rank: int, folder: Path, namespaces: Sequence[str]) -> dict[str, object]:
    """What the forking process is told of one rank."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.ranks), "OMP_NUM_THREADS": "1"}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_port(folder)),
        "PPDIAG_RUN_DIR": str(folder / "run"),
    }
    if namespaces:
        environment |= {"MASTER_ADDR": FIRST_ADDRESS, "GLOO_SOCKET_IFNAME": f"tun{namespaces[rank][-8:]}"}
    arm = str(TOOLS / "arm_forked.py")  # once to load our package, once to arm the process
    return {
        "argv": [str(SCRIPTS / "sleeping_pipeline.py"), "--quiet", *job.options.split()],
        "environment": environment,
        "stderr": str(folder / f"stderr{rank}"),
        "start": [arm, arm],
        "namespace": f"/var/run/netns/{namespaces[rank]}" if namespaces else "",
    }


def _port(folder: Path) -> int:
    """A free port, the same for all ranks of a job."""
    file = folder / "port"
    if not file.exists():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            file.write_text(str(probe.getsockname()[1]))
    return int(file.read_text())


@contextlib.contextmanager
def mesh(job: Job) -> Iterator[list[str]]:
    """A network namespace for each rank; none where all links are as fast as can be."""
    if not job.links:
        yield []
        return
    names = [f"pp{os.getpid() % 100_000}r{rank}" for rank in range(job.ranks)]
    command = [sys.executable, str(TOOLS / "tunmesh.py"), ",".join(names), *job.links]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as loop:
        try:
            assert loop.stdout is not None
            if loop.stdout.readline().strip() != "READY":
                raise JobFailed("this machine lets us make no network namespaces with TUN devices")
            yield names
        finally:
            loop.send_signal(signal.SIGTERM)
            loop.wait(20)
