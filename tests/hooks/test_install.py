"""Arming, in processes of its own, with a stand-in for torch that is nothing but empty modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """
import os, sys
from ppdiag.hooks import install
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a package named torch."""
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("import torch.distributed.distributed_c10d\n")
    (package / "distributed_c10d.py").write_text("class GroupMember:\n    WORLD = None\n")
    return tmp_path


def run(folder: Path, environment: dict[str, str], code: str, *, run_dir: str = "run") -> str:
    environment = {**environment, "PPDIAG_RUN_DIR": str(folder / run_dir) if run_dir else ""}
    command = [sys.executable, "-S", "-c", HEAD + code]  # -S: no .pth of an installed ppdiag arms it first
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.strip()


def processes(folder: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (folder / "run" / "processes.jsonl").read_text().splitlines()]


def test_arming_imports_neither_torch_nor_the_probes(folder: Path, checkout_environment: dict[str, str]) -> None:
    code = """
install.arm()
print([name for name in sys.modules if name.startswith(("torch", "numpy", "ppdiag.hooks.recorder"))])
"""
    assert run(folder, checkout_environment, code) == "[]"
    assert processes(folder) == ["armed"]


def test_a_run_directory_that_is_not_there_is_made_for_its_owner_alone(
    folder: Path, checkout_environment: dict[str, str]
) -> None:
    run(folder, checkout_environment, "install.arm()")
    assert (folder / "run").stat().st_mode & 0o077 == 0


def test_the_probes_come_with_torch_distributed_and_leave_its_loader_as_it_was(
    folder: Path, checkout_environment: dict[str, str]
) -> None:
    code = """
install.arm()
import torch.distributed
print("ppdiag.hooks.process_group" in sys.modules, vars(torch.distributed.__loader__).get("exec_module"))
"""
    assert run(folder, checkout_environment, code) == "True None"
    assert processes(folder) == ["armed", "torch"]


def test_arming_twice_is_arming_once(folder: Path, checkout_environment: dict[str, str]) -> None:
    assert (
        run(
            folder,
            checkout_environment,
            "install.arm(); n = len(sys.meta_path); install.arm()\nprint(n - len(sys.meta_path))",
        )
        == "0"
    )
    assert processes(folder) == ["armed"]


def test_modules_imported_before_are_patched_at_once(folder: Path, checkout_environment: dict[str, str]) -> None:
    run(folder, checkout_environment, "import torch.distributed\ninstall.arm()")
    assert processes(folder) == ["armed", "torch"]


def test_without_a_run_directory_nothing_happens(folder: Path, checkout_environment: dict[str, str]) -> None:
    code = "before = list(sys.meta_path); install.arm()\nprint(sys.meta_path == before)"
    assert run(folder, checkout_environment, code, run_dir="") == "True"
    assert not (folder / "run").exists()


def test_disarming_takes_the_finder_off(folder: Path, checkout_environment: dict[str, str]) -> None:
    code = "before = list(sys.meta_path); install.arm(); install.disarm()\nprint(sys.meta_path == before)"
    assert run(folder, checkout_environment, code) == "True"


def test_an_import_that_fails_fails_as_without_us(folder: Path, checkout_environment: dict[str, str]) -> None:
    (folder / "torch" / "distributed" / "__init__.py").write_text("raise ImportError('of the user')\n")
    code = """
install.arm()
try:
    import torch.distributed
except ImportError as error:
    print(error, "torch.distributed" in sys.modules)
"""
    assert run(folder, checkout_environment, code) == "of the user False"


def test_a_run_directory_that_cannot_be_written_costs_the_job_nothing(
    folder: Path, checkout_environment: dict[str, str]
) -> None:
    (folder / "run").write_text("a file where the directory should be")
    assert run(folder, checkout_environment, "install.arm()\nimport torch.distributed\nprint('alive')") == "alive"


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_what_others_have_laid_in_the_place_of_the_list_is_left_alone(
    folder: Path, checkout_environment: dict[str, str], planted: str
) -> None:
    (folder / "run").mkdir()
    (folder / "precious").write_text("of the user")
    if planted == "link":
        (folder / "run" / "processes.jsonl").symlink_to(folder / "precious")
    else:
        os.mkfifo(folder / "run" / "processes.jsonl")
    assert run(folder, checkout_environment, "install.arm()\nimport torch.distributed\nprint('alive')") == "alive"
    assert (folder / "precious").read_text() == "of the user"
