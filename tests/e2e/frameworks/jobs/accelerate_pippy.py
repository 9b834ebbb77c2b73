"""Inference by accelerate's ``prepare_pippy``: the whole pipeline step runs inside the forward of the user's model.

torchrun --nproc-per-node 2 accelerate_pippy.py results- 5 2:10
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from accelerate import PartialState, prepare_pippy

SIZE, CHUNKS = 64, 4
ROWS = CHUNKS**2  # accelerate pads any other number of rows to one that it cannot split


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[Layer() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def main() -> None:
    torch.set_num_threads(1)
    prefix, calls = sys.argv[1], int(sys.argv[2])
    state = PartialState(cpu=True)
    torch.manual_seed(0)
    model = Model().eval()
    inputs = [torch.randn(ROWS, SIZE) for _ in range(calls)]
    example = (inputs[0][: ROWS // CHUNKS],)
    pipe = prepare_pippy(model, split_points=["layers.2"], example_args=example, num_chunks=CHUNKS)
    if sys.argv[3:]:
        rank, _, time_ms = sys.argv[3].partition(":")
        if state.process_index == int(rank):
            submodule = pipe.pippy_stage._stage.submod  # what accelerate calls a stage is the schedule
            submodule.register_forward_pre_hook(lambda *_: time.sleep(float(time_ms) / 1e3))
    with torch.no_grad():
        outputs = [pipe(x) for x in inputs]
    sums = [x.double().sum().item().hex() for x in outputs] if state.is_last_process else []
    with Path(f"{prefix}{state.process_index}").open("a") as file:
        file.write(json.dumps({"job": "", "losses": sums}) + "\n")


if __name__ == "__main__":
    main()
