"""When the recording begins and ends: in processes of its own, with a stand-in for torch.distributed."""

from __future__ import annotations

import contextvars
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.hooks.recorder import Recorder, ThreadState, thread_state
from ppdiag.model import RankStatus
from ppdiag.rundir import STATE, STATE_OFFSET, clock_identity

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """
import os, sys, types
from ppdiag.hooks.recorder import RECORDER, compute_tail
distributed = types.SimpleNamespace(GroupMember=types.SimpleNamespace(WORLD=None))
distributed.get_rank, distributed.get_world_size = lambda: 3, lambda: 4
sys.modules["torch.distributed.distributed_c10d"] = distributed
def initialise():
    distributed.GroupMember.WORLD = object()
def record():
    if RECORDER.active or RECORDER.start():
        RECORDER.append((1, 2, *compute_tail(1, 1, (0, 0, 0), 0)))
"""


def run(folder: Path, environment: dict[str, str], code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**environment, "PPDIAG_RUN_DIR": str(folder / "run"), **variables}
    command = [sys.executable, "-S", "-c", HEAD + code]  # -S: no .pth of an installed ppdiag arms it first
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def status(folder: Path) -> int:
    data = (folder / "run" / "rank00003-0.state").read_bytes()
    return int(STATE.unpack_from(data, STATE_OFFSET)[-1])


def header(folder: Path) -> dict[str, object]:
    lines = (folder / "run" / "rank00003-0.spans").read_bytes().split(b"\n", 2)
    return dict(json.loads(lines[1]))


def words(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "run" / "rank00003-0.jsonl").read_text().splitlines()]


def test_recording_begins_when_the_rank_is_known(tmp_path: Path, checkout_environment: dict[str, str]) -> None:
    code = "record(); print(os.path.exists('run')); initialise(); record(); print(sorted(os.listdir('run')))"
    result = run(tmp_path, checkout_environment, code)
    assert result.stdout.split("\n", 1)[0] == "False"
    assert result.stdout.count("rank00003-0.") == 3
    assert status(tmp_path) == RankStatus.FINISHED


def test_the_header_says_who_and_where_and_only_named_variables(
    tmp_path: Path, checkout_environment: dict[str, str]
) -> None:
    variables = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "SECRET_TOKEN": "hidden", "LOCAL_RANK": "1"}
    run(tmp_path, checkout_environment, "initialise(); record()", **variables)
    found = header(tmp_path)
    assert (found["rank"], found["world_size"], found["local_rank"]) == (3, 4, 1)
    assert found["env"] == {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo"}
    assert found["clock"] == clock_identity()
    assert "hidden" not in json.dumps(found)


def test_an_uncaught_exception_is_the_users_and_the_last_status(
    tmp_path: Path, checkout_environment: dict[str, str]
) -> None:
    result = run(tmp_path, checkout_environment, "initialise(); record()\nraise ValueError('of the user')")
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: of the user\n")
    assert "ppdiag" not in result.stderr
    assert status(tmp_path) == RankStatus.RAISED
    assert {"type": "fact", "name": "raised", "value": "ValueError: of the user"} in words(tmp_path)


def test_a_status_of_raised_survives_a_user_who_replaces_the_excepthook(
    tmp_path: Path, checkout_environment: dict[str, str]
) -> None:
    run(tmp_path, checkout_environment, "initialise(); record(); sys.excepthook = sys.__excepthook__\nraise ValueError")
    assert status(tmp_path) == RankStatus.RAISED


def test_a_forked_child_leaves_the_record_alone(tmp_path: Path, checkout_environment: dict[str, str]) -> None:
    code = """
from ppdiag.hooks import install
install.arm(); initialise(); record()
child = os.fork()
if child == 0:
    record()
    print(RECORDER.active, RECORDER.stopped, flush=True)
    sys.exit(0)
os.waitpid(child, 0)
record()
RECORDER.flush()
print(RECORDER.recorded)
"""
    result = run(tmp_path, checkout_environment, code)
    assert result.stdout.split("\n")[:2] == ["False True", "2"], result.stderr
    assert status(tmp_path) == RankStatus.FINISHED


def test_a_child_forked_before_the_rank_was_known_may_record(
    tmp_path: Path, checkout_environment: dict[str, str]
) -> None:
    code = """
from ppdiag.hooks import install
install.arm()
child = os.fork()
if child == 0:
    initialise(); record()
    sys.exit(0)
os.waitpid(child, 0)
"""
    run(tmp_path, checkout_environment, code)
    assert status(tmp_path) == RankStatus.FINISHED


def test_a_run_directory_that_cannot_be_made_is_said_once_and_the_job_lives(
    tmp_path: Path, checkout_environment: dict[str, str]
) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    result = run(tmp_path, checkout_environment, "initialise(); record(); record(); print('alive')")
    assert result.stdout == "alive\n"
    assert result.stderr.count("ppdiag: recorder: cannot begin the record") == 1


def test_the_limit_ends_the_spans_and_is_in_the_record(tmp_path: Path, checkout_environment: dict[str, str]) -> None:
    code = "initialise()\nfor _ in range(100):\n    record(); RECORDER.flush()"
    result = run(tmp_path, checkout_environment, code, PPDIAG_MAX_BYTES="4000")
    assert result.stderr.count("limit of 4000 bytes") == 1
    assert os.path.getsize(tmp_path / "run" / "rank00003-0.spans") <= 4000  # noqa: PTH202
    (fault,) = [word for word in words(tmp_path) if word["type"] == "fault"]
    assert "limit of 4000 bytes" in str(fault["error"])


def test_a_fact_is_said_once_for_each_value() -> None:
    recorder = Recorder()
    for value in ("GPipe", "GPipe", "1F1B", "1F1B"):
        recorder.fact("schedule", value)
    assert [line["value"] for line in recorder.lines] == ["GPipe", "1F1B"]


@pytest.mark.skipif(not os.path.exists("/proc/self/ns/time"), reason="needs time namespaces")  # noqa: PTH110
def test_processes_of_one_boot_and_namespace_share_a_clock(checkout_environment: dict[str, str]) -> None:
    code = "from ppdiag.rundir import clock_identity; print(clock_identity())"
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, env=checkout_environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == clock_identity()


def test_a_span_with_its_tail_apart_is_joined_before_anybody_sees_it() -> None:
    recorder = Recorder()
    tail = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)
    recorder.append((1, 2, tail))
    recorder.append((3, 4, *tail))
    assert recorder.spans == [(1, 2, *tail), (3, 4, *tail)]
    recorder.append((5, 6, tail))
    assert recorder.take(2) == [(1, 2, *tail), (3, 4, *tail)]
    assert recorder.take(2) == [(5, 6, *tail)]
    assert recorder.take(2) == []


def test_each_thread_has_a_state_of_its_own_and_keeps_it_in_every_context() -> None:
    def state_twice() -> tuple[ThreadState, ThreadState]:
        return thread_state(), contextvars.Context().run(thread_state)

    with ThreadPoolExecutor(1) as pool:
        first, second = state_twice(), pool.submit(state_twice).result()
    assert first[0] is first[1]
    assert second[0] is second[1]
    assert first[0].number != second[0].number


def test_a_thread_of_autograds_own_counts_as_the_first() -> None:
    torch = pytest.importorskip("torch")
    seen = []

    class Nested(torch.autograd.Function):  # type: ignore[name-defined]
        """A backward that runs another one: beyond some 60 of them the engine takes threads of its own."""

        @staticmethod
        def forward(ctx: Any, tensor: Any, depth: int) -> Any:
            ctx.depth = depth
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            if ctx.depth == 0:
                seen.append((threading.get_ident(), thread_state().number))
            else:
                with torch.enable_grad():
                    Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).backward()
            return gradient, None

    Nested.apply(torch.ones(1, requires_grad=True), 70).backward()
    ((thread, number),) = seen
    assert thread not in {other.ident for other in threading.enumerate()}
    assert number == 0
