from __future__ import annotations

import pytest

from ppdiag.diagnosis import Cause, Place, Verdict, percent
from ppdiag.reports import REPORTS
from ppdiag.reports.words import CAUSES, PLACES, duration, headline, rank_list, size, visible


def make_verdict(
    cause: str | None, *, stage: int | None = None, link: tuple[int, int] | None = None, rank: int | None = None
) -> Verdict:
    return Verdict(cause, stage, link, rank, 0.2, "measured", "")


def test_every_report_loads() -> None:
    assert REPORTS.names()[:3] == ["terminal", "json", "html"]
    assert all(callable(REPORTS.load(name)) for name in REPORTS.names())


def test_every_cause_and_place_has_a_word_and_each_its_own_character() -> None:
    assert list(CAUSES) == list(Cause)
    assert list(PLACES) == list(Place)
    for words in (CAUSES, PLACES):
        assert len({word.symbol for word in words.values()} | {"."}) == len(words) + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1.5e-9, "1.50 ns"),
        (9.996e-6, "10.0 µs"),
        (0.0123, "12.3 ms"),
        (0.99949, "999 ms"),
        (0.99951, "1.00 s"),
        (61.0, "61.0 s"),
        (7200.0, "7200 s"),
        (-0.5, "-500 ms"),
        (float("nan"), "-"),
        (float("inf"), "-"),
    ],
)
def test_a_duration_has_three_digits_and_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_are_decimal() -> None:
    assert [size(n) for n in (0, 999, 1000, 8_388_608, 25e9)] == ["0 B", "999 B", "1.00 kB", "8.39 MB", "25.0 GB"]


def test_percentages_keep_one_decimal() -> None:
    assert [percent(x) for x in (0.0, 0.12345, 1.0, float("nan"))] == ["0.0 %", "12.3 %", "100.0 %", "-"]


def test_ranks_are_listed_as_ranges() -> None:
    assert [rank_list(ranks) for ranks in ([], [5], [3, 1, 2, 7])] == ["", "5", "1-3,7"]


@pytest.mark.parametrize("text", ["\x1b]0;title\x07", "a\rb", "\x9b31m", "\u202eabc", "\u2066", "\udcff", "\u2028"])
def test_what_could_steer_a_terminal_is_spelt_out(text: str) -> None:
    assert visible(text).isprintable()


def test_names_in_any_script_stay_as_they_are() -> None:
    assert visible("节点-7 ñandú 🙂 שלום") == "节点-7 ñandú 🙂 שלום"


def test_the_headline_names_the_cause_and_its_place() -> None:
    assert headline(make_verdict("imbalance", stage=2)) == "Imbalance at stage 2"
    assert headline(make_verdict("host", rank=3)) == "Host at rank 3"
    assert headline(make_verdict("communication", link=(1, 2))) == (
        "Communication stall on the link from stage 1 to stage 2"
    )
    assert headline(make_verdict("bubble")) == "Bubble"
    assert headline(make_verdict(None)) == "Nothing worth changing"
