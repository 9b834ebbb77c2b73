"""What can go wrong, each with a slug (a section of docs/messages.md) and the exit code of the command line.

Only the click group turns these into one line and an exit code. In the training process nothing is raised.
"""

from __future__ import annotations


class PpdiagError(Exception):
    """Base of all errors that a user can cause or meet; the message names what was expected, found and what to do."""

    slug = "error"
    exit_code = 1


class PathNotFound(PpdiagError):
    """A file or directory named by the user does not exist."""

    slug = "path-not-found"
    exit_code = 4


class CannotRead(PpdiagError):
    """A file exists, and the system does not let it be read."""

    slug = "cannot-read"
    exit_code = 4


class NotARun(PpdiagError):
    """The path holds no record that any of the sources can read."""

    slug = "not-a-run"
    exit_code = 4


class NothingRecorded(PpdiagError):
    """A run directory in which no rank ever reported."""

    slug = "nothing-recorded"
    exit_code = 4


class NoPipelineFound(PpdiagError):
    """A record without pipeline stages, or without one complete step."""

    slug = "no-pipeline-found"
    exit_code = 4


class BadRecord(PpdiagError):
    """A file of a run is not what its name says, and nothing in it can be used."""

    slug = "bad-record"
    exit_code = 5


class VersionMismatch(PpdiagError):
    """A record was written by a version of ppdiag whose format this one does not know."""

    slug = "version-mismatch"
    exit_code = 5


class MissingPackage(PpdiagError):
    """A format needs a package that is an extra and is not installed."""

    slug = "missing-package"
    exit_code = 5


class LaunchFailed(PpdiagError):
    """The job's command could not be started, or the run directory could not be made."""

    slug = "launch-failed"
    exit_code = 6


class NotComparable(PpdiagError):
    """A condition on the change between two runs whose steps do not do the same work."""

    slug = "not-comparable"
    exit_code = 4


class NoAnswer(PpdiagError):
    """A running job does not answer: it has ended, was not started to be woken, or takes long."""

    slug = "no-answer"
    exit_code = 6


class AttachFailed(PpdiagError):
    """A running process cannot be armed."""

    slug = "attach-failed"
    exit_code = 6


class BadCondition(PpdiagError):
    """A ``--fail-on`` condition cannot be read."""

    slug = "bad-condition"
    exit_code = 2


class OutputFailed(PpdiagError):
    """A report cannot be written where the user wants it."""

    slug = "output-failed"
    exit_code = 6


class BadShape(PpdiagError):
    """A pipeline, model or cluster of numbers that cannot be, such as a schedule of a shape that it does not have."""

    slug = "bad-shape"
    exit_code = 2


class BadConfig(PpdiagError):
    """A framework's configuration that a command names cannot be read."""

    slug = "bad-config"
    exit_code = 2
