"""Breaks the recorder from inside, to test that it does no harm: run after its start-up file, as a user's would be.

``SABOTAGE`` says how:

* ``raise:MODULE:NAME:N``: the function (or ``Class.method``) of that module of the hooks raises in its Nth call and all
  later ones.
* ``slow:MODULE:NAME:MS``: the function takes so much longer.
* ``missing:MODULE:NAME``: while the hooks patch the framework's module, it has no such attribute, as after an upgrade.
* ``jump:N``: the clock that the hooks read goes back by ten seconds at its Nth reading.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time

HOOKS = "ppdiag.hooks."


def raising(original, nth):
    calls = itertools.count(1)

    def planted(*args, **kwargs):
        if next(calls) >= nth:
            raise LookupError("planted in " + original.__qualname__)
        return original(*args, **kwargs)

    return planted


def slow(original, seconds):
    def planted(*args, **kwargs):
        time.sleep(seconds)
        return original(*args, **kwargs)

    return planted


def replace_in(module, name, wrap):
    """Wrap the function once its module has been imported: in every module of the hooks that has bound it."""
    from ppdiag.hooks import install

    run_installers = install.run_installers
    done: list[bool] = []

    def run(*args, **kwargs):
        owner = sys.modules.get(HOOKS + module)
        if owner is None:
            __import__(HOOKS + module)
            owner = sys.modules[HOOKS + module]
        if not done:
            done.append(True)
            holder, _, method = name.rpartition(".")
            target = getattr(owner, holder) if holder else owner
            original = getattr(target, method)
            for other in [target, *(found for key, found in list(sys.modules.items()) if key.startswith(HOOKS))]:
                for bound, value in list(vars(other).items()):
                    if value is original:
                        setattr(other, bound, wrap(original))
        return run_installers(*args, **kwargs)

    setattr(install, "run_installers", run)  # noqa: B010  (mypy takes no other function there)


def hide(module, name):
    """Take the attribute away while the installers run."""
    from ppdiag.hooks import install

    run_installers = install.run_installers

    def run(watched, **kwargs):
        owner = sys.modules.get(module)
        hidden = vars(owner).pop(name, None) if owner is not None else None
        try:
            return run_installers(watched, **kwargs)
        finally:
            if hidden is not None:
                setattr(owner, name, hidden)

    setattr(install, "run_installers", run)  # noqa: B010  (mypy takes no other function there)


def jump(nth):
    real, readings = time.perf_counter_ns, itertools.count(1)

    def jumping():
        return real() - (10_000_000_000 if next(readings) >= nth else 0)

    time.perf_counter_ns = jumping


def main():
    how, *rest = os.environ.get("SABOTAGE", "").split(":")
    if how == "raise":
        replace_in(rest[0], rest[1], functools.partial(raising, nth=int(rest[2])))
    elif how == "slow":
        replace_in(rest[0], rest[1], functools.partial(slow, seconds=float(rest[2]) / 1e3))
    elif how == "missing":
        hide(*rest)
    elif how == "jump":
        jump(int(rest[0]))


if os.environ.get("SABOTAGE") and "ppdiag" in sys.modules:
    main()
