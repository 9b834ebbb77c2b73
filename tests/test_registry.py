"""Tables of plug-ins: loaded late, joined by other packages, ours first."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import pytest

from ppdiag import registry
from ppdiag.registry import Registry

GROUP = "ppdiag.tests"


@pytest.fixture
def foreign(monkeypatch):
    points = [EntryPoint("dumps", "nowhere:gone", GROUP), EntryPoint("theirs", "json:loads", GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: [p for p in points if p.group == group])


def test_a_row_is_loaded_when_it_is_asked_for():
    table = Registry(GROUP, {"dumps": "json:dumps", "broken": "no_such_module:x"})
    assert table.names() == ["dumps", "broken"]
    assert table.load("dumps") is json.dumps
    with pytest.raises(ModuleNotFoundError):
        table.load("broken")


@pytest.mark.usefixtures("foreign")
def test_other_packages_add_rows_and_take_none_of_ours():
    table = Registry(GROUP, {"dumps": "json:dumps"})
    assert table.names() == ["dumps", "theirs"]
    assert table.load("dumps") is json.dumps
    assert table.load("theirs") is json.loads


def test_a_name_that_is_not_there_is_a_key_error():
    with pytest.raises(KeyError):
        Registry(GROUP, {}).load("nothing")
