"""Freed memory is used again."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, numpy
from ppdiag.memory import keep_freed_memory
if {keep}:
    keep_freed_memory()
numpy.ones(2**23)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    numpy.ones(2**23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tells glibc's malloc")
def test_large_arrays_of_freed_memory_are_no_new_pages():
    def new_pages(*, keep: bool) -> int:
        program = [sys.executable, "-c", PROGRAM.format(keep=keep)]
        return int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)

    assert new_pages(keep=True) < 8 < new_pages(keep=False)  # arrays of 64 MiB: at least 32 pages each, even of 2 MiB
