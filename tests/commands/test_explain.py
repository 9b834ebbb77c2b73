"""``ppdiag explain`` says what every name means that a report or a message gives."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from ppdiag import errors
from ppdiag.analyzers.nccl.known_messages import KNOWN
from ppdiag.analyzers.symptoms import SYMPTOMS
from ppdiag.cli import main

SLUGS = [
    value.slug for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.PpdiagError)
]


def explained(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, ["explain", *arguments], env={"COLUMNS": "80"})
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("name", SYMPTOMS.names())
def test_each_symptom_is_explained_with_its_parts(name: str) -> None:
    text = explained(name)
    assert text.startswith(f"{name}: ")
    for heading in ("What it finds", "Why it matters", "What to try", "Source"):
        assert f"\n{heading}\n" in text


@pytest.mark.parametrize("slug", SLUGS)
def test_each_message_is_explained_with_its_exit_code(slug: str) -> None:
    assert "Exit code" in explained(slug)


@pytest.mark.parametrize("slug", sorted({known.slug for known in KNOWN}))
def test_each_message_of_nccl_is_explained(slug: str) -> None:
    assert "What to do" in explained(slug)


def test_a_name_of_two_things_gives_both() -> None:
    text = explained("version-mismatch")
    assert "Exit code 5." in text
    assert "a message of NCCL" in text


def test_without_a_name_all_are_listed() -> None:
    text = explained()
    for name in (*SYMPTOMS.names(), *SLUGS, *(known.slug for known in KNOWN)):
        assert name in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", ["[bubble]", "Bubble", "#bubble"])
def test_a_name_is_found_as_it_was_copied(name: str) -> None:
    assert explained(name).startswith("bubble: ")


def test_an_unknown_name_gives_the_nearest_ones_and_code_2() -> None:
    text = explained("tcpfalback", code=2)
    assert "did you mean tcp-fallback" in text
    assert "did you mean" not in explained("zzzzzzzzz", code=2)


def test_a_hostile_name_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in explained("\x1b[31mred", code=2)


def test_what_to_do_is_said_by_framework_once_for_each_text() -> None:
    text = explained("imbalance")
    assert text.count("--pipeline-model-parallel-layout") == 1
    assert "\n  deepspeed: " in text
    assert "\n  any other: " in text
