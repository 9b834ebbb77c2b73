from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.reports import chromium

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Chromium]:
    """A real browser for all tests."""
    binary = chromium.find()
    if binary is None:
        pytest.skip("no chromium or chrome on PATH: apt-get install chromium")
    process = chromium.Chromium(binary, tmp_path_factory.mktemp("chromium"))
    yield process
    process.close()
