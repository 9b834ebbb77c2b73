"""What ``ppdiag nccl`` prints, writes and returns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ppdiag.cli import main

LOG = Path(__file__).resolve().parent.parent / "data" / "nccl" / "single_node_roce_unused.log"
FALLBACK = """\
gpu1:31:40 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
gpu1:31:40 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0

gpu1:31:40 [0] ibvwrap.cc:123 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0
"""


def _run(*arguments: str):
    return CliRunner().invoke(main, ["nccl", *arguments], env={"COLUMNS": "100"})


@pytest.fixture
def fallback(tmp_path: Path) -> Path:
    path = tmp_path / "job.log"
    path.write_text(FALLBACK)
    return path


def test_the_summary_names_the_transport_of_each_pair():
    result = _run(str(LOG))
    assert result.exit_code == 0
    assert result.stdout.startswith("No TCP fallback")
    assert "rank 0  rank 1  P2P/direct pointer/read  24" in result.stdout
    assert "(no proof of use)" in result.stdout


def test_the_summary_begins_with_the_fallback_and_says_what_to_do(fallback):
    result = _run(str(fallback))
    assert result.stdout.startswith("TCP FALLBACK")
    assert "NCCL listed RDMA devices on these hosts: mlx5_0" in result.stdout
    assert "/dev/infiniband" in result.stdout
    assert "[ib-connect]" in result.stdout


def test_json_on_stdout_is_the_report_alone(fallback):
    result = _run("--json", "-", str(fallback))
    data = json.loads(result.stdout)
    assert data["schema"] == "ppdiag.nccl/1"
    assert data["fallback"]["status"] == "fallback"
    assert data["connections"][0]["transport"] == "NET/Socket"


def test_json_goes_to_a_file_beside_the_summary(fallback, tmp_path):
    target = tmp_path / "out.json"
    assert "TCP FALLBACK" in _run("--json", str(target), str(fallback)).stdout
    assert json.loads(target.read_text())["counts"]["nccl_lines"] == 3
    assert _run("--quiet", str(fallback)).stdout == ""


def test_a_file_that_cannot_be_written_is_output_failed(fallback, tmp_path):
    result = _run("--json", str(tmp_path / "none" / "out.json"), str(fallback))
    assert result.exit_code == 6
    assert "output-failed" in result.stderr


@pytest.mark.parametrize(
    ("content", "slug"), [(None, "path-not-found"), (b"step 1 loss 2.3\n", "not-a-run"), (b"", "not-a-run")]
)
def test_a_path_without_nccl_lines_is_said_so(tmp_path, content, slug):
    path = tmp_path / "job.log"
    if content is not None:
        path.write_bytes(content)
    result = _run(str(path))
    assert result.exit_code == 4
    assert slug in result.stderr


def test_hostile_text_can_steer_no_terminal(tmp_path):
    path = tmp_path / "job.log"
    path.write_bytes(
        b"h:1:1 [0] NCCL INFO Using network IB\nh:1:1 [0] x.cc:1 NCCL WARN \x1b]0;owned\x07 [bold]\xe2\x80\xae\n"
    )
    result = _run(str(path))
    assert result.exit_code == 0
    assert not {"\x1b", "\x07", "\u202e"} & set(result.stdout)
    assert "[bold]" in result.stdout


def test_a_log_may_be_piped_in(fallback, checkout_environment):
    command = [sys.executable, "-m", "ppdiag", "nccl", "-"]
    text = fallback.read_text()
    environment = {**checkout_environment, "COLUMNS": "100"}
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == _run(str(fallback)).stdout
