"""Stands in for ``sys.remote_exec`` of Python 3.14, in older ones: a signal has the process run a script.

Like there, it runs in the main thread between two instructions, in a namespace of its own. ``REMOTE_FOLDER`` is where
each rank says its process id (``pid<rank>``) and finds the name of the script (``script<pid>``).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path


def run_script(_signal, _frame):
    script = Path(os.environ["REMOTE_FOLDER"], f"script{os.getpid()}").read_text()
    exec(compile(Path(script).read_text(), script, "exec"), {})


if "RANK" in os.environ:
    signal.signal(signal.SIGUSR1, run_script)
    Path(os.environ["REMOTE_FOLDER"], f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
