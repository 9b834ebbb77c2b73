"""On the real torch, in a process of its own: everything that is put on comes off again."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

CODE = """
import os, sys
from ppdiag.hooks import install
import torch
import torch.distributed.pipelining
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import schedules, stage
from torch.optim import optimizer

OWNERS = (
    distributed_c10d.ProcessGroup, distributed_c10d.Work, torch.autograd.Variable, torch.nn.Module,
    stage._PipelineStageBase, schedules._PipelineSchedule, schedules.PipelineScheduleSingle,
    schedules.PipelineScheduleMulti,
)

def state():
    hooks = list(optimizer._global_optimizer_pre_hooks), list(optimizer._global_optimizer_post_hooks)
    return [dict(vars(owner)) for owner in OWNERS], hooks, list(sys.meta_path)

before = state()
os.environ["PPDIAG_RUN_DIR"] = sys.argv[1]  # only now: an installed .pth would have armed the process at its start
install.arm()
from ppdiag.hooks import modules
modules.install_module_calls()
armed = state()
assert all(now != then for now, then in zip(armed[0], before[0], strict=True)), "some class is not patched"
assert armed[1] != before[1]
for _ in range(2):
    install.uninstall_probes()
    install.install_probes()
install.disarm()
after = state()
for owner, now, then in zip(OWNERS, after[0], before[0], strict=True):
    assert now == then, owner
assert after[1:] == before[1:]
print("clean")
"""


def test_every_install_has_an_equal_and_opposite_uninstall(
    tmp_path: Path, checkout_environment: dict[str, str]
) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    result = subprocess.run(command, env=checkout_environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "clean\n"), result.stderr
