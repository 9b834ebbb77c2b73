"""``ppdiag check`` on whole commands: those of the tutorials, and hostile ones."""

from __future__ import annotations

import json
import shlex

import pytest
from click.testing import CliRunner

from ppdiag.cli import main
from ppdiag.commands.check import lines

EXAMPLE_72 = shlex.split(
    "torchrun --nproc_per_node 8 --nnodes 9 pretrain_gpt.py --tensor-model-parallel-size 3 "
    "--pipeline-model-parallel-size 8 --micro-batch-size 4 --global-batch-size 1024 --num-layers 80 "
    "--hidden-size 8192 --num-attention-heads 64"
)
EXAMPLE_128 = shlex.split(
    "torchrun --nproc_per_node 8 --nnodes 16 --node_rank $RANK pretrain_gpt.py --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 --micro-batch-size 1 "
    "--global-batch-size 1024 --recompute-activations --num-layers 32 --num-attention-heads 32"
)


def _check(*command: str, options: tuple[str, ...] = ()):
    return CliRunner().invoke(main, ["check", *options, "--", *command])


def test_the_tutorials_72_gpu_command_breaks_two_rules_and_its_bubble_is_not_12_percent():
    done = _check(*EXAMPLE_72)
    assert done.exit_code == 3
    words = " ".join(done.output.split())
    assert "error heads: 64 attention heads cannot be divided over TP = 3" in words
    assert "error batch: a global batch of 1024 is no multiple of micro batch x DP = 4 x 3 = 12" in words
    assert "warning TP across nodes: TP = 3 does not divide a node of 8 processes" in words
    assert "a bubble of 7.6 % of the pipeline phase (8.2 % over the ideal time)" in words
    assert "12 %" not in words.replace("= 12:", "")


def test_the_tutorials_128_gpu_command_is_right():
    done = _check(*EXAMPLE_128)
    assert done.exit_code == 0
    assert done.output.startswith("note     bubble: expect a bubble of 0.6 %")  # 3 / (2 x 256 + 3)


def test_json_holds_the_findings():
    data = json.loads(_check(*EXAMPLE_72, options=("--json",)).stdout)
    assert data["schema"] == "ppdiag.check/1"
    assert [one["severity"] for one in data["findings"]] == ["error", "error", "warning", "note"]


def test_before_a_run_only_what_is_wrong_is_said():
    assert [line.split(":")[0] for line in lines(EXAMPLE_72)] == ["error", "error", "warning"]
    assert lines(EXAMPLE_128) == lines(["python", "train.py"]) == []


def test_a_command_without_a_known_framework_is_no_error():
    done = _check("python", "train.py")
    assert done.exit_code == 0
    assert "nothing was checked" in done.output


@pytest.mark.parametrize(
    ("content", "code", "slug"), [(None, 4, "path-not-found"), ("{", 2, "bad-config"), ("[]", 2, "bad-config")]
)
def test_a_configuration_that_cannot_be_read_is_one_line(content, code, slug, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "ds.json").write_text(content)
    done = _check("deepspeed", "train.py", "--deepspeed_config", "ds.json")
    assert (done.exit_code, done.stderr.count("\n")) == (code, 1)
    assert slug in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--tensor-model-parallel-size", "0"],
        ["--tensor-model-parallel-size", "-8"],
        ["--tensor-model-parallel-size", "9" * 400],
        ["--tensor-model-parallel-size"],
        ["--num-layers", "\x1b[31m", "--pipeline-model-parallel-size", "٣"],
        ["--pipeline-model-parallel-size", "999999999999", "--num-layers", "999999999999", "--global-batch-size", "1"],
    ],
)
def test_hostile_numbers_make_no_traceback(words):
    done = _check("torchrun", "--nproc-per-node", "8", "t.py", *words)
    assert done.exit_code in (0, 3)
    assert "Traceback" not in done.output
    assert "\x1b" not in done.output


def test_an_unknown_network_is_refused():
    done = _check("python", "train.py", options=("--network", "string"))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
