"""``ppdiag plan``: the table, the wish, and bad numbers in one line."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from ppdiag.cli import main

SEVENTY = ["--model", "llama3-70b", "--gpus", "512", "--global-batch", "1024"]


def _plan(*arguments: str):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_it_begins_with_whether_a_pipeline_is_needed(tmp_path):
    done = _plan(*SEVENTY, "--figure", str(tmp_path / "plans.svg"))
    assert done.exit_code == 0
    assert done.output.index("Is a pipeline needed?") < done.output.index("layouts are possible")
    assert ET.parse(tmp_path / "plans.svg").getroot().tag.endswith("svg")


def test_json_holds_the_plans_and_the_ways_without_a_pipeline():
    data = json.loads(_plan(*SEVENTY, "--top", "3", "--json").stdout)
    assert data["schema"] == "ppdiag.plan/1"
    assert data["parameters"] == 70_553_706_496
    assert len(data["plans"]) == 3
    assert {"step_s", "mfu", "memory_bytes", "layers"} <= set(data["plans"][0])


def test_a_wish_that_cannot_be_breaks_its_rules_in_words():
    done = _plan("--model", "llama2-70b", "--gpus", "72", "--global-batch", "1024", "--try", "tp=3,pp=8,micro=4")
    assert done.exit_code == 3
    assert "  heads: 64 attention heads cannot be divided over TP = 3" in done.output
    assert "M would be 85.33" in done.output


def test_a_wish_that_can_be_is_shown_in_full():
    done = _plan(*SEVENTY, "--try", "tp=8,pp=4,v=2,recompute=1")
    assert done.exit_code == 0
    assert "TP=8 PP=4 DP=16 V=2 interleaved:" in done.output
    assert "10, 10, 10, 10, 10, 10, 10, 10" in done.output


def test_a_wish_is_set_beside_the_fastest_plan():
    done = _plan("--model", "llama3-405b", "--gpus", "8192", "--global-batch", "2048",
                 "--try", "tp=8,pp=16,dp=64,recompute=1")  # fmt: skip
    words = " ".join(done.output.split())
    assert "The fastest plan, TP=8" in words
    assert "(bubble +" in words
    best = _plan(*SEVENTY, "--try", "tp=4,pp=4,v=5")
    assert "None of the plans that the search gives is faster" in best.output


def test_experts_have_columns_of_their_own():
    mixtral = _plan("--model", "mixtral-8x7b", "--gpus", "64", "--global-batch", "256").output
    assert "EP comm" in mixtral
    assert "EP: data-parallel ranks over which the experts are spread" in " ".join(mixtral.split())
    dense = _plan(*SEVENTY).output
    assert " EP" not in dense
    assert "Context parallelism is not searched" in " ".join(dense.split())


def test_a_model_of_ones_own_needs_its_sizes_only():
    sizes = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--vocab", "50000", "--seq", "2048"]
    assert _plan(*sizes, "--gpus", "64", "--global-batch", "256").exit_code == 0


def test_what_is_known_is_listed():
    output = _plan("--models").output
    assert "llama3-405b" in output
    assert "405.9 B" in output
    assert "devices   a100-40, a100, h100, h200, b200" in output


def test_nothing_that_fits_is_exit_code_3():
    done = _plan("--model", "llama3-405b", "--gpus", "16", "--global-batch", "1024")
    assert done.exit_code == 3
    assert "Nothing fits." in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt-9", "--gpus", "8", "--global-batch", "8"], "is no known model"),
        ([*SEVENTY, "--device", "tpu"], "is no known device"),
        ([*SEVENTY, "--network", "string"], "is no known network"),
        ([*SEVENTY, "--schedule", "naive"], "is no known schedule to plan with"),
        ([*SEVENTY, "--try", "tp=eight"], "cannot read 'tp=eight'"),
        ([*SEVENTY, "--try", "tp=1,pp=512"], "pipelines of up to 128 ranks"),
        ([*SEVENTY, "--efficiency", "nan"], "'nan' is not a number"),
        ([*SEVENTY, "--device-flops", "nan"], "'nan' is not a number"),
        ([*SEVENTY, "--experts", "8", "--experts-per-token", "9"], "cannot go through 9 of 8 experts"),
        ([*SEVENTY, "--hidden", "8", "--heads", "64", "--kv-heads", "65"], "cannot share 65"),
        ([*SEVENTY, "--kv-heads", "7"], "cannot share 7 key/value heads"),
        ([*SEVENTY, "--device-memory", "0"], "must be above 0"),
        ([*SEVENTY, "--device-memory", "80"], "a device of 80 B has no room beside the 4.00 GB of --reserve"),
        (["--layers", "32", "--gpus", "8", "--global-batch", "8"], "give --model, or also --hidden"),
        (["--model", "llama3-8b", "--gpus", "0", "--global-batch", "8"], "0 is not in the range"),
        (["--model", "llama3-8b", "--gpus", "8"], "give --global-batch; "),
        ([], "give --model and --gpus and --global-batch; "),
    ],
)
def test_bad_numbers_are_refused_with_2_and_no_traceback(arguments, words):
    done = _plan(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.output
