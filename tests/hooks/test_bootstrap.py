"""The start-up file, in a Python that knows nothing of ppdiag and with a stand-in for what it arms."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ARM = """
import os
def arm():
    with open(os.environ["ARMED"], "a") as stream:
        stream.write(f"{os.getpid()}\\n")
"""


@pytest.fixture(scope="module")
def foreign_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of an environment in which nothing is installed."""
    folder = tmp_path_factory.mktemp("foreign") / "venv"
    venv.create(folder, symlinks=True, with_pip=False)
    return folder / "bin" / "python"


def _copy(repository: Path, folder: Path, *, hooks: str, link: bool) -> Path:
    """Our package as an installation or a checkout has it; gives the folder that goes on PYTHONPATH."""
    (folder / "ppdiag").mkdir(parents=True)
    for source in (repository / "ppdiag").glob("*.py"):
        shutil.copy(source, folder / "ppdiag")
    shutil.copytree(repository / "hooks" / "bootstrap", folder / hooks / "bootstrap")
    (folder / hooks / "__init__.py").touch()
    (folder / hooks / "install.py").write_text(ARM)
    if link:
        (folder / "ppdiag" / "hooks").symlink_to("../hooks")
        return folder / "ppdiag" / "hooks" / "bootstrap"
    return folder / hooks / "bootstrap"


@pytest.fixture
def bootstrap(repository: Path, tmp_path: Path) -> Path:
    return _copy(repository, tmp_path / "a place", hooks="ppdiag/hooks", link=False)


@pytest.fixture
def start(foreign_python: Path, bootstrap: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a snippet in the foreign Python; the start-up file and ``later`` folders are on its path."""

    def call(snippet: str, *later: Path, first: Path = bootstrap, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PYTHONPATH": os.pathsep.join(map(str, [first, *later])), "ARMED": str(tmp_path / "armed")}
        environment |= {"PPDIAG_RUN_DIR": str(tmp_path), **variables}
        command = [str(foreign_python), "-c", snippet]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)

    return call


def _armed(tmp_path: Path) -> int:
    file = tmp_path / "armed"
    return len(set(file.read_text().split())) if file.exists() else 0


@pytest.fixture
def users(tmp_path: Path) -> Path:
    folder = tmp_path / "users"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("print('users')\nVALUE = 1\n")
    return folder


@pytest.mark.parametrize(
    ("hooks", "link"),
    [("ppdiag/hooks", False), ("hooks", True), ("hooks", False)],
    ids=["installed", "links", "no links"],
)
def test_a_python_without_ppdiag_is_armed_from_any_layout(repository, tmp_path, start, hooks, link):
    first = _copy(repository, tmp_path / "layout", hooks=hooks, link=link)
    done = start("print('ran')", first=first)
    assert (done.stdout, done.stderr, _armed(tmp_path)) == ("ran\n", "", 1)


def test_no_trace_is_left_in_the_path_and_the_modules(start, bootstrap):
    done = start("import sys; print(any('bootstrap' in entry for entry in sys.path), 'sitecustomize' in sys.modules)")
    assert done.stdout == "False False\n"
    assert str(bootstrap.parent.parent.parent) not in start("import sys; print(sys.path)").stdout


def test_the_processes_that_it_starts_are_armed_too(start, tmp_path):
    start("import subprocess, sys; subprocess.run([sys.executable, '-c', ''])")
    assert _armed(tmp_path) == 2


def test_without_a_run_directory_nothing_of_ours_is_loaded(start, tmp_path):
    done = start("import sys; print('ppdiag' in sys.modules)", PPDIAG_RUN_DIR="")
    assert (done.stdout, _armed(tmp_path)) == ("False\n", 0)


@pytest.mark.parametrize("run_directory", ["", "/run"])
def test_the_users_own_sitecustomize_runs_as_without_us(start, users, run_directory):
    done = start("import sitecustomize; print(sitecustomize.VALUE)", users, PPDIAG_RUN_DIR=run_directory)
    assert done.stdout == "users\n1\n"


def test_only_the_first_of_the_users_own_runs_as_without_us(start, users, tmp_path):
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "sitecustomize.py").write_text("print('later')")
    assert start("", users, tmp_path / "later").stdout == "users\n"


def test_a_failing_sitecustomize_of_the_user_is_reported_as_without_us(start, users):
    (users / "sitecustomize.py").write_text("raise ValueError('mine')")
    with_us = start("print('ran')", users)
    without_us = start("print('ran')", first=users)
    assert (with_us.stdout, with_us.stderr) == (without_us.stdout, without_us.stderr)
    assert with_us.returncode == 0


def test_a_second_bootstrap_folder_arms_nothing_twice_and_the_user_is_still_reached(start, repository, users, tmp_path):
    second = _copy(repository, tmp_path / "second", hooks="ppdiag/hooks", link=False)
    done = start("import ppdiag; print(ppdiag.__file__)", second, users)
    assert done.stdout == f"users\n{tmp_path / 'a place' / 'ppdiag' / '__init__.py'}\n"


@pytest.mark.parametrize(
    "fault", ["raise RuntimeError('ours')", "def arm(): raise RuntimeError('ours')", "syntax error"]
)
def test_a_fault_of_ours_costs_one_line_and_the_job_goes_on(start, bootstrap, users, fault):
    (bootstrap.parent / "install.py").write_text(fault)
    done = start("print('ran')", users)
    assert (done.returncode, done.stdout) == (0, "users\nran\n")
    assert done.stderr.startswith("ppdiag: not recording in process ")
    assert done.stderr.count("\n") == 1


def test_a_missing_package_of_ours_costs_one_line_and_the_job_goes_on(start, bootstrap):
    (bootstrap.parent.parent / "rundir.py").unlink()
    done = start("print('ran')")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert done.stderr.startswith("ppdiag: not recording in process ")


def test_the_fault_is_quiet_where_there_is_no_stderr(foreign_python, bootstrap):
    (bootstrap.parent / "install.py").unlink()
    environment = {"PYTHONPATH": str(bootstrap), "PPDIAG_RUN_DIR": "/run"}
    script = '"$0" -c "print(1)" 2>&-'
    done = subprocess.run(
        ["sh", "-c", script, str(foreign_python)], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n")
