"""Whatever goes wrong in the recorder or around it: losses, weights and exit code of the job are as without it.

``make fault-runs`` runs all cases, each with several seeds; the quick tests a sample of them. The many are forked from
one process that has imported torch; those of the sample are started like any job.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from ppdiag.rundir import parse_rank_file_name
from tests.e2e.conftest import BOOTSTRAP, JOBS, ROOT, job_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = 2
TIMEOUT_S = 400.0
SEEDS = int(os.environ.get("FAULT_SEEDS", "3"))
TOOLS = Path(__file__).parents[1] / "tools"
SABOTEUR = TOOLS / "saboteur"
SMALL_DISK_BYTES = 48 << 10

HOOK_POINTS = {
    "torch": (
        "adapters.torch_pipelining:_say_mesh",
        "adapters.torch_pipelining:_begin_step",
        "adapters.torch_pipelining:_say_facts",
        "adapters.torch_pipelining:_release",
        "process_group:_channel",
        "process_group:_label",
        "collectives:describe",
        "process_group:_posted",
        "process_group:write_abandoned",
        "groups:find",
        "groups:_members",
        "optimizer:_ended",
        "recorder:Recorder.optimizer_begins",
        "recorder:Recorder.optimizer_ended",
        "recorder:Recorder.pipeline_ended",
        "recorder:compute_tail",
        "recorder:_header",
        "recorder:Recorder.begin_step",
        "recorder:Recorder.fact",
        "recorder:Recorder.flush_soon",
        "recorder:Recorder.before_flush",
        "recorder:Recorder._begin",
        "writer:Writer.flush",
        "writer:Writer._write_spans",
        "writer:Writer._write_lines",
        "writer:Writer._write_state",
        "writer:Writer._open",
        "writer:anchor",
        "host_causes:_say",
        "instruments:look",
        "install:_note_process",
        "install:_probes",
    ),
    "hand": (
        "modules:Inference.message",
        "modules:Inference.waited",
        "modules:Inference.optimized",
        "modules:Inference.new_step",
        "modules:Inference.backward_begins",
        "modules:Inference.backward_ends",
        "modules:Inference.module_begins",
        "modules:Inference.module_ends",
        "modules:Inference.close",
        "modules:install_module_calls",
        "modules:_in_backward",
        "process_group:_channel",
        "process_group:_label",
        "recorder:compute_tail",
        "recorder:Recorder.begin_step",
    ),
}
MISSING = (
    "torch.distributed.distributed_c10d:ProcessGroup",
    "torch.distributed.distributed_c10d:Work",
    "torch.distributed.pipelining.stage:_PipelineStageBase",
    "torch.distributed.pipelining.schedules:PipelineScheduleSingle",
    "torch.autograd.variable:Variable",
    "torch.optim.optimizer:register_optimizer_step_pre_hook",
)


class Case(NamedTuple):
    """A job, and what is done to the recorder in it."""

    options: str
    sabotage: str = ""
    disk: str = ""
    """``small`` or ``readonly``: what the run directory lies on."""
    variables: str = ""


def cases() -> list[Case]:
    found = [Case(f"--loop {loop}", f"raise:{point}:") for loop, points in HOOK_POINTS.items() for point in points]
    found += [Case("--loop torch", f"missing:{attribute}") for attribute in MISSING]
    for point in ("control:Control.step_ended", "control:Control._switch", "process_group:write_pending"):
        found.append(Case("--loop torch --steps 16", f"raise:{point}:", variables="PPDIAG_MODE=overhead"))
    for loop in ("torch", "hand"):
        found += [Case(f"--loop {loop} --disturb {how}") for how in ("delete", "replace", "readonly", "time")]
        found += [Case(f"--loop {loop} --steps 150", disk="small"), Case(f"--loop {loop}", disk="readonly")]
        found += [Case(f"--loop {loop} {what}") for what in ("--fork", "--thread", "--collect", "--raise-at 3")]
        found += [Case(f"--loop {loop}", "jump:"), Case(f"--loop {loop} --steps 30", variables="PPDIAG_MAX_BYTES=9000")]
        found += [Case(f"--loop {loop} --steps 16", variables="PPDIAG_MODE=overhead")]
    return [*found, Case("--loop torch --compile"), Case("--loop torch --compile --thread")]


CASES = cases()
ALL = [(case, seed) for seed in range(SEEDS) for case in CASES]
SAMPLE = [(case, 0) for case in random.Random(7).sample(CASES, 4)]


@contextlib.contextmanager
def disk(kind: str, folder: Path) -> Iterator[None]:
    """The folder on a file system of its own, where the case wants one."""
    if not kind:
        yield
        return
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a small or read-only disk needs root, to mount one")
    folder.mkdir()
    option = "ro" if kind == "readonly" else f"size={SMALL_DISK_BYTES}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this machine lets us mount nothing")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Start = Callable[[list[str], list[dict[str, str]], list[Path]], list[int]]
"""Runs a job (arguments, environment of each rank, file for each one's standard error); gives the exit codes."""


def start_processes(arguments: list[str], environments: list[dict[str, str]], errors: list[Path]) -> list[int]:
    """A job of new processes."""
    command = [sys.executable, str(JOBS / "faults.py"), *arguments]
    with contextlib.ExitStack() as stack:
        ranks = [
            subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, stderr=stack.enter_context(error.open("wb")))
            for own, error in zip(environments, errors, strict=True)
        ]
        try:
            return [rank.wait(TIMEOUT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


class Server:
    """Jobs of processes that are forked from one."""

    def __init__(self) -> None:
        environment = job_environment(None) | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(JOBS / "forking.py")]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def __call__(self, arguments: list[str], environments: list[dict[str, str]], errors: list[Path]) -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        arm = str(TOOLS / "arm_forked.py")
        start = [arm, str(SABOTEUR / "sitecustomize.py"), arm]
        ranks = [
            {"argv": [str(JOBS / "faults.py"), *arguments], "environment": own, "stderr": str(error), "start": start}
            for own, error in zip(environments, errors, strict=True)
        ]
        print(json.dumps(ranks), file=self.process.stdin, flush=True)
        return list(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # a job that hangs too
        self.process.communicate()


def run_job(start: Start, options: str, folder: Path, environment: dict[str, str]) -> tuple[list[int], list[str], str]:
    """(exit codes, results, standard error) of the job's ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    local = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)} for rank in range(RANKS)]
    errors = [folder / f"stderr{rank}" for rank in range(RANKS)]
    arguments = [*options.split(), "--results", str(folder / "result")]
    codes = start(arguments, [environment | own for own in local], errors)
    results = [path.read_text() for rank in range(RANKS) if (path := folder / f"result{rank}").exists()]
    return codes, results, "\n".join(error.read_text() for error in errors)


@cache
def without_us(start: Start, options: str, folder: Path) -> tuple[list[int], list[str]]:
    """The same job as nobody watches it."""
    codes, results, errors = run_job(start, options, folder / options.replace(" ", ""), job_environment(None))
    assert len(results) == RANKS, errors
    return codes, results


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("without")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def check(case: Case, seed: int, folder: Path, references: Path, start: Start = start_processes) -> str:
    """Runs the case, compares, and returns the job's standard error."""
    run_dir = folder / "run"
    numbered = case.sabotage.endswith(":")
    nth = random.Random(f"{case}{seed}").choice([1, 1, 2, 3, 5, 20]) if numbered else ""
    with disk(case.disk, run_dir):
        environment = job_environment(None) | {
            "PPDIAG_RUN_DIR": str(run_dir),
            "PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), str(SABOTEUR)]),
            "SABOTAGE": f"{case.sabotage}{nth}",
            **dict([case.variables.split("=")] if case.variables else []),
        }
        codes, results, errors = run_job(start, case.options, folder / "job", environment)
    assert (codes, results) == without_us(start, case.options, references), errors[-4000:]
    for line in errors.splitlines():
        if "planted in the user" not in line:
            assert "planted" not in line or line.startswith("ppdiag: "), errors[-4000:]
    said = [line for line in errors.splitlines() if line.startswith("ppdiag: ")]
    assert len(said) <= 6 * RANKS, errors[-4000:]
    return errors


@pytest.mark.parametrize("point", sorted({point for points in HOOK_POINTS.values() for point in points}))
def test_what_is_made_to_raise_is_there(point: str) -> None:
    module, _, names = point.partition(":")
    found = importlib.import_module(f"ppdiag.hooks.{module}")
    for name in names.split("."):
        found = getattr(found, name)


@pytest.mark.parametrize(("case", "seed"), SAMPLE)
def test_losses_weights_and_exit_code_are_those_of_the_job_alone(
    case: Case, seed: int, tmp_path: Path, references: Path
) -> None:
    check(case, seed, tmp_path, references)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(("case", "seed"), [run for run in ALL if run not in SAMPLE])
def test_losses_weights_and_exit_code_are_those_of_the_job_alone_in_every_case(
    case: Case, seed: int, tmp_path: Path, references: Path, server: Server
) -> None:
    check(case, seed, tmp_path, references, server)


def test_a_full_disk_is_said_once_a_rank(tmp_path: Path, references: Path) -> None:
    errors = check(Case("--loop torch --steps 150", disk="small"), 0, tmp_path, references)
    assert errors.count("cannot write the record") == RANKS


@pytest.mark.slow
@pytest.mark.timeout(900)  # two jobs of ten thousand steps
def test_ten_thousand_steps_stay_within_the_size_that_was_set(tmp_path: Path, references: Path) -> None:
    limit = 1_000_000
    case = Case("--loop hand --steps 10000", variables=f"PPDIAG_MAX_BYTES={limit}")
    errors = check(case, 0, tmp_path, references)
    assert errors.count("has reached its limit of 1000000 bytes") == RANKS
    sizes = [path.stat().st_size for path in (tmp_path / "run").iterdir() if parse_rank_file_name(path.name)]
    assert len(sizes) == 3 * RANKS
    assert max(sizes) <= limit
    assert sum(sizes) <= RANKS * (limit + 100_000)
