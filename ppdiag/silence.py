"""Say why no rank reported, from the command line of the job and the processes that were seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppdiag.rundir import PROCESSES_FILE, read_run_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PYTHON_OPTIONS = {
    "S": "-S keeps Python from running sitecustomize and .pth files; drop it",
    "I": "-I makes Python ignore PYTHONPATH; drop it, or install ppdiag into the environment of that Python",
    "E": "-E makes Python ignore PYTHONPATH; drop it, or install ppdiag into the environment of that Python",
}
_OTHER_PLACES = ("docker", "podman", "apptainer", "singularity", "kubectl", "ssh", "sudo")
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed")


def why_silent(directory: Path) -> str:
    """One sentence or two on why a run directory has no rank in it.

    Wrong guesses are dear here, so that each sentence says what was seen and then what it usually means.
    """
    command = _command(directory)
    processes = list(_processes(directory))
    suspects = " ".join(f"In the command, {suspect}." for suspect in _suspects(command))
    return f"{_seen(processes)} {suspects}".strip()


def _seen(processes: Sequence[dict[str, Any]]) -> str:
    armed = {process["pid"]: process for process in processes}
    torch = {process["pid"] for process in processes if process.get("event") == "torch"}
    if not armed:
        return (
            "No Python process of the job read the recorder's start-up file: the job ran no Python, ran it in a "
            "cleaned environment or on another machine, or overwrote PYTHONPATH."
        )
    launchers = {pid for pid, process in armed.items() if _is_launcher(process)}
    if launchers and not armed.keys() - launchers:
        return "The launcher was seen, but none of the processes that it started: they run without our PYTHONPATH."
    if not torch - launchers:
        names = ", ".join(sorted({str(process.get("executable")) for process in armed.values()}))
        count = "1 process" if len(armed) == 1 else f"{len(armed)} processes"
        return f"Python was seen ({count} of {names}), but none imported torch.distributed."
    return "torch.distributed was imported, but no process group was used: did init_process_group and a step run?"


def _is_launcher(process: dict[str, Any]) -> bool:
    argv = process.get("argv")
    words = [str(word) for word in argv[:6]] if isinstance(argv, list) else []
    return any(Path(word).name in _LAUNCHERS for word in words)


def _suspects(command: Sequence[str]) -> Iterator[str]:
    for place, word in enumerate(command):
        name = Path(word).name
        if name.startswith("python"):
            yield from _python_suspects(command[place + 1 :])
        elif name == "env" and {"-", "-i", "--ignore-environment"} & set(command[place + 1 : place + 4]):
            yield "env -i throws our variables away; pass PPDIAG_RUN_DIR and PYTHONPATH on (see ppdiag env)"
        elif name in _OTHER_PLACES:
            yield f"{name} may not hand our variables on; set those that ppdiag env prints on the other side"


def _python_suspects(arguments: Sequence[str]) -> Iterator[str]:
    """Reasons in the options of one Python: those before its script, -c or -m."""
    for argument in arguments:
        if not argument.startswith("-") or argument.startswith("--"):
            return
        for letter in argument[1:]:
            if letter in "cmXW":  # what follows is an argument of this option
                break
            if letter in _PYTHON_OPTIONS:
                yield _PYTHON_OPTIONS[letter]
        if argument[1:2] in ("c", "m"):
            return


def _command(directory: Path) -> list[str]:
    argv = read_run_file(directory).get("argv")
    return [str(word) for word in argv] if isinstance(argv, list) else []


def _processes(directory: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = (directory / PROCESSES_FILE).read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            process = json.loads(line)
        except ValueError:  # a line torn by a kill
            continue
        if isinstance(process, dict) and "pid" in process:
            yield process
