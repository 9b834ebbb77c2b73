"""The pages say what the code does: a command, a message or a field without its words fails here."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import subprocess
from pathlib import Path

import click
import pytest

from ppdiag import errors
from ppdiag.analyzers.sources import SOURCES
from ppdiag.analyzers.symptoms import ANY, SYMPTOMS
from ppdiag.commands import COMMANDS
from ppdiag.conditions import QUANTITIES
from ppdiag.diagnosis import Cause, Place
from ppdiag.errors import PpdiagError
from ppdiag.model import SPAN_FIELDS, Flag, Kind
from ppdiag.reports import REPORTS

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
PAGES = sorted([*REPOSITORY.glob("*.md"), *DOCS.glob("*.md")])
ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PpdiagError)]
OWN_MODULES = {"__init__"}
WITH_EXAMPLES = sorted(
    path.relative_to(REPOSITORY)
    for folder in ("ppdiag", "hooks", "analyzers", "reports")
    for path in (REPOSITORY / folder).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


def _page(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def _sections(name: str) -> dict[str, str]:
    """The second-level sections of a page: heading and text."""
    parts = re.split(r"^## (.+)$", _page(name), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", COMMANDS.names())
def test_each_command_has_a_section_with_all_its_options(name):
    section = _sections("docs/command-line.md")[f"ppdiag {name}"]
    command: click.Command = COMMANDS.load(name)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            for option in parameter.opts:
                assert f"`{option}" in section


def test_each_command_is_one_file_one_row_and_one_file_of_tests():
    files = {path.stem for path in (REPOSITORY / "ppdiag" / "commands").glob("*.py")} - OWN_MODULES
    tests = {path.stem.removeprefix("test_") for path in (REPOSITORY / "tests" / "commands").glob("test_*.py")}
    assert files == set(COMMANDS.names()) == tests


@pytest.mark.parametrize("name", COMMANDS.names())
def test_each_command_is_loaded_and_helps(name):
    command: click.Command = COMMANDS.load(name)
    assert command.name == name
    assert command.get_short_help_str()


def test_each_source_is_one_file_or_more_and_loads():
    assert all(SOURCES.load(name) for name in SOURCES.names())


def test_each_report_loads():
    assert all(REPORTS.load(name) for name in REPORTS.names())


def _page_of_symptoms() -> str:
    """What docs/symptoms.md has to be: the docstrings of the symptoms, in the order of their table."""
    lines = [
        "# Symptoms",
        "",
        "Known patterns, each with its evidence in numbers. Made of the docstrings of `analyzers/symptoms`.",
    ]
    for name in SYMPTOMS.names():
        module = importlib.import_module(SYMPTOMS.load(name).__module__)
        title, *paragraphs = inspect.cleandoc(module.__doc__ or "").split("\n\n")
        lines += ["", f"## {name}", "", title]
        for paragraph in paragraphs:
            heading, _, text = paragraph.partition(": ")
            lines += ["", f"**{heading}.** {text}"]
    return "\n".join(lines) + "\n"


def test_the_page_of_symptoms_is_made_of_their_docstrings():
    page = DOCS / "symptoms.md"
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(_page_of_symptoms(), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == _page_of_symptoms(), "see CONTRIBUTING.md: UPDATE_DOCS=1"


@pytest.mark.parametrize("name", SYMPTOMS.names())
def test_the_docstring_of_each_symptom_has_its_four_parts(name):
    text = importlib.import_module(SYMPTOMS.load(name).__module__).__doc__ or ""
    assert re.findall(r"^(What it finds|Why it matters|What to try|Source): ", text, re.MULTILINE) == [
        "What it finds",
        "Why it matters",
        "What to try",
        "Source",
    ]


@pytest.mark.parametrize("name", SYMPTOMS.names())
def test_each_symptom_says_what_to_do_what_to_measure_and_has_tests(name):
    module = importlib.import_module(SYMPTOMS.load(name).__module__)
    assert module.HOW[ANY]
    assert module.MEASURE_AFTER
    tests = REPOSITORY / "tests" / "analyzers" / "symptoms"
    own = tests / f"test_{name.replace('-', '_')}.py"
    assert own.exists() or f'["{name}"]' in (tests / "test_symptoms.py").read_text(encoding="utf-8")


def test_the_cases_name_symptoms_that_exist_and_leave_none_out():
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)*)`", _page("docs/cases.md")))
    without_thread = {"host-stall", "imbalance"}  # these are named beside their special cases
    assert named <= set(SYMPTOMS.names())
    assert set(SYMPTOMS.names()) - named <= without_thread


def test_each_file_of_a_symptom_has_its_row():
    files = {path.stem for path in (REPOSITORY / "analyzers" / "symptoms").glob("*.py")} - OWN_MODULES
    assert files == {name.replace("-", "_") for name in SYMPTOMS.names()}


def _page_of_messages() -> str:
    """What docs/messages.md has to be: the docstrings of the errors, in their order."""
    lines = [
        "# Messages",
        "",
        "Each message of ppdiag ends with one of these names; `ppdiag explain NAME` says the same as here. Made of",
        "the docstrings of `ppdiag/errors.py`. [The command line](command-line.md#exit-codes) lists the exit codes.",
    ]
    for error in ERRORS:
        first, *rest = inspect.cleandoc(error.__doc__ or "").split("\n\n")
        lines += ["", f"## {error.slug}", "", f"{first} Exit code {error.exit_code}."]
        lines += [line for paragraph in rest for line in ("", paragraph)]
    return "\n".join(lines) + "\n"


def test_the_page_of_messages_is_made_of_the_docstrings_of_the_errors():
    page = DOCS / "messages.md"
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(_page_of_messages(), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == _page_of_messages(), "see CONTRIBUTING.md: UPDATE_DOCS=1"


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.slug)
def test_the_exit_code_of_each_message_is_written_down(error):
    assert f"exit code {error.exit_code}" in _sections("docs/messages.md")[error.slug].lower()
    for page, heading in (("docs/command-line.md", "Exit codes"), ("README.md", "Exit codes")):
        assert re.search(rf"^\| {error.exit_code} \|", _sections(page)[heading], re.MULTILINE)


@pytest.mark.parametrize("name", QUANTITIES)
def test_each_quantity_of_a_condition_is_explained(name):
    assert f"`{name}`" in _sections("docs/command-line.md")["Conditions"]


@pytest.mark.parametrize("name", [*(name for name, _, _ in SPAN_FIELDS), *(kind.name for kind in Kind)])
def test_each_field_and_kind_of_the_record_is_explained(name):
    assert f"`{name}`" in _sections("docs/record.md")["Spans"]


@pytest.mark.parametrize("flag", list(Flag))
def test_each_flag_of_the_record_is_explained_with_its_number(flag):
    assert f"| `{flag.name}` | {flag.value} |" in _page("docs/record.md")


@pytest.mark.parametrize("word", [*Cause, *Place], ids=str)
def test_each_cause_and_place_is_explained(word):
    assert f"| {word.value.replace('_', ' ')} |" in _page("docs/accounting.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_inside_the_project_leads_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text("utf-8")):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in _anchors(path), f"{page.name}: {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("word", re.findall(r"`make (\w+)", (REPOSITORY / "README.md").read_text("utf-8")))
def test_each_word_of_make_in_the_readme_is_in_the_makefile(word):
    listed = subprocess.run(
        ["make", "--dry-run", "--always-make", word], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, listed.stderr


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_examples_in_docstrings_are_true(path):
    parts = [part for part in path.with_suffix("").parts if part != "ppdiag"]
    module = importlib.import_module(".".join(("ppdiag", *parts)))
    assert doctest.testmod(module).failed == 0
