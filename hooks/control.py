"""Puts the probes of all ranks to sleep and wakes them, at the same boundary between two steps on every rank.

Which steps are recorded follows from the step's number, so that ranks need not speak with each other:

* ``dormant``: none, until ``ppdiag record`` writes a command into the run directory. It does so twice: first it asks,
  and each rank answers in its record with the step that it is in; then it names a step that no rank has reached yet.
* ``attached``: the same in ranks that were armed while the job ran, whose counts may differ. The second time, each is
  told how far it is ahead of the others, and counts as they do from then on.
* ``every:K:N``: N steps, every K.
* ``overhead``: blocks of steps, probed and not, whose lengths are compared.

Asleep, nothing is patched but the adapters of frameworks, whose wrappers look at one attribute; the end of an
optimizer's step is still heard. Only a command that belongs to the owner of this process is obeyed.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from ppdiag.hooks import guard, optimizer, process_group
from ppdiag.hooks.install import sleep_probes, wake_probes
from ppdiag.hooks.modules import INFERENCE, install_module_calls
from ppdiag.hooks.recorder import RECORDER
from ppdiag.rundir import ATTACHED_MODE, CONTROL_FILE, MODE_VARIABLE, RUN_DIR_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBE = "control"
PERIOD_NS = 100_000_000
"""Between two looks for a command; one takes some 10 us on a local disk."""
BLOCK_STEPS = 6
"""Of ``overhead``. The first step of a block does not count: Python adapts to what was just patched."""
_MOST_COMMAND_BYTES = 4096


class Command(NamedTuple):
    """What ``ppdiag record`` asks for."""

    id: str
    steps: int
    start: int
    """The first step to record; -1 while the ranks are only asked where they are."""
    ahead: Mapping[str, int] = {}
    """By how many steps ranks count ahead of those that count least; a rank that is not named does not."""

    def wants(self, step: int) -> bool:
        """Whether this step is recorded. One more than asked for is, since a step ends where the next one begins."""
        return 0 <= self.start <= step <= self.start + self.steps


class Block:
    """The time and CPU time of the steps since the second of a block."""

    def __init__(self) -> None:
        self.steps = -1
        self._begin_ns = self._cpu_begin_ns = 0
        self._end_ns = self._cpu_end_ns = 0

    def step_ended(self) -> None:
        """One more step of the block has ended."""
        self.steps += 1
        self._end_ns, self._cpu_end_ns = perf_counter_ns(), time.process_time_ns()
        if self.steps == 0:
            self._begin_ns, self._cpu_begin_ns = self._end_ns, self._cpu_end_ns

    def word(self, first: int, *, probed: bool) -> dict[str, Any]:
        """The block as a line of the record; ``first`` is its first step."""
        times = {"wall_ns": self._end_ns - self._begin_ns, "cpu_ns": self._cpu_end_ns - self._cpu_begin_ns}
        return {"type": "block", "first": first, "probed": probed, "steps": self.steps, **times}


class Control:
    """Decides at the end of each step whether the next one is recorded."""

    def __init__(self, mode: str) -> None:
        self.mode, *numbers = mode.split(":")
        self._every, self._window = map(int, numbers) if numbers else (0, 0)
        self.command: Command | None = None
        self._last_look_ns = -PERIOD_NS
        self._last_step = -1
        self._last_end_ns = 0
        self._step_ns = 0
        self._inferred = False
        self._block, self._block_first = Block(), 0

    def step_ended(self) -> None:
        """A step has ended on this rank, the recorder's ``step``."""
        step, now = RECORDER.step, perf_counter_ns()
        if step == self._last_step:  # by a second optimizer
            return
        self._step_ns = now - self._last_end_ns if self._last_end_ns else 0
        self._last_end_ns, self._last_step = now, step
        RECORDER.begin_asleep()
        if self.mode in ("dormant", ATTACHED_MODE):
            self._look(step, now)
            step = RECORDER.step
        elif self.mode == "overhead":
            self._measure(step)
        wanted = self.wants(step + 1)
        if wanted != RECORDER.active and not RECORDER.stopped:
            self._switch(step + 1, wanted=wanted)

    def wants(self, step: int) -> bool:
        """Whether this step is recorded."""
        if self.mode == "overhead":
            turn, second = divmod(step // BLOCK_STEPS, 2)
            return bool(second) != bool(turn % 2)  # no, yes, yes, no: a drift of the machine's speed evens out
        if self.mode == "every":
            return step >= self._every and step % self._every <= self._window
        return self.command is not None and self.command.wants(step)

    def _switch(self, step: int, *, wanted: bool) -> None:
        if wanted:
            wake_probes()
            if self._inferred:
                INFERENCE.in_use = True
                install_module_calls()
            RECORDER.wake()
        else:
            self._inferred = INFERENCE.in_use
            RECORDER.sleep()
            RECORDER.instruments = None
            process_group.write_pending()
            sleep_probes()
        command = self.command.id if self.command is not None else ""
        RECORDER.lines.append({"type": "control", "id": command, "step": step, "awake": wanted})
        RECORDER.flush_soon()

    def _look(self, step: int, now: int) -> None:
        """Look for a new command, and answer it, once it is known how long a step takes."""
        if now - self._last_look_ns < PERIOD_NS or not self._step_ns:
            return
        self._last_look_ns = now
        command = read_command(os.path.join(os.environ[RUN_DIR_VARIABLE], CONTROL_FILE))
        if command is not None and command != self.command:
            self.command = command
            answer = {"step": step, "start": command.start, "step_ns": self._step_ns, "unix_ns": time.time_ns()}
            RECORDER.lines.append({"type": "control", "id": command.id, **answer})
            RECORDER.flush_soon()
            if command.ahead:
                rank = sys.modules["torch.distributed.distributed_c10d"].get_rank()
                self._last_step = RECORDER.step = step - command.ahead.get(str(rank), 0)

    def _measure(self, step: int) -> None:
        """Time the steps of a block, and write the block into the record with its last step."""
        self._block.step_ended()
        if (step + 1) % BLOCK_STEPS == 0:
            RECORDER.lines.append(self._block.word(self._block_first, probed=RECORDER.active))
            self._block, self._block_first = Block(), step + 1


def read_command(path: str) -> Command | None:
    """The command in a file; None where there is none, or it is not this user's (or root's) alone to write."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would hold the job up
    except OSError:
        return None
    try:
        facts = os.fstat(fd)
        if facts.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(facts.st_mode) & 0o022:
            guard.say_once(PROBE, f"{path} belongs to somebody else or can be written by others", "it is not obeyed")
            return None
        text = os.read(fd, _MOST_COMMAND_BYTES)
    finally:
        os.close(fd)
    try:
        found = json.loads(text)
        ahead = {str(rank): int(steps) for rank, steps in found.get("ahead", {}).items()}
        return Command(str(found["id"]), int(found["steps"]), int(found["start"]), ahead)
    except (ValueError, KeyError, TypeError, AttributeError):  # being written
        return None


_state: dict[str, Control | None] = {"control": None}


def install() -> None:
    """Take over, where the job is to sleep. ``torch.optim.optimizer`` must have been imported."""
    mode = os.environ.get(MODE_VARIABLE, "")
    if not mode or _state["control"] is not None:
        return
    control = _state["control"] = Control(mode)
    guard.register(PROBE, uninstall)
    RECORDER.asleep = not control.wants(0)
    RECORDER.fact("mode", mode)
    optimizer.at_step_end.append(_step_ended)
    if RECORDER.asleep:
        sleep_probes()


def uninstall() -> None:
    """Decide no more; the recorder stays as it is."""
    _state["control"] = None
    if _step_ended in optimizer.at_step_end:
        optimizer.at_step_end.remove(_step_ended)


def _step_ended() -> None:
    control = _state["control"]
    if control is None:
        return
    try:
        control.step_ended()
    except Exception as error:
        guard.failed(PROBE, error)
