"""Real jobs of the frameworks, in an environment of their own that ``.ci/frameworks`` makes, recorded from outside."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ppdiag.model import Flag, Kind, Payload
from tests.e2e.conftest import BOOTSTRAP, ROOT, job_environment, read_results, read_trace, work_only

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ppdiag.trace import Trace

ENVIRONMENT = Path(os.environ.get("FRAMEWORKS_ENVIRONMENT") or ROOT / ".venv-frameworks")
VERSIONS = ENVIRONMENT / "versions"
"""Several versions of a framework side by side, each a folder for PYTHONPATH."""
JOBS = Path(__file__).parent / "jobs"
TIMEOUT_S = 420.0
SLEEP_MS = 150
"""Of a stage that is to be named: long beside what the others compute, also where the machine is shared."""
COUNTED = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT, Kind.SEND, Kind.RECV)

Op = tuple[str, int, int, int, int]
"""(kind, payload, stage, chunk, microbatch)."""


@pytest.fixture(autouse=True)
def _environment_is_there() -> None:
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip(f"no {ENVIRONMENT.name}: .ci/frameworks makes it")


@dataclass(frozen=True)
class Run:
    """A job that ran with the recorder and without it; what its ranks wrote, one line for each part of the job."""

    trace: Trace
    recorded: list[list[dict[str, Any]]]
    plain: list[list[dict[str, Any]]]

    def part(self, job: str) -> Trace:
        """The steps of one part."""
        lines = self.recorded[0]
        index = next(index for index, line in enumerate(lines) if line["job"] == job)
        first = lines[index]["first_step"]
        end = lines[index + 1]["first_step"] if index + 1 < len(lines) else np.iinfo(np.int32).max
        return self.trace.where((self.trace.spans["step"] >= first) & (self.trace.spans["step"] < end))

    def skip_unless_it_ran(self, job: str) -> None:
        """Skip a test of a part that this version of the framework does not have."""
        if all(line["job"] != job for line in self.recorded[0]):
            pytest.skip("not in this version")

    def result(self, job: str, rank: int) -> dict[str, Any]:
        return next(line for line in self.recorded[rank] if line["job"] == job)


def start(ranks: int, script: str, *arguments: str, version: str = "", **options: Any) -> None:
    """Run a job to its end.

    Args:
        ranks: number of processes.
        script: its name in ``jobs``.
        arguments: its arguments.
        version: folder in ``versions`` that it shall import the framework from.
        options: ``run_dir``: where to record; ``variables``: for its environment; ``cwd``.
    """
    run_dir = options.get("run_dir")
    environment = job_environment(run_dir) | options.get("variables", {})
    folders = [str(BOOTSTRAP)] if run_dir is not None else []
    folders += [str(VERSIONS / version)] if version else []
    environment |= {"PYTHONPATH": os.pathsep.join(folders), "HF_HUB_OFFLINE": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [str(ENVIRONMENT / "bin" / "python"), *launcher, str(JOBS / script), *arguments]
    result = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=options.get("cwd"),
    )
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-6000:]}"


def run_twice(folder: Path, ranks: int, script: str, jobs: Sequence[str], **options: Any) -> Run:
    """Run the parts of a job with the recorder and without it."""
    start(ranks, script, str(folder / "on-"), *jobs, run_dir=folder / "run", **options)
    start(ranks, script, str(folder / "off-"), *jobs, **options)
    return Run(read_trace(folder / "run"), read_results(folder / "on-", ranks), read_results(folder / "off-", ranks))


def run_once(folder: Path, ranks: int, script: str, jobs: Sequence[str], **options: Any) -> Run:
    """Run the parts of a job with the recorder only."""
    start(ranks, script, str(folder / "on-"), *jobs, run_dir=folder / "run", **options)
    results = read_results(folder / "on-", ranks)
    return Run(read_trace(folder / "run"), results, results)


def ops_of(spans: np.ndarray) -> Counter[Op]:
    """How often each op was recorded."""
    chosen = work_only(spans)
    chosen = chosen[np.isin(chosen["kind"], COUNTED)]
    columns = (chosen[name].tolist() for name in ("kind", "op", "stage", "chunk", "microbatch"))
    return Counter((Kind(kind).name, op, stage, chunk, m) for kind, op, stage, chunk, m in zip(*columns, strict=True))


def expected_ops(
    stages: Iterable[int], total: int, microbatches: int, *, evaluate: bool = False, weight: bool = False
) -> Counter[Op]:
    """Each microbatch once forward and backward through each stage of a rank, a message over each border to another."""
    own = list(stages)
    found: Counter[Op] = Counter()
    for chunk, stage in enumerate(own):
        before = stage > 0 and stage - 1 not in own
        after = stage < total - 1 and stage + 1 not in own
        for microbatch in range(microbatches):
            label = (stage, chunk, microbatch)
            rows = [("FORWARD", 0, True), ("RECV", int(Payload.ACTIVATION), before)]
            rows += [("SEND", int(Payload.ACTIVATION), after)]
            if not evaluate:
                rows += [("BACKWARD", 0, True), ("WEIGHT", 0, weight)]
                rows += [("RECV", int(Payload.GRADIENT), after), ("SEND", int(Payload.GRADIENT), before)]
            found.update((kind, payload, *label) for kind, payload, holds in rows if holds)
    return found


def assert_inferred(run: Run, job: str, chunks: int, microbatches: int = 8) -> None:
    """Without adapters, in the second step: each microbatch goes once forward and backward through each chunk."""
    expected = {
        (int(kind), chunk, microbatch): 1
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for chunk in range(chunks)
        for microbatch in range(microbatches)
    }
    for rank, spans in run.part(job).by_rank().items():
        second = run.result(job, rank)["first_step"] + 1
        work = training(work_only(spans[spans["step"] == second]))
        work = work[np.isin(work["kind"], (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT))]
        assert (work["flags"] & int(Flag.INFERRED) != 0).all()
        columns = (work[name].tolist() for name in ("kind", "chunk", "microbatch"))
        assert Counter(zip(*columns, strict=True)) == expected


def assert_both_ends_agree(spans: np.ndarray) -> None:
    """What was sent for a microbatch is what the next stage, or the one before, received for it."""
    labelled = spans[spans["op"] != Payload.UNKNOWN]
    sends, receives = (labelled[labelled["kind"] == kind] for kind in (Kind.SEND, Kind.RECV))
    ends = {_message(span, "rank", "peer"): span for span in sends}
    assert len(ends) == len(sends) == len(receives)
    for span in receives:
        sent = ends[_message(span, "peer", "rank")]
        assert (sent["op"], sent["microbatch"], sent["step"]) == (span["op"], span["microbatch"], span["step"])
        assert span["stage"] - sent["stage"] == (1 if span["op"] == Payload.ACTIVATION else -1)


def _message(span: np.ndarray, src: str, dst: str) -> tuple[int, ...]:
    return tuple(int(span[name]) for name in (src, dst, "group", "tag", "seq"))


def training(spans: np.ndarray) -> np.ndarray:
    """Without evaluation."""
    return spans[spans["flags"] & int(Flag.EVALUATION) == 0]
