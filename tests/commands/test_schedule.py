"""``ppdiag schedule`` draws, counts, and refuses shapes that do not exist in one line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ppdiag.cli import main


def _schedule(*arguments: str):
    return CliRunner().invoke(main, ["schedule", *arguments])


def test_gpipe_of_4_and_4_is_drawn_as_in_the_tutorial():
    done = _schedule("gpipe", "-M", "4", "-B", "1")
    assert done.output.splitlines()[1:5] == [
        "rank 0  F0 F1 F2 F3 ..................B0 B1 B2 B3",
        "rank 1  ...F0 F1 F2 F3 ............B0 B1 B2 B3 ...",
        "rank 2  ......F0 F1 F2 F3 ......B0 B1 B2 B3 ......",
        "rank 3  .........F0 F1 F2 F3 B0 B1 B2 B3 .........",
    ]
    assert "bubble / total                               42.9 %" in done.output


def test_the_layers_of_two_stages_a_rank_are_those_of_the_tutorial():
    output = _schedule("interleaved", "-P", "4", "-V", "2", "--layers", "32").output
    assert "layers of rank 0                             0-3,16-19" in output
    assert "layers of rank 3                             12-15,28-31" in output


def test_gpipe_keeps_m_activations_and_1f1b_p():
    schedules = json.loads(_schedule("gpipe", "1f1b", "-P", "4", "-M", "8", "--json").stdout)["schedules"]
    assert [schedule["peak_stage_activations"] for schedule in schedules] == [[8, 8, 8, 8], [4, 3, 2, 1]]


def test_naive_leaves_three_quarters_of_4_ranks_idle():
    schedule = json.loads(_schedule("naive", "--json").stdout)["schedules"][0]
    assert schedule["bubble_of_total"] == pytest.approx(0.75)


def test_a_heavy_stage_and_transfers_lengthen_the_step():
    lengths = [
        json.loads(_schedule("1f1b", "--json", *more).stdout)["schedules"][0]["length"]
        for more in ([], ["--stage-factor", "2:2"], ["--transfer", "0.5"])
    ]
    assert lengths[0] == 33
    assert min(lengths[1:]) > 33


def test_all_leaves_out_what_has_no_such_shape():
    names = [one["name"] for one in json.loads(_schedule("all", "-M", "4", "--json").stdout)["schedules"]]
    assert "dualpipe-v" not in names
    assert {"naive", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v"} == set(names)


def test_pictures_are_written(tmp_path):
    paths = [tmp_path / f"drawing.{kind}" for kind in ("svg", "png", "html")]
    options = [word for path in paths for word in (f"--{path.suffix[1:]}", str(path))]
    assert _schedule("1f1b", "zb-v", *options).exit_code == 0
    assert [path.read_bytes()[:4] for path in paths] == [b"<svg", b"\x89PNG", b"<!do"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["2f2b"], "'2f2b' is no schedule"),
        (["dualpipe-v", "-M", "4"], "DualPipeV needs a microbatch"),
        (["interleaved", "-P", "4", "-M", "9"], "Interleaved 1F1B takes 4 or more microbatches at a time"),
        (["1f1b", "--layers", "3"], "3 layers do not fill 4 stages"),
        (["1f1b", "--stage-factor", "two"], "cannot read 'two'"),
        (["1f1b", "--stage-factor", "4:2"], "has stages 0 to 3, not 4"),
        (["1f1b", "--stage-factor", "0:nan"], "a factor is above 0"),
        (["1f1b", "-F", "0", "-B", "0"], "must take some time"),
        (["1f1b", "-W", "3"], "a part of the backward"),
        (["1f1b", "-P", "999", "-M", "99999"], "too large to draw"),
    ],
)
def test_what_cannot_be_drawn_is_one_line_and_exit_code_2(arguments, words):
    done = _schedule(*arguments)
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert "(see ppdiag explain bad-shape)" in done.stderr


@pytest.mark.parametrize("number", ["nan", "-1", "inf", "", "one"])
@pytest.mark.parametrize("option", ["-F", "-B", "-W", "--transfer"])
def test_a_time_that_is_no_number_is_refused(option, number):
    done = _schedule("1f1b", option, number)
    assert done.exit_code == 2
    assert "Invalid value for" in done.stderr


def test_a_split_weight_gradient_keeps_its_activations_longer():
    # Qi et al. 2024, table 2: ZB-H1 as much as 1F1B on its first rank, P; ZB-H2 2P-1
    schedules = json.loads(_schedule("zb-h1", "zb-h2", "1f1b", "-P", "4", "-M", "12", "--json").stdout)["schedules"]
    kept = [schedule["peak_stage_activations_until_weight"] for schedule in schedules]
    assert kept == [[4, 4, 4, 4], [7, 7, 7, 7], [4, 3, 2, 1]]
    assert "with those that wait for their W             4, 4, 4, 4" in _schedule("zb-h1", "-M", "12").output


def test_pictures_say_what_the_text_says(tmp_path):
    path = tmp_path / "drawing.svg"
    _schedule("interleaved", "-V", "2", "--layers", "32", "--message-size", "64M", "--svg", str(path))
    words = path.read_text()
    for fact in ("bubble / total 15.8 %", "bubble / ideal 18.8 %", "5.5, 4.5, 3.5, 2.5", "messages 112", "7.17 GB"):
        assert fact in words
    assert "rank 0: layers 0-3,16-19" in words


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    done = _schedule("1f1b", "--svg", str(tmp_path / "missing" / "drawing.svg"))
    assert (done.exit_code, done.stderr.count("\n")) == (6, 1)


def test_a_schedule_may_be_named_as_reports_print_it():
    reported, typed = _schedule("1F1B", "-P", "2"), _schedule("1f1b", "-P", "2")
    assert (reported.exit_code, reported.output) == (0, typed.output)
