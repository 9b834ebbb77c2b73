"""Writes traces as torch.profiler does on a GPU, of two ranks and two microbatches, with exact times.

GPipe of two stages with F = 1000, B = 2000 and transfers of 100 us: rank 1 receives until 1100 and 2100 us, and rank 0
until 5200 and 7200 us. A step takes 10 ms. The host runs ahead of the device: everything of a step is launched within
its first ms.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

STEP_US = 10_000.0
PROGRAMS = {
    0: [
        ("F", 0, 0, 1000),
        ("send", "F", 0, 1000, 1100),
        ("F", 1, 1000, 2000),
        ("send", "F", 1, 2000, 2100),
        ("recv", "B", 0, 2100, 5200),
        ("B", 0, 5200, 7200),
        ("recv", "B", 1, 5200, 7200),
        ("B", 1, 7200, 9200),
        ("optimizer", 0, 9200, 9700),
    ],
    1: [
        ("recv", "F", 0, 0, 1100),
        ("F", 0, 1100, 2100),
        ("recv", "F", 1, 1100, 2100),
        ("F", 1, 2100, 3100),
        ("B", 0, 3100, 5100),
        ("send", "B", 0, 5100, 5200),
        ("B", 1, 5100, 7100),
        ("send", "B", 1, 7100, 7200),
        ("optimizer", 0, 7200, 7700),
    ],
}
"""What each rank does in a step, in the order in which its host launches it; times of the device in us."""
MAIN, AUTOGRAD = 100, 101


class Writer:
    """Events of one rank's file.

    Args:
        rank: place along the pipeline.
        labels: ``device`` (annotations of the host, with twins on the device), ``host`` (without twins) or ``none``.
        members: ranks of the job; the rank's own is ``members[rank]``.
        peers: how they are told: ``global`` (``Src Rank`` and ``Dst Rank``), ``local`` (``Rank``, within the group),
            ``annotation`` (``nccl:send 0->1``, within the group), ``annotation alone`` (and no ``record_param_comms``).
        kernel: name of the kernels of messages.
    """

    def __init__(
        self,
        rank: int,
        labels: str = "device",
        members: tuple[int, int] = (0, 1),
        *,
        peers: str = "global",
        kernel: str = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    ) -> None:
        self.rank = rank
        self.labels = labels
        self.members = members
        self.peers = peers
        self.kernel = kernel
        self.number = 0
        self.events: list[dict[str, Any]] = []

    def complete(self, category: str, name: str, thread: int, times: tuple[float, float], **args: Any) -> None:
        device = category in ("kernel", "gpu_user_annotation")
        event = {"ph": "X", "cat": category, "name": name, "pid": 0 if device else 5, "tid": thread}
        self.events.append({**event, "ts": times[0], "dur": times[1] - times[0], "args": args})

    def run(self, steps: int) -> None:
        for step in range(steps):
            begin = step * STEP_US
            self.complete("user_annotation", f"ProfilerStep#{step + 3}", MAIN, (begin, begin + STEP_US))
            for n, item in enumerate(PROGRAMS[self.rank]):
                host = begin + 50.0 * n
                self.number += 1
                getattr(self, "message" if item[0] in ("send", "recv") else "op")(item, begin, host)

    def op(self, item: tuple[Any, ...], begin: float, host: float) -> None:
        kind, microbatch, start, end = item
        name = "Optimizer.step#Adam.step" if kind == "optimizer" else f"PP:{self.rank}{kind}{microbatch}"
        if self.labels != "none" or kind == "optimizer":
            self.complete("user_annotation", name, MAIN, (host, host + 40))
            if self.labels == "device":
                self.complete("gpu_user_annotation", name, 7, (begin + start, begin + end))
        thread = AUTOGRAD if kind == "B" else MAIN
        self.complete("cuda_runtime", "cudaLaunchKernel", thread, (host + 10, host + 12), correlation=self.number)
        self.complete("kernel", "gemm", 7, (begin + start, begin + end), correlation=self.number)

    def message(self, item: tuple[Any, ...], begin: float, host: float) -> None:
        kind, word, microbatch, start, end = item
        peer = 1 - self.rank
        if self.labels != "none":
            name = f"PP:{self.rank}{kind.upper()}_{word}{microbatch}"
            self.complete("user_annotation", name, MAIN, (host, host + 40))
        group = {"Process Group Name": "7", "Process Group Ranks": str(list(self.members)), "Group size": 2}
        named = {"Rank": peer} if self.peers == "local" else {}
        if self.peers == "global":
            named["Dst Rank" if kind == "send" else "Src Rank"] = self.members[peer]
        told = {"Collective name": kind, "In msg nelems": 256, "dtype": "BFloat16", "External id": self.number, **group}
        if self.peers != "annotation alone":
            self.complete("cpu_op", "record_param_comms", MAIN, (host + 5, host + 30), **told, **named)
        if self.peers.startswith("annotation"):
            arrow = f"{self.rank}->{peer}" if kind == "send" else f"{self.rank}<-{peer}"
            self.complete("user_annotation", f"nccl:{kind} {arrow}", MAIN, (host + 6, host + 29))
        told = told if self.peers != "annotation alone" else {}
        self.complete("kernel", self.kernel, 20, (begin + start, begin + end), **told, **named)

    def write(self, folder: Path) -> Path:
        told = {"backend": "nccl", "rank": self.members[self.rank], "world_size": 2}
        trace = {"schemaVersion": 1, "distributedInfo": told, "traceEvents": self.events}
        path = folder / f"rank{self.members[self.rank]}.json"
        path.write_text(json.dumps(trace))
        return path


def write_job(folder: Path, steps: int = 3, **settings: Any) -> list[Path]:
    """The files of both ranks."""
    paths = []
    for rank in (0, 1):
        writer = Writer(rank, **settings)
        writer.run(steps)
        paths.append(writer.write(folder))
    return paths
