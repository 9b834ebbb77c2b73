"""A job of three ranks over gloo in which the last one does not come to a collective; each dumps what it knows.

torchrun --nproc-per-node 3 stands_still.py FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

PATIENCE_S = 60.0
COMPLETED = 2
"""Collectives that all ranks come to, before the one that the last does not come to."""


def dump(folder: Path) -> None:
    """Writes what Flight Recorder knows, whole or not at all, once it knows that the completed ones are completed.

    It learns of an end a little after `wait` returns: a dump made between the two shows an operation that hangs.
    """
    end = time.monotonic() + PATIENCE_S
    while True:
        known = _distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
        completed = sum(entry["retired"] for entry in json.loads(known)["entries"])
        if completed >= COMPLETED or time.monotonic() > end:
            break
        time.sleep(0.05)
    path = folder / f"dump_{dist.get_rank()}"
    path.write_bytes(known)
    path.rename(path.with_suffix(".json"))


def main() -> None:
    """Two collectives that all come to, and one that the last rank comes to when all have dumped."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    tensor = torch.ones(4)
    for _ in range(COMPLETED):
        dist.all_reduce(tensor)
    if dist.get_rank() < 2:
        work = dist.all_reduce(tensor, async_op=True)
        dump(folder)
        work.wait()
    else:
        end = time.monotonic() + PATIENCE_S
        while len(list(folder.glob("*.json"))) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        dump(folder)
        dist.all_reduce(tensor)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
