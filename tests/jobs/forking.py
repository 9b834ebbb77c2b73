"""Imports torch once, then forks the ranks of a job for each line of its input: many jobs in little time.

A line is a JSON list with an object for each rank: ``argv`` (the first is the script to run), ``environment``,
``stderr`` (a file), ``start`` (files that Python would have run before torch was imported) and, where the rank is to
live in a network of its own, ``namespace`` (a file of a network namespace). The answer is the list of exit codes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import sys
from pathlib import Path

import hand_1f1b  # type: ignore[import-not-found]  # noqa: F401  (beside this file; the jobs use it)
import torch
import torch.distributed.pipelining
import torch.utils.data  # noqa: F401

CLONE_NEWNET = 0x40000000


def serve() -> None:
    """Fork ranks until the input ends; returns in each of them."""
    gc.freeze()  # a collection in a rank looks at what is its own
    for line in sys.stdin:
        children = []
        for rank in json.loads(line):
            child = os.fork()
            if child == 0:
                become(**rank)
                return
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)
    sys.exit(0)


def become(argv: list[str], environment: dict[str, str], stderr: str, start: list[str], namespace: str = "") -> None:
    """Be a process that was started with these."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    for number, path in ((0, os.devnull), (1, os.devnull), (2, stderr)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)
    if namespace:
        enter(namespace)
    for path in start:
        runpy.run_path(path)


def enter(namespace: str) -> None:
    """Move to a network namespace: this process has one thread yet."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns", namespace)


if __name__ == "__main__":
    serve()
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
