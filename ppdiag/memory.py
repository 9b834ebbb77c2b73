"""Memory of a process that analyses: freed arrays are used again instead of going back to the system."""

from __future__ import annotations

import ctypes
import sys

# malloc.h of glibc
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_TOP_PAD_BYTES = 64 * 2**20
_NEVER = -1


def keep_freed_memory() -> None:
    """Tells glibc's malloc to keep what is freed, for the rest of the process; nothing where there is no glibc.

    By default it asks the system for each array of over 32 MiB and gives it back at once: every temporary array of a
    large job is then a stretch of new pages to be cleared. benchmarks/scale.py spent a fifth of its time in that at
    1,024 ranks, and little at 128: the cost of a span grew with the job. Peak memory is the same.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)
