"""Does the recorder tell the truth on this machine's GPU, and leave the job alone? Prints a table of PASS and FAIL.

Several ranks share one GPU. NCCL refuses that unless it takes the ranks for different hosts: each has a host identity
of its own (``NCCL_HOSTID``), and they talk by sockets over loopback (a real fallback to TCP). From NCCL 2.30.3 on
``NCCL_MULTI_RANK_GPU_ENABLE=1`` allows it officially. Where neither works, one rank is checked alone, and that is said.

    python benchmarks/gpu_check.py            # under eight minutes on a bare CUDA machine, with the torch found there
    python benchmarks/gpu_check.py --dry-run  # without a GPU: a stand-in device and gloo
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "benchmarks" / "gpu" / "job.py"
TOOL = ROOT / "tests" / "tools" / "nvtx_tool.c"
JOB_TIMEOUT_S = 150.0
"""Of each job; there are at most three."""
KERNEL_TOLERANCE = 0.03
MOST_AHEAD_MS = 50.0
"""The host must be back from launching 200 ms of work by then."""
MOST_SLOWER = 0.02
MOST_PAIR_US = 12.0
MOST_CLOCK_ERROR_S = 500e-6

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(JOB.parent))


class Skipped(Exception):
    """A check cannot be made here; the text says why."""


@dataclass
class Check:
    """What is known of the machine, and the rows of the table.

    Attributes:
        ranks: ranks of the jobs.
        dry: no GPU: stand-in device, gloo.
        folder: where all is put.
    """

    ranks: int
    dry: bool
    folder: Path
    rounds: int
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def run(self, name: str, check: Callable[[], str]) -> None:
        """One row: the check returns what it found, or raises."""
        begin = time.perf_counter()
        try:
            verdict, text = "PASS", check()
        except Skipped as skipped:
            verdict, text = "SKIP", str(skipped)
        except Exception as error:  # noqa: BLE001  (whatever it is, the other rows are wanted too)
            verdict, text = "FAIL", f"{type(error).__name__}: {error}"
        self.rows.append((verdict, name, text))
        print(f"{verdict}  {name}: {text}  ({time.perf_counter() - begin:.1f} s)", flush=True)

    @property
    def is_good(self) -> bool:
        return not any(verdict == "FAIL" for verdict, _, _ in self.rows)

    def job(self, what: str) -> str:
        """Run one of the jobs under the recorder.

        Raises:
            RuntimeError: it failed; the end of its output.
        """
        bootstrap = str(ROOT / "ppdiag" / "hooks" / "bootstrap")
        run_dir = self.run_dir(what)
        environment = {**os.environ, "PPDIAG_RUN_DIR": str(run_dir), "PYTHONPATH": bootstrap, "OMP_NUM_THREADS": "1"}
        environment |= self._nccl_variables(run_dir) | self._nvtx_variables()
        run_dir.mkdir(parents=True)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        script = [str(JOB), what, "--results", str(self.folder / f"{what}-"), "--rounds", str(self.rounds)]
        command = [*launcher, "--no-python", sys.executable, "-c", HOST_ID, *script, *self.dry * ["--dry-run"]]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=JOB_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the job hung for {JOB_TIMEOUT_S:.0f} s") from error
        (self.folder / f"{what}.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            raise RuntimeError(_last_error(done.stderr) or f"exit code {done.returncode}")
        return f"{self.ranks} ranks"

    def run_dir(self, what: str) -> Path:
        return self.folder / f"run-{what}"

    def results(self, what: str) -> list[dict[str, Any]]:
        """What each rank of a job found."""
        return [json.loads((self.folder / f"{what}-{rank}").read_text()) for rank in range(self.ranks)]

    def trace(self, what: str) -> Any:
        """The record of a job."""
        try:
            from ppdiag.analyzers.sources.run_directory import RunDirectory
        except ImportError as error:
            raise Skipped(f"the analysis cannot run here: {error}") from error
        return RunDirectory().read([self.run_dir(what)], None)

    def words(self, what: str, kind: str) -> list[dict[str, Any]]:
        """Words of one type, of all ranks."""
        lines = [line for file in self.run_dir(what).glob("rank*.jsonl") for line in file.read_text().splitlines()]
        return [word for word in map(json.loads, lines) if word["type"] == kind]

    def _nccl_variables(self, run_dir: Path) -> dict[str, str]:
        variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{run_dir}/nccl-%h-%p.log"}
        if self.ranks > 1:
            variables |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        return variables

    def _nvtx_variables(self) -> dict[str, str]:
        library = self.folder / "nvtx_tool.so"
        if not library.exists():
            return {}
        return {"NVTX_INJECTION64_PATH": str(library), "NVTX_TOOL_FILE": str(self.folder / "ranges")}


HOST_ID = """
import os, runpy, sys
os.environ["NCCL_HOSTID"] = "rank-" + os.environ["RANK"]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Starts the job in a rank that says it is on a host of its own."""


def _last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "Error" in line and "ChildFailedError" not in line]
    return lines[-1][:300] if lines else ""


def find_device(check: Check) -> str:
    """What is here."""
    import torch

    if check.dry:
        return f"torch {torch.__version__}, stand-in device"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}, NCCL {nccl}, {check.ranks} ranks on one GPU"


def build_tool(check: Check) -> str:
    """The NVTX tool, compiled here."""
    if shutil.which("cc") is None:
        raise Skipped("no C compiler to build the tool with")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", check.folder / "nvtx_tool.so", TOOL], check=True)
    return "built"


def run_timing(check: Check) -> str:
    """The first job; where several ranks cannot share the device, one rank alone."""
    try:
        return check.job("timing")
    except RuntimeError as error:
        if check.ranks == 1 or check.dry:
            raise
        shutil.move(check.run_dir("timing"), check.folder / "run-refused")
        asked, check.ranks = check.ranks, 1
        return f"{check.job('timing')}: {asked} ranks cannot share this GPU ({error})"


def known_kernel(check: Check) -> str:
    """Optimizer steps of known length, timed by events."""
    spans = check.trace("timing").spans
    import numpy as np
    from job import KERNEL_MS, KERNELS

    from ppdiag.model import Flag, Kind

    longest = 0.0
    for rank in range(check.ranks):
        own = spans[(spans["kind"] == Kind.OPTIMIZER) & (spans["rank"] == rank)][:KERNELS]
        assert len(own) == KERNELS, f"rank {rank}: {len(own)} of {KERNELS} spans"
        assert (own["flags"] & Flag.DEVICE).all(), f"rank {rank}: spans that the device did not time"
        took_ms = (own["end_ns"] - own["start_ns"]) / 1e6
        wrong = float(np.abs(np.median(took_ms) / KERNEL_MS - 1))
        longest = max(longest, wrong)
    assert longest <= (0.25 if check.dry else KERNEL_TOLERANCE), f"off by {longest:.1%} of {KERNEL_MS} ms"
    return f"off by at most {longest:.2%} of {KERNEL_MS:.0f} ms (median of {KERNELS}, worst rank)"


def runs_ahead(check: Check) -> str:
    """The host comes back from a launch long before the device is done."""
    worst = max(found["ahead_ms"] for found in check.results("timing"))
    assert worst < MOST_AHEAD_MS, f"the call took {worst:.1f} ms: something waited for the device"
    return f"launching 200 ms of work took the host {worst:.2f} ms, with synchronising calls forbidden"


def synchronising_calls(check: Check) -> str:
    """The job's own wait for the kernels of known length is in the record."""
    spans = check.trace("timing").spans
    from job import KERNEL_MS, KERNELS

    from ppdiag.model import HostCause, Kind

    waits = spans[(spans["kind"] == Kind.HOST) & (spans["op"] == HostCause.SYNCHRONISING)]
    longest = []
    for rank in range(check.ranks):
        own = waits[waits["rank"] == rank]
        longest.append(float((own["end_ns"] - own["start_ns"]).max(initial=0)) / 1e6)
    assert min(longest) > KERNELS * KERNEL_MS / 2, f"ranks waited for at most {longest} ms"
    return f"each rank waited {min(longest):.0f} ms or more in torch.cuda.synchronize for {KERNELS} kernels"


def cost_of_events(check: Check) -> str:
    """What the two events of an op cost the training thread."""
    costs = [found["pair_us"] for found in check.results("timing")]
    assert all(cost is not None for cost in costs), "the recorder never saw the device"
    assert max(costs) < MOST_PAIR_US or check.dry, f"{max(costs):.1f} us"
    return f"{max(costs):.1f} us of the training thread for the two events of an op"


def no_added_time(check: Check) -> str:
    """Steps with and without hooks, in turns."""
    if check.ranks == 1:
        raise Skipped("one rank has no pipeline")
    found = check.results("timing")[0]
    ratios = [a / b - 1 for a, b in zip(found["with"], found["without"], strict=True)]
    middle = statistics.median(ratios)
    spread = 1.5 * statistics.median(abs(ratio - middle) for ratio in ratios) / len(ratios) ** 0.5
    text = f"{middle:+.2%} +- {spread:.2%} on {1e3 * statistics.median(found['without']):.1f} ms"
    assert middle - 2 * spread < MOST_SLOWER or check.dry, f"a step is slower by {text}"
    return f"a step with hooks takes {text} ({len(ratios)} pairs)"


def clock_error(check: Check) -> str:
    """The stated error of the device's times on the host's clock."""
    error_s = check.trace("timing").clock_error_s
    assert 0 < error_s < (10 if check.dry else 1) * MOST_CLOCK_ERROR_S, f"{1e6 * error_s:.0f} us"
    return f"the device's times are known to {1e6 * error_s:.0f} us"


def nvtx_ranges(check: Check) -> str:
    """What a tool saw."""
    import importlib.util

    if importlib.util.find_spec("nvtx") is None:
        raise Skipped("the package nvtx is not installed here")
    file = check.folder / "ranges"
    if not (check.folder / "nvtx_tool.so").exists():
        raise Skipped("no tool to see them")
    lines = file.read_text().splitlines() if file.exists() else []
    pushed = {line.partition(": push ")[2] for line in lines}
    wanted = {"optimizer"} if check.ranks == 1 else {"optimizer", "F stage 0 mb 0", "B stage 0 mb 0"}
    assert wanted <= pushed, f"missing: {sorted(wanted - pushed)}"
    assert all(line.startswith("ppdiag: ") for line in lines), "a range outside the domain"
    return f"{len(lines)} pushes and pops, {len(pushed)} names"


def nvml_samples(check: Check) -> str:
    """What NVML gave."""
    samples = check.words("timing", "sample")
    if not samples:
        off = [word["value"] for word in check.words("timing", "fact") if word["name"] == "nvml"]
        raise Skipped(off[0] if off else "the package pynvml is not installed here")
    names = {name for sample in samples for name in sample} - {"type", "local_ns"}
    assert {"gpu_percent", "sm_clock_mhz", "power_mw", "throttle_reasons"} <= names, f"only {sorted(names)}"
    return f"{len(samples)} samples of {len(names)} quantities"


def nccl_log(check: Check) -> str:
    """The transport that NCCL used."""
    if check.dry:
        raise Skipped("gloo")
    if check.ranks == 1:
        raise Skipped("one rank connects to nobody")
    rows = check.trace("timing").transports
    used = sorted({row["transport"] for row in rows})
    assert used, "no connection in the log"
    return f"between the ranks: {', '.join(used)}"


def verdict(check: Check) -> str:
    """The planted slow stage is named."""
    if check.ranks == 1:
        raise Skipped("one rank has no pipeline")
    check.job("verdict")
    trace = check.trace("verdict")
    from ppdiag.analyzers.diagnose import diagnose
    from ppdiag.model import PIPELINE_KINDS, Flag

    work = trace.of_kind(*PIPELINE_KINDS).spans
    work = work[(work["flags"] & Flag.INIT) == 0]
    timed = float(((work["flags"] & Flag.DEVICE) != 0).mean())
    found = diagnose(trace)
    text = f"{found.verdict.text}; replay error {found.replay_error_fraction:.1%}, {timed:.0%} timed on the device"
    assert (found.verdict.cause, found.verdict.stage) == ("imbalance", check.ranks - 1), text
    assert timed > 0.9, text
    return text


CHECKS: tuple[tuple[str, Callable[[Check], str]], ...] = (
    ("device", find_device),
    ("NVTX tool", build_tool),
    ("job: timing", run_timing),
    ("known kernel", known_kernel),
    ("no synchronisation", runs_ahead),
    ("synchronising calls", synchronising_calls),
    ("cost of events", cost_of_events),
    ("paired steps", no_added_time),
    ("device clock", clock_error),
    ("NVTX", nvtx_ranges),
    ("NVML", nvml_samples),
    ("NCCL log", nccl_log),
    ("verdict", verdict),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: a stand-in device and gloo")
    parser.add_argument("--ranks", type=int, default=2, help="2 to 4 ranks on the one GPU")
    parser.add_argument("--rounds", type=int, default=12, help="pairs of blocks of steps with and without hooks")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep records and logs here")
    args = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        print(f"{sys.executable} has no torch ({error}); give one that has: make gpu-check PYTHON=…", file=sys.stderr)
        return 2
    if not args.dry_run and not torch.cuda.is_available():
        print("no CUDA device here; --dry-run checks the script itself", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        check = Check(args.ranks, args.dry_run, folder.resolve(), args.rounds)
        for name, function in CHECKS:
            check.run(name, lambda function=function: function(check))  # type: ignore[misc]
    print("\n" + "\n".join(f"{verdict:<5} {name:<20} {text}" for verdict, name, text in check.rows))
    print("all checks pass" if check.is_good else "some checks fail")
    return 0 if check.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
