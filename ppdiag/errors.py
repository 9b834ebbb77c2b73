"""What can go wrong, each with a slug and the exit code of the command line.

A docstring is what the user reads of it (``ppdiag explain SLUG``, and docs/messages.md, which is made of them). Only
the click group turns these into one line and an exit code. In the training process nothing is raised.
"""

from __future__ import annotations


def see(slug: str) -> str:
    """What ends each message: where it is explained.

    >>> see("not-a-run")
    '(see ppdiag explain not-a-run)'
    """
    return f"(see ppdiag explain {slug})"


class PpdiagError(Exception):
    """A fault of ppdiag itself.

    What to do: run the command again as `ppdiag -v …`, which shows where it happened, and report it with that text.
    """

    slug = "error"
    exit_code = 1


class PathNotFound(PpdiagError):
    """A path that you named does not exist.

    What to do: look for a typing error; the default run directories are called `ppdiag-run-DATE-TIME`, in the
    directory from which `ppdiag run` was started.
    """

    slug = "path-not-found"
    exit_code = 4


class CannotRead(PpdiagError):
    """A file is there, and the system does not let it be read.

    What to do: the message has the reason, such as missing permission.
    """

    slug = "cannot-read"
    exit_code = 4


class NotARun(PpdiagError):
    """The path exists, but nothing in it is a record that ppdiag reads.

    What to do: name the run directory itself (the one with `run.json` in it), not the one above it. Several paths
    must be of one format. `ppdiag analyze --help` lists the formats.
    """

    slug = "not-a-run"
    exit_code = 4


class NothingRecorded(PpdiagError):
    """A run directory in which no rank ever reported.

    After `ppdiag run` this is said and the exit code is that of the job; of `ppdiag analyze` it is exit code 4.

    A rank reports when torch.distributed is set up and the first message, collective or pipeline op passes. So the
    usual reasons are:

    - **`python -S`**: Python then runs neither `sitecustomize` nor `.pth` files. Drop the option.
    - **`python -E` or `-I`**: Python then ignores PYTHONPATH. Drop the option, or install ppdiag into that
      environment.
    - **`env -i`, `sudo`, `docker run`, `ssh`**: the variables do not arrive. Set those that `ppdiag env DIR` prints
      on the other side.
    - **the job overwrites PYTHONPATH**: append to it, or install ppdiag into that environment.
    - **the job ended before its first step**: its own error is above the message.
    - **one process**: a job without `init_process_group` has no ranks to compare.
    """

    slug = "nothing-recorded"
    exit_code = 4


class NoPipelineFound(PpdiagError):
    """Ranks reported, but there are no pipeline stages in the record, or not one complete step.

    What to do: let the job run for at least three steps; the first ones are left out as warm-up. Where it stands still
    in its first step, the message says who waits for whom; see `ppdiag explain stuck-in-recv`. A job that is
    data-parallel only has no pipeline to explain.
    """

    slug = "no-pipeline-found"
    exit_code = 4


class BadRecord(PpdiagError):
    """A file of the run is not what its name says, and nothing in it can be used.

    Damage in the middle or at the end of a file is no such error: all that is whole around it is used, and a
    warning says how much was lost.

    What to do: copy the run directory again, in binary mode, if it was copied.
    """

    slug = "bad-record"
    exit_code = 5


class VersionMismatch(PpdiagError):
    """The record was written by a version of ppdiag whose format this one does not know.

    What to do: analyse it with the version that wrote it; `run.json` says which.
    """

    slug = "version-mismatch"
    exit_code = 5


class MissingPackage(PpdiagError):
    """The format of the file needs a Python package that ppdiag does not install by itself.

    What to do: install it as the message says, for example `pip install 'ppdiag[parquet]'` for `.parquet` files.
    """

    slug = "missing-package"
    exit_code = 5


class LaunchFailed(PpdiagError):
    """The command could not be started, or the run directory could not be made.

    The job has not run.

    What to do: the message names what failed. The program is the first word after `--`. A run directory must be
    new, empty or a run.
    """

    slug = "launch-failed"
    exit_code = 6


class NotComparable(PpdiagError):
    """`ppdiag compare --fail-on` was asked about two runs whose steps do not do the same work.

    With twice the microbatches, say, a longer step is no slower one. What can be compared has been printed.

    What to do: compare runs of one shape, or look at the time per microbatch in the table.
    """

    slug = "not-comparable"
    exit_code = 4


class NoAnswer(PpdiagError):
    """A running job does not do what `ppdiag record` asks for.

    The job is not affected.

    What to do: the message says which ranks did not answer. A rank answers when a step of its optimizer has ended,
    so that long steps need `--patience`. A job that was not started with `--dormant` records by itself; one that
    has ended cannot be woken.
    """

    slug = "no-answer"
    exit_code = 6


class AttachFailed(PpdiagError):
    """A process cannot be armed while it runs.

    The process is not affected.

    What to do: this needs Python 3.14 or later for ppdiag and for the job, the same user, and a process that runs
    Python code now and then. Otherwise start the job with `ppdiag run --dormant`, and wake it with `ppdiag record`.
    """

    slug = "attach-failed"
    exit_code = 6


class BadCondition(PpdiagError):
    """A `--fail-on` condition cannot be read.

    The job has not run.

    What to do: see [conditions](command-line.md#conditions).
    """

    slug = "bad-condition"
    exit_code = 2


class OutputFailed(PpdiagError):
    """A report could not be written where you wanted it.

    The record itself is not affected. `ppdiag run` looks before it starts the job: where the directory is missing, the
    job has not run.

    What to do: name another file, then run `ppdiag analyze` again (before the job: `ppdiag run`).
    """

    slug = "output-failed"
    exit_code = 6


class BadShape(PpdiagError):
    """A pipeline, model or cluster of numbers that cannot be.

    What to do: the message names the number. A schedule in a V has two stages a rank, GPipe and 1F1B have one; see
    [planning](planning.md).
    """

    slug = "bad-shape"
    exit_code = 2


class BadConfig(PpdiagError):
    """`ppdiag check` cannot read a configuration that the command names: no JSON, TOML or YAML, or too large.

    What to do: the message says where the file goes wrong. TOML takes Python 3.11, or the package tomli; YAML takes
    pyyaml.
    """

    slug = "bad-config"
    exit_code = 2
