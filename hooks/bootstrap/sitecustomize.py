"""Start-up hook of every Python under ``ppdiag run``: arms the recorder, then runs the user's own sitecustomize.

The folder of this file is first on PYTHONPATH, also for interpreters in which ppdiag is not installed. So it uses the
standard library alone, loads the package ``ppdiag`` from the folders around it and takes its folder off sys.path again.
PYTHONPATH itself stays, so that the processes that this one starts are armed too.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # not realpath: in a checkout the way here is the link ppdiag/hooks


def _load_package(name: str, folder: str) -> None:
    """Import the package in ``folder`` as ``name`` without having its parent folder on sys.path."""
    from importlib.util import module_from_spec, spec_from_file_location

    if name in sys.modules:  # the .pth file in site-packages came first, or a second bootstrap folder is on the path
        return
    init = os.path.join(folder, "__init__.py")
    spec = spec_from_file_location(name, init, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError("no package at " + folder, name=name)
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _package_folder(hooks_folder: str) -> str:
    """Folder of the package ``ppdiag``: around the hooks when installed, beside them in a checkout without links."""
    around = os.path.dirname(hooks_folder)
    beside = os.path.join(around, "ppdiag")
    return around if os.path.exists(os.path.join(around, "rundir.py")) else beside


def _arm() -> None:
    """Arm the recorder; whatever goes wrong costs the job one line on stderr and nothing else."""
    try:
        hooks_folder = os.path.dirname(_HERE)
        _load_package("ppdiag", _package_folder(hooks_folder))
        _load_package("ppdiag.hooks", hooks_folder)
        from ppdiag.hooks.install import arm

        arm()
    except Exception as error:
        _say(f"ppdiag: not recording in process {os.getpid()}: {type(error).__name__}: {error}\n")


def _say(line: str) -> None:
    try:
        sys.stderr.write(line)
    except Exception:  # stderr may be closed or None; the job comes first
        return


def _run_next_sitecustomize() -> None:
    """Import the sitecustomize that Python would have run without us.

    Where there is none, the ImportError goes on to ``site``, which takes it as it takes any missing sitecustomize. So
    do the errors of the user's own file, which ``site`` reports as always.
    """
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(str(entry)) != _HERE]
    sys.modules.pop("sitecustomize", None)
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  (the next on sys.path, no longer this file)


if os.environ.get("PPDIAG_RUN_DIR"):
    _arm()
if __name__ == "sitecustomize":
    _run_next_sitecustomize()
