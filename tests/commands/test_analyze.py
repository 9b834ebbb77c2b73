from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ppdiag import outputs
from ppdiag.analyzers.sources import SOURCES
from ppdiag.cli import main
from ppdiag.commands.analyze import FORMATS
from ppdiag.diagnosis import Why

FOUND = SimpleNamespace(
    idle_fraction=0.5,
    why=Why(bubble=0.3, imbalance=0.2),
    steps=SimpleNamespace(median_s=0.25),
)


def _write_json(_diagnosis, stream):
    stream.write('{"schema": "stand-in"}\n')


def _write_html(_diagnosis, path):
    Path(path).write_text("<html>")


def _render(_diagnosis, console):
    console.print("the summary")


@pytest.fixture
def analysis(monkeypatch):
    """Stand-ins for the analysis and the reports: here only what the command does with them is at stake."""
    monkeypatch.setattr(outputs, "_diagnose", lambda *_: FOUND)
    monkeypatch.setattr(outputs, "_report", {"json": _write_json, "html": _write_html, "terminal": _render}.__getitem__)


def _analyze(*arguments: str):
    return CliRunner().invoke(main, ["analyze", "run", *arguments])


@pytest.mark.usefixtures("analysis")
def test_the_summary_is_on_standard_output():
    done = _analyze()
    assert (done.exit_code, done.stdout, done.stderr) == (0, "the summary\n", "")


@pytest.mark.usefixtures("analysis")
def test_quiet_prints_nothing():
    assert _analyze("--quiet").output == ""


@pytest.mark.usefixtures("analysis")
def test_json_on_standard_output_is_alone_there():
    assert json.loads(_analyze("--json", "-").stdout) == {"schema": "stand-in"}


@pytest.mark.usefixtures("analysis")
def test_json_in_a_file_leaves_the_summary(tmp_path):
    assert _analyze("--json", str(tmp_path / "out.json")).stdout == "the summary\n"
    assert json.loads((tmp_path / "out.json").read_text()) == {"schema": "stand-in"}


@pytest.mark.usefixtures("analysis")
def test_the_page_is_written(tmp_path):
    _analyze("--html", str(tmp_path / "out.html"))
    assert (tmp_path / "out.html").read_text() == "<html>"


@pytest.mark.usefixtures("analysis")
@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_report_that_cannot_be_written_is_one_line(option):
    done = _analyze(option, "/dev/null/out")
    assert done.exit_code == 6
    assert done.stderr.startswith("ppdiag: cannot write /dev/null/out: Not a directory")
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("analysis")
@pytest.mark.parametrize(
    ("conditions", "code"),
    [(["idle>0.3"], 3), (["idle>60%"], 0), (["host>0.1", "bubble>=0.3"], 3), (["step_s>0.2"], 3), (["idel>1"], 2)],
)
def test_conditions_decide_the_exit_code(conditions, code):
    assert _analyze(*[word for condition in conditions for word in ("--fail-on", condition)]).exit_code == code


@pytest.mark.usefixtures("analysis")
def test_a_condition_that_holds_is_said_with_the_value():
    assert _analyze("--fail-on", "idle>0.3").stderr == "ppdiag: --fail-on idle>0.3 (idle is 0.5)\n"


def test_without_a_path_it_is_a_usage_error():
    assert CliRunner().invoke(main, ["analyze"]).exit_code == 2


@pytest.mark.parametrize("arrange", ["nothing", "empty", "launched", "a file", "garbage"])
def test_what_is_no_run_is_one_line_and_a_documented_exit_code(tmp_path, arrange):
    place = tmp_path / "place"
    if arrange != "nothing":
        place.mkdir()
    if arrange == "launched":
        (place / "run.json").write_text('{"argv": ["python", "-S", "train.py"]}')
    if arrange == "a file":
        place.rmdir()
        place.write_text("no run")
    if arrange == "garbage":
        (place / "run.json").write_text("{}")
        (place / "rank00000-0.spans").write_bytes(b"\x00garbage" * 100)
    done = CliRunner().invoke(main, ["analyze", str(place)])
    assert done.exit_code == (5 if arrange == "garbage" else 4)
    assert done.stderr.startswith("ppdiag: ")
    assert done.stderr.count("\n") == 1
    assert ("-S keeps Python" in done.stderr) == (arrange == "launched")


def test_an_unexpected_fault_is_one_line_and_shows_its_place_on_request(monkeypatch):
    def fail(*_):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(outputs, "_diagnose", fail)
    done = _analyze()
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "RuntimeError: a bug of ours" in done.stderr
    verbose = CliRunner().invoke(main, ["-v", "analyze", "run"])
    assert "Traceback" in verbose.stderr


def test_control_c_is_one_line(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(outputs, "_diagnose", interrupt)
    done = _analyze()
    assert (done.exit_code, done.stderr) == (130, "ppdiag: interrupted\n")


def test_a_reader_that_goes_away_is_no_error_of_ours(checkout_environment, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ppdiag", "env", str(tmp_path / "run")]
    done = subprocess.run(command, env=checkout_environment, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


DUMPS = Path(__file__).parents[1] / "data" / "flight_recorder" / "lock_gil_1st"


def test_dumps_of_a_hang_say_who_holds_the_job_up(tmp_path):
    target = tmp_path / "hang.json"
    done = CliRunner().invoke(main, ["analyze", str(DUMPS), "--json", str(target)])
    assert done.exit_code == 0
    assert done.stdout.startswith("ranks 9, 14 hold the job up: 14 of 16 ranks wait there\n")
    found = json.loads(target.read_text())
    assert (found["schema"], found["roots"][0]["ranks"]) == ("ppdiag.hang/1", [9, 14])


def test_a_hang_has_no_page_and_no_condition(tmp_path):
    for options in (["--html", str(tmp_path / "page.html")], ["--fail-on", "idle>0.1"]):
        done = CliRunner().invoke(main, ["analyze", str(DUMPS), *options])
        assert (done.exit_code, done.stderr.count("\n")) == (6, 1)
        assert "dumps of a hang hold no times" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_help_lists_each_format_that_can_be_read():
    text = " ".join(CliRunner().invoke(main, ["analyze", "--help"]).output.split())
    assert tuple(SOURCES.load(name).description for name in SOURCES.names()) == FORMATS
    assert all(words in text for words in FORMATS)
