"""``ppdiag calc`` prints one formula's numbers, derivation and source, and refuses nonsense in one line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ppdiag.cli import main


def _calc(*arguments: str):
    return CliRunner().invoke(main, ["calc", *arguments])


def test_the_bubble_comes_with_both_ratios_and_the_rule_of_thumb_told_apart():
    done = _calc("bubble", "-P", "8", "-V", "2", "-M", "64")
    assert done.exit_code == 0
    assert "bubble / total                                 5.2 %" in done.output
    assert "rule of thumb, bubble of 1F1B / V              4.9 %" in done.output
    assert "Narayanan et al. 2021" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["bubble", "-P", "4", "-M", "4"],
        ["message", "--seq", "4096", "--hidden", "8192", "--micro-batch", "4", "--bandwidth", "25G"],
        ["microbatches", "-P", "8", "--memory", "8G", "--activation", "1G"],
        ["accumulation", "--gpus", "72", "--tp", "3", "--pp", "8", "--global-batch", "1024", "--micro-batch", "4"],
        ["parameters", "--count", "175000000000", "--tp", "8", "--pp", "8"],
        ["parameters", "--model", "llama3-405b", "--tp", "8", "--pp", "16"],
        ["memory", "--model", "llama3-70b", "--tp", "8", "--pp", "4", "-V", "2", "-M", "16", "--zero1", "--recompute"],
        ["memory", "--model", "llama3-8b", "-M", "1"],
        ["memory", "--model", "llama3-8b", "--pp", "2", "-M", "4"],
        ["memory", "--model", "mixtral-8x7b", "--pp", "4", "--dp", "16", "--ep", "8", "-M", "16", "--zero1"],
        ["volume", "--layers", "32", "--seq", "4096", "--hidden", "4096", "--tp", "8", "--pp", "8"],
    ],
)
def test_each_formula_says_why_and_from_where_and_speaks_json(arguments):
    words = _calc(*arguments)
    assert words.exit_code == 0, words.output
    assert "  why  " in words.output
    assert "  source  " in words.output
    data = json.loads(_calc(*arguments, "--json").stdout)
    assert data["quantities"]
    assert data["formula"]


def test_the_memory_of_a_layout_that_cannot_be_says_why_not():
    done = _calc("memory", "--model", "llama3-405b", "--tp", "7", "--pp", "16", "-M", "32")
    assert "128 attention heads cannot be divided over TP = 7" in " ".join(done.output.split())


def test_torchtitans_405b_can_be_worked_out():
    words = ["memory", "--model", "llama3-405b", "--tp", "8", "--pp", "8", "--dp", "8", "--micro-batch", "4"]
    done = _calc(*words, "-M", "8", "--recompute", "--fsdp", "--json")
    sizes = {quantity["name"]: quantity["value"] for quantity in json.loads(done.stdout)["quantities"]}
    assert sizes["second rank: together"] == pytest.approx(82.5 * 2**30, rel=0.15)  # published: 82.5 GiB


@pytest.mark.parametrize(
    "arguments",
    [
        ["bubble", "-P", "0", "-M", "4"],
        ["bubble", "-P", "four", "-M", "4"],
        ["bubble", "-M", "4"],
        ["message", "--seq", "1", "--hidden", "1", "--bandwidth", "0"],
        ["message", "--seq", "1", "--hidden", "1", "--bandwidth", "fast"],
        ["microbatches", "-P", "8", "--memory", "8G"],
        ["microbatches", "-P", "8", "--bubble", "1"],
        ["microbatches", "-P", "8", "--bubble", "nan"],
        ["microbatches", "-P", "8", "--bubble", "1e-300"],
        ["memory", "--model", "llama3-8b", "-M", "9" * 15],
        ["memory", "--model", "llama3-8b", "-M", "1", "--tp", "9" * 15],
        ["parameters"],
        ["parameters", "--model", "gpt-9"],
        ["memory", "--model", "gpt-9", "-M", "1"],
        ["memory", "--model", "llama3-8b", "-M", "1", "--schedule", "naive"],
        ["memory", "--model", "llama3-8b", "-M", "1", "--pp", "33"],
        ["nonsense"],
    ],
)
def test_nonsense_is_refused_with_2_and_no_traceback(arguments):
    done = _calc(*arguments)
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert "Error: " in done.stderr
    assert done.stdout == ""


def test_the_list_of_formulas_cuts_no_sentence():
    text = " ".join(CliRunner().invoke(main, ["calc", "--help"], env={"COLUMNS": "80"}).output.split())
    assert "What the ranks of a pipeline hold at their peak, part by part." in text
    assert "..." not in text.replace("[ARGS]...", "")
