"""Values of options: sizes, names, and which steps are recorded."""

from __future__ import annotations

import click
import pytest

from ppdiag.errors import BadShape
from ppdiag.options import NumberRange, mode, pick, record_size_bytes, size_bytes, wanted


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("12", 12), ("1.5k", 1500), ("500M", 500 * 10**6), ("2 GB", 2 * 10**9), ("1t", 10**12)],
)
def test_a_size_is_read_in_decimal_units(text, count):
    assert size_bytes(text) == count


@pytest.mark.parametrize("text", ["", "-1", "1.", "1e9", "2 GiB", "ten", "9" * 400, "1k k", "nan"])
def test_what_is_no_size_is_said(text):
    with pytest.raises(click.BadParameter, match="write for instance 500M or 2G"):
        size_bytes(text)


@pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-1", "two", ""])
def test_what_is_no_number_within_the_bounds_is_refused(text):
    with pytest.raises(click.BadParameter):
        NumberRange(0, 9).convert(text, None, None)


@pytest.mark.parametrize("text", ["0", "1", "99999"])
def test_a_record_of_nothing_is_refused(text):
    with pytest.raises(click.BadParameter, match="at least 100k"):
        record_size_bytes(text)


def test_a_small_record_is_taken():
    assert record_size_bytes("100k") == 100_000


def test_a_name_that_is_unknown_gets_the_list():
    with pytest.raises(BadShape, match="'c' is no known letter; choose from a, b"):
        pick({"a": 1, "b": 2}, "c", "letter")


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({}, ""),
        ({"dormant": True}, "dormant"),
        ({"every": 100}, "every:100:5"),
        ({"every": 100, "window": 7}, "every:100:7"),
        ({"measure_overhead": True}, "overhead"),
    ],
)
def test_the_steps_to_record_have_the_words_of_the_hooks(chosen, words):
    none = {"dormant": False, "every": None, "window": None, "measure_overhead": False}
    assert mode(**{**none, **chosen}) == words


@pytest.mark.parametrize("chosen", [{"dormant": True, "every": 5}, {"window": 3}, {"every": 3, "window": 4}])
def test_choices_of_steps_that_exclude_each_other_are_refused(chosen):
    none = {"dormant": False, "every": None, "window": None, "measure_overhead": False}
    with pytest.raises(click.UsageError):
        mode(**{**none, **chosen})


def test_json_on_standard_output_takes_the_place_of_the_summary():
    assert wanted("-", None, (), quiet=False).summary is False
    assert wanted("file", None, (), quiet=False).summary is True
    assert wanted(None, None, (), quiet=True).summary is False
