"""A recorder of its own for each test, and proof that no hook is left behind."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from ppdiag.hooks import guard

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_hook_is_left_behind() -> Iterator[None]:
    guard.reset()
    before = [*sys.meta_path], sys.excepthook
    yield
    assert ([*sys.meta_path], sys.excepthook) == before
    guard.reset()
