"""The table of adapters: one file and one row each, with its words in the docs; all off where the user says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ppdiag.hooks import adapters

FOLDER = Path(adapters.__file__).parent
PARTS = {"__init__", "brackets", "megatron_grid"}


def test_each_adapter_is_one_file_and_one_row() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - PARTS
    rows = {target.partition(":")[0].rpartition(".")[2] for target in adapters.ADAPTERS.values()}
    assert files == rows


def test_each_adapter_has_its_words_in_the_docs(repository: Path) -> None:
    page = (repository / "docs" / "frameworks.md").read_text()
    for name in ("torch.distributed.pipelining", "Megatron-Core", "DeepSpeed"):
        assert f"| {name}" in page or f"| `{name}`" in page


@pytest.mark.parametrize(("value", "left"), [("none", 0), ("", len(adapters.ADAPTERS))])
def test_the_variable_switches_all_of_them_off(checkout_environment: dict[str, str], value: str, left: int) -> None:
    code = "from ppdiag.hooks import adapters; print(len(adapters.ADAPTERS))"
    environment = {**checkout_environment, "PPDIAG_ADAPTERS": value}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(left)
