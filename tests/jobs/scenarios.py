"""Many sleeping pipelines one after the other in one job, so that the imports are paid once.

The first argument is a file, into which rank 0 writes the first step of each pipeline and the step after its last; each
further one is the command line of a ``sleeping_pipeline.py``.

    torchrun --standalone --nproc-per-node 4 tests/jobs/scenarios.py steps.txt "--schedule GPipe" "--stage-factor 2:2"
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sleeping_pipeline import parse_arguments, train  # type: ignore[import-not-found]  # a script's own folder


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report, step = Path(sys.argv[1]), 0
    for line in sys.argv[2:]:
        args = parse_arguments(["--quiet", *shlex.split(line)])
        if dist.get_rank() == 0:
            with report.open("a") as file:
                file.write(f"{step} {step + args.steps}\n")
        train(args)
        step += args.steps
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
