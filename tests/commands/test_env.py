from __future__ import annotations

import subprocess

import pytest
from click.testing import CliRunner

from ppdiag.cli import main
from ppdiag.launch import bootstrap_directory
from ppdiag.rundir import read_run_file


def _exports(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["env", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def _in_a_shell(exports: str, name: str) -> str:
    script = f'eval "$1"; printf %s "${name}"'
    return subprocess.run(["sh", "-c", script, "sh", exports], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["run", "a b", "d'Arc", '"; rm -rf $HOME #', "运行"])
def test_a_shell_takes_the_lines_whatever_the_directory_is_called(tmp_path, name):
    assert _in_a_shell(_exports(str(tmp_path / name)), "PPDIAG_RUN_DIR") == str(tmp_path / name)


def test_the_bootstrap_folder_comes_before_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine:/yours")
    assert _in_a_shell(_exports(str(tmp_path / "run")), "PYTHONPATH") == f"{bootstrap_directory()}:/mine:/yours"


def test_calling_it_twice_adds_the_folder_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"/mine:{bootstrap_directory()}:")
    assert _in_a_shell(_exports(str(tmp_path / "run")), "PYTHONPATH") == f"{bootstrap_directory()}:/mine"


def test_no_empty_entry_is_left_in_the_path_since_it_would_mean_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert _in_a_shell(_exports(str(tmp_path / "run")), "PYTHONPATH") == bootstrap_directory()


def test_a_size_limit_is_exported_in_bytes(tmp_path):
    assert _in_a_shell(_exports(str(tmp_path / "run"), "--max-size", "1.5M"), "PPDIAG_MAX_BYTES") == "1500000"


@pytest.mark.parametrize("size", ["much", "-1", "1X", ""])
def test_a_size_that_is_none_is_a_usage_error(tmp_path, size):
    assert CliRunner().invoke(main, ["env", str(tmp_path / "run"), "--max-size", size]).exit_code == 2


def test_the_directory_is_made_ready_for_the_ranks(tmp_path):
    _exports(str(tmp_path / "deep" / "run"))
    assert (tmp_path / "deep" / "run" / "run.json").exists()


def test_nccl_logs_into_the_run_directory(tmp_path, monkeypatch):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.delenv(name, raising=False)
    exports = _exports(str(tmp_path / "run"))
    assert _in_a_shell(exports, "NCCL_DEBUG_FILE") == str(tmp_path / "run" / "nccl-%h-%p.log")
    assert _in_a_shell(exports, "NCCL_DEBUG") == "INFO"
    assert "NCCL" not in _exports(str(tmp_path / "run"), "--no-nccl")


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"])
def test_the_users_own_nccl_log_is_left_alone(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "WARN")
    assert "NCCL" not in _exports(str(tmp_path / "run"))


def test_a_directory_whose_name_nccl_would_expand_gets_no_log(tmp_path):
    assert "NCCL" not in _exports(str(tmp_path / "100%h"))


def test_adapters_are_on_unless_they_are_switched_off(tmp_path):
    assert "PPDIAG_ADAPTERS" not in _exports(str(tmp_path / "run"))
    assert "export PPDIAG_ADAPTERS=none" in _exports(str(tmp_path / "run"), "--no-adapters")


def test_layers_are_timed_where_it_is_asked_for(tmp_path):
    assert _in_a_shell(_exports("--layer-times", str(tmp_path / "run")), "PPDIAG_LAYER_TIMES") == "1"
    assert "PPDIAG_LAYER_TIMES" not in _exports(str(tmp_path / "other"))


def test_a_stated_layout_is_kept_in_the_run_directory(tmp_path):
    _exports(str(tmp_path / "run"), "--pp", "4", "--order", "tp-pp-dp")
    stated = read_run_file(tmp_path / "run")["layout"]
    assert stated == {"pp": 4, "vpp": None, "tp": None, "dp": None, "order": "tp-pp-dp"}
