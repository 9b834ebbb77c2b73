from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.reports import chromium

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Chromium]:
    """A real browser for all tests; on a CI machine it has to be there."""
    binary = chromium.find()
    if binary is None:
        assert not os.environ.get("CI"), "CI has to install chromium: the pages are tested in a real browser"
        pytest.skip("no chromium or chrome on PATH: apt-get install chromium")
    process = chromium.Chromium(binary, tmp_path_factory.mktemp("chromium"))
    yield process
    process.close()
