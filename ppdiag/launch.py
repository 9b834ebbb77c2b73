"""Start a job under observation: its run directory, its environment, its signals and its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ppdiag
from ppdiag.errors import LaunchFailed
from ppdiag.model import FORMAT_VERSION
from ppdiag.rundir import (
    ADAPTERS_VARIABLE,
    LAYER_TIMES_VARIABLE,
    MAX_BYTES_VARIABLE,
    MODE_VARIABLE,
    RUN_DIR_VARIABLE,
    RUN_FILE,
    parse_rank_file_name,
    read_run_file,
)
from ppdiag.stated import NOT_STATED, StatedLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_SI_KERNEL = 0x80
"""``si_code`` of a signal that the kernel itself sent, as the terminal does on Ctrl-C (asm-generic/siginfo.h)."""


def default_run_directory() -> Path:
    """A new name in the current directory, by local time: ``ppdiag-run-20250131-235959``.

    Two launches in one second get different names.
    """
    stem = time.strftime("ppdiag-run-%Y%m%d-%H%M%S")
    names = [stem, *(f"{stem}-{count}" for count in range(2, 1000))]
    return next(Path(name) for name in names if not Path(name).exists())


def prepare_run_directory(directory: Path, command: Sequence[str] = (), layout: StatedLayout = NOT_STATED) -> Path:
    """Make the directory, or join the run that is in it; write what the launcher knows.

    Several launchers may share a directory (one a node, or a restarted job): ranks number their files by restart, and
    ``run.json`` is that of the last launcher.

    Returns:
        The absolute path.

    Raises:
        LaunchFailed: it cannot be made or written, or holds something that is not a run.
    """
    path = Path(os.path.abspath(directory))  # noqa: PTH100  (not resolve: nodes may see a link differently)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_run_directory(path) and any(path.iterdir()):
            raise LaunchFailed(f"{path} is not empty and holds no run; name a new or an empty directory")
        _write_run_file(path, _launcher_facts(command) | ({"layout": layout.to_dict()} if layout else {}))
    except OSError as error:
        raise LaunchFailed(
            f"cannot write the run directory {path}: {error.strerror}; name another directory"
        ) from error
    return path


def is_run_directory(path: Path) -> bool:
    """Whether a launcher or a rank has written here."""
    return (path / RUN_FILE).exists() or bool(rank_files(path))


def rank_files(path: Path) -> set[str]:
    """Names of the span files that ranks have written in a run directory."""
    names = (entry.name for entry in path.iterdir())
    return {name for name in names if (parts := parse_rank_file_name(name)) and parts.suffix == "spans"}


def _launcher_facts(command: Sequence[str]) -> dict[str, Any]:
    return {
        "version": FORMAT_VERSION,
        "ppdiag": ppdiag.__version__,
        "argv": list(command),
        "cwd": str(Path.cwd()),
        "host": socket.gethostname(),
        "python": sys.executable,
        "started_unix_ns": time.time_ns(),
    }


def _write_run_file(path: Path, facts: dict[str, Any]) -> None:
    """Put ``run.json`` in place: a reader sees the old one or the new one."""
    scratch = path / f".{RUN_FILE}.{socket.gethostname()}.{os.getpid()}"
    scratch.unlink(missing_ok=True)
    # A file of our own: whoever may write here could have laid a link to another file of the user's under this name.
    descriptor = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    scratch.replace(path / RUN_FILE)


def note_end(path: Path, exit_code: int) -> None:
    """Write into ``run.json`` that the job has ended: a rank that has not said so itself was killed."""
    facts = read_run_file(path)
    if facts:
        with contextlib.suppress(OSError):  # the job's own exit code matters more
            _write_run_file(path, {**facts, "ended_unix_ns": time.time_ns(), "exit_code": exit_code})


def bootstrap_directory() -> str:
    """The folder with our sitecustomize."""
    import ppdiag.hooks  # noqa: PLC0415  (only its place is wanted, and only here)

    return os.path.join(os.path.dirname(os.path.abspath(ppdiag.hooks.__file__)), "bootstrap")  # noqa: PTH100, PTH118, PTH120


def job_variables(  # noqa: PLR0913  (one argument an option)
    directory: Path,
    environ: Mapping[str, str],
    *,
    max_bytes: int | None = None,
    nccl: bool = False,
    mode: str = "",
    adapters: bool = True,
    layer_times: bool = False,
) -> dict[str, str]:
    """The variables that make every Python of a job record into ``directory`` (absolute).

    ``mode`` says which steps, in the words of ``ppdiag.hooks.control``; all where it is empty.

    Raises:
        LaunchFailed: PYTHONPATH cannot name our folder, since its path holds the separator.
    """
    bootstrap = bootstrap_directory()
    if os.pathsep in bootstrap:
        raise LaunchFailed(f"ppdiag is installed in {bootstrap}, and PYTHONPATH cannot hold a path with {os.pathsep!r}")
    others = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != bootstrap]
    variables = {RUN_DIR_VARIABLE: str(directory), "PYTHONPATH": os.pathsep.join([bootstrap, *others])}
    if max_bytes is not None:
        variables[MAX_BYTES_VARIABLE] = str(max_bytes)
    if mode:
        variables[MODE_VARIABLE] = mode
    if not adapters:
        variables[ADAPTERS_VARIABLE] = "none"
    if layer_times:
        variables[LAYER_TIMES_VARIABLE] = "1"
    return variables | (_nccl_variables(directory, environ) if nccl else {})


def _nccl_variables(directory: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make NCCL write its log into ``directory``; none where the user has set his own.

    NCCL replaces %h by the host and %p by the process id, also in the directory's own name: one with a % gets no log.
    INIT and NET hold the lines that name transports.
    """
    own = any(name in environ for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"))
    if own or "%" in str(directory):
        return {}
    file = str(directory / "nccl-%h-%p.log")
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET", "NCCL_DEBUG_FILE": file}


def check_command(command: Sequence[str]) -> None:
    """Find a mistyped command before a run directory is made for it.

    Raises:
        LaunchFailed: there is no such program, or it cannot be executed.
    """
    if shutil.which(command[0]) is not None:
        return
    if Path(command[0]).exists():
        raise LaunchFailed(
            f"cannot start {command[0]}: it is no executable file; a script wants python before its name"
        )
    raise LaunchFailed(f"cannot start {command[0]}: no such program; the command follows --, program first")


def run_job(command: Sequence[str], variables: Mapping[str, str], *, meanwhile: Callable[[], None]) -> int:
    """Run the job with our stdin, stdout and stderr; pass on signals that were sent to us alone.

    ``meanwhile`` is called once, as soon as the job has been started.

    The signals are blocked and taken one by one, so that none is lost between two looks at the job. One that the
    terminal sent (Ctrl-C) has reached the job too, since it is in our process group, and is not sent again.

    Returns:
        The job's exit code, 128 + n where signal n ended it.

    Raises:
        LaunchFailed: the command cannot be started.
    """
    wanted = {*_FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    try:
        process = _start(command, variables, before)
        meanwhile()
        while process.poll() is None:
            _pass_on(process, signal.sigwaitinfo(wanted))
        _drop_pending(set(_FORWARDED))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _start(
    command: Sequence[str], variables: Mapping[str, str], mask: set[int | signal.Signals]
) -> subprocess.Popen[bytes]:
    def restore_signals() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        # preexec_fn is safe here: this process has no other thread yet (the analysis is imported after the job).
        return subprocess.Popen(  # noqa: S603  (running the user's command is what we are for)
            list(command),
            env={**os.environ, **variables},
            preexec_fn=restore_signals,  # noqa: PLW1509
        )
    except OSError as error:
        raise LaunchFailed(f"cannot start {command[0]}: {error.strerror}") from error


def _pass_on(process: subprocess.Popen[bytes], received: signal.struct_siginfo) -> None:
    if received.si_signo != signal.SIGCHLD and received.si_code != _SI_KERNEL:
        process.send_signal(received.si_signo)


def _drop_pending(signals: set[signal.Signals]) -> None:
    """Take what arrived with the job's end: the Ctrl-C that ended the job must not end the analysis too."""
    while signal.sigtimedwait(signals, 0):
        pass
