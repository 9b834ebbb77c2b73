"""Planned layouts as real jobs: do a step and its bubble take what ``ppdiag plan`` says?

    python -m benchmarks.matrix.planned [--again | --rescore]

Each layout's ops are made to sleep as long as the plan says, scaled so that the shortest op takes 40 ms: a job that
sleeps has some 0.5 ms of its own around each op. Tensor and data parallelism are in the durations only, and one thing
is planned as torch does it: where W is split off, its first stage has no backward of the input, and W takes both. Jobs
whose record is in the folder are not run again. About 4 minutes on two idle cores.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.matrix.jobs import Job, JobFailed, forge_of, options, recorded
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.planning import layout, orders, plan, simulate
from ppdiag.analyzers.planning.hardware import DEVICES, NETWORKS, Cluster
from ppdiag.analyzers.planning.models import MODELS
from ppdiag.analyzers.sources.run_directory import RunDirectory

if TYPE_CHECKING:
    from ppdiag.diagnosis import Diagnosis

SHORTEST_OP_S = 0.040
STEPS = 6
MOST_ERROR = 0.05
"""Of the step, for its time and for its bubble."""
NETWORK = "ndr"


class Wish(NamedTuple):
    """A layout: model, device, TP, PP, V, schedule and global batch (DP is 1, a microbatch is one sequence)."""

    model: str
    device: str
    tensor: int
    pipeline: int
    chunks: int
    schedule: str
    batch: int


# DualPipeV is not among them: torch sends what the forward of a pair has made only after the pair's backward.
WISHES = (
    Wish("llama3-70b", "h100", 8, 4, 1, "1f1b", 12),
    Wish("llama3-70b", "h100", 8, 4, 1, "gpipe", 8),
    Wish("llama3-70b", "h100", 8, 4, 2, "interleaved", 8),
    Wish("llama3-70b", "h100", 8, 4, 2, "zb-v", 8),
    Wish("qwen2.5-32b", "h200", 4, 2, 2, "zb-v", 6),
    Wish("llama3-8b", "h100", 2, 2, 1, "1f1b", 8),
    Wish("llama3-8b", "h100", 1, 4, 1, "1f1b", 8),
    Wish("llama2-13b", "a100", 4, 2, 2, "interleaved", 8),
    Wish("qwen2.5-32b", "h200", 4, 4, 1, "1f1b", 16),
    Wish("mixtral-8x7b", "h100", 8, 4, 2, "interleaved", 12),
    Wish("gpt3-175b", "b200", 8, 4, 3, "interleaved", 8),
    Wish("qwen2.5-7b", "a100", 2, 3, 1, "gpipe", 6),
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is planned, at the scale of the job.

    Attributes:
        job: the job that sleeps so.
        step_s: predicted step time.
        bubble: predicted bubble, as a fraction of the step.
    """

    job: Job
    step_s: float
    bubble: float


def predict(wish: Wish) -> Prediction:
    """The prediction of the planner, and the job that is to meet it."""
    cluster = Cluster(wish.tensor * wish.pipeline, 8, DEVICES[wish.device], NETWORKS[NETWORK])
    job = layout.Job(MODELS[wish.model], cluster, wish.batch)
    one = plan.wish(tensor=wish.tensor, pipeline=wish.pipeline, data=1, chunks=wish.chunks, micro=1,
                    schedule=wish.schedule, recompute=False, zero1=True)  # fmt: skip
    counts = orders.layers_of_stages(job.model.layers, wish.pipeline * wish.chunks)
    durations = _as_torch(plan._durations(job, one, counts), wish.schedule)
    program = simulate.program(wish.schedule, ranks=wish.pipeline, chunks=wish.chunks, microbatches=wish.batch)
    times = simulate.run(program, durations)
    equal, _, whole = times.makespan_W
    stage_S3 = np.stack([durations.forward_SW[:, -1], durations.backward_SW[:, -1], durations.weight_SW[:, -1]], axis=1)
    scale = SHORTEST_OP_S / stage_S3[:, 0].min()
    bubble = float((equal - times.busy_RW[:, 0].mean()) / whole)
    return Prediction(_job(wish, stage_S3 * scale * 1e3), float(whole * scale), bubble)


def _as_torch(durations: simulate.Durations, schedule: str) -> simulate.Durations:
    """The durations as torch spends them; nothing changes where the backward is whole."""
    if orders.SCHEDULES[schedule].splits:
        durations.weight_SW[0] += durations.backward_SW[0]
        durations.backward_SW[0] = 0.0
    return durations


def _job(wish: Wish, stage_ms_S3: np.ndarray) -> Job:
    times = [f"--stage-ms {s}:" + ":".join(f"{ms:.3f}" for ms in row) for s, row in enumerate(stage_ms_S3.tolist())]
    shape = f"--schedule {orders.SCHEDULES[wish.schedule].known_as} --virtual-stages {wish.chunks}"
    return Job(wish.pipeline, f"{shape} --microbatches {wish.batch} --steps {STEPS} --meet {' '.join(times)}")


def line(wish: Wish, planned: Prediction, found: Diagnosis) -> tuple[str, bool]:
    """A row of the table, and whether the prediction was met."""
    step_error = found.steps.median_s / planned.step_s - 1
    bubble_error = found.why.bubble - planned.bubble
    good = abs(step_error) <= MOST_ERROR and abs(bubble_error) <= MOST_ERROR
    shape = (
        f"{wish.model:<13} TP={wish.tensor} PP={wish.pipeline} V={wish.chunks} M={wish.batch:<3} {wish.schedule:<12}"
    )
    step = f"{planned.step_s * 1e3:>8.0f} {found.steps.median_s * 1e3:>8.0f} {step_error:>+7.1%}"
    return f"{shape}{step}   {planned.bubble:>6.1%} {found.why.bubble:>6.1%} {100 * bubble_error:>+5.1f}", good


def main() -> int:
    args = options(__doc__, "planned-jobs").parse_args()
    forge = forge_of(args)
    print(f"{'':<46}{'step, ms':>25}   {'bubble, of the step':>19}")
    print(f"{'':<46}{'planned measured   error':>25}   planned found points")
    good = []
    for number, wish in enumerate(WISHES):
        planned = predict(wish)
        try:
            run_dir = recorded(planned.job, args.folder / str(number), forge)
        except JobFailed as error:
            print(f"{wish}: {error}", file=sys.stderr)
            continue
        if run_dir is not None:
            text, met = line(wish, planned, diagnose(RunDirectory().read([run_dir], None)))
            good.append(met)
            print(text, flush=True)
    print(f"\n{sum(good)} of {len(WISHES)} within {MOST_ERROR:.0%} in both")
    return 0 if sum(good) == len(WISHES) else 1


if __name__ == "__main__":
    sys.exit(main())
