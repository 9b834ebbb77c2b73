"""Samples of the device's memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ppdiag.hooks.memory import KINDS, Memory
from ppdiag.model import Kind


def tail(step: int, kind: Kind = Kind.FORWARD) -> Any:
    return (0, 0, step, -1, -1, 0, 3, 2, 0, -1, 0, 0, int(kind), 0)


def test_a_reading_says_which_op_it_is_of() -> None:
    said: list[dict[str, Any]] = []
    Memory(lambda: (700, 900), said.append).sample(tail(0))
    assert said[0].pop("local_ns") > 0
    assert said == [
        {
            "type": "memory",
            "step": 0,
            "kind": Kind.FORWARD,
            "stage": 2,
            "microbatch": 3,
            "current_bytes": 700,
            "peak_bytes": 900,
        }
    ]


def test_the_first_steps_are_sampled_and_then_one_in_sixteen() -> None:
    said: list[dict[str, Any]] = []
    memory = Memory(lambda: (0, 0), said.append)
    for step in range(100):
        memory.sample(tail(step))
    assert [word["step"] for word in said] == [0, 1, 2, 3, 16, 32, 48, 64, 80, 96]


def test_forwards_and_backwards_are_sampled_and_waits_are_not() -> None:
    assert {int(Kind.FORWARD), int(Kind.BACKWARD), int(Kind.WEIGHT)} == KINDS


def test_torchs_allocator_is_asked_once_and_never_reset() -> None:
    statistics = {"allocated_bytes": {"all": {"current": 11, "peak": 22, "allocated": 0, "freed": 0}}}
    cuda = SimpleNamespace(memory_stats_as_nested_dict=lambda: statistics)  # nothing else may be called
    said: list[dict[str, Any]] = []
    Memory.of_cuda(cuda, said.append).sample(tail(0))
    assert (said[0]["current_bytes"], said[0]["peak_bytes"]) == (11, 22)
