"""What is shipped, and who may import whom."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PARTS = ("hooks", "analyzers", "reports")
WORDS_OF_THE_HOOKS = {"ppdiag.model", "ppdiag.rundir", "ppdiag.errors"}
TRAINING_SIDE = sorted(
    [
        *(path for path in (REPOSITORY / "hooks").rglob("*.py")),
        *(REPOSITORY / "ppdiag" / f"{name}.py" for name in ("__init__", "model", "rundir", "errors")),
    ]
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of the files that git knows or would take, built with the setuptools that is here."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / name).exists():  # a file that was removed and is not yet committed
            shutil.copy(REPOSITORY / name, source / name, follow_symlinks=False)
    output = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(output),
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, env={**os.environ, "PYTHONWARNINGS": ""}, timeout=120)
    return zipfile.ZipFile(next(output.glob("*.whl")))


def test_nothing_generic_lands_in_site_packages(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"ppdiag", "ppdiag.pth"}


def test_the_wheel_holds_each_file_of_the_four_folders_once(wheel):
    shipped = sorted(name for name in wheel.namelist() if name.startswith("ppdiag/"))
    expected = [f"ppdiag/{path.name}" for path in (REPOSITORY / "ppdiag").glob("*.py")]
    expected += [f"ppdiag/commands/{path.name}" for path in (REPOSITORY / "ppdiag" / "commands").glob("*.py")]
    for part in PARTS:
        files = (path for path in (REPOSITORY / part).rglob("*") if path.suffix in {".py", ".html", ".js", ".css"})
        expected += [f"ppdiag/{path.relative_to(REPOSITORY)}" for path in files]
    assert shipped == sorted([*expected, "ppdiag/py.typed"])


def test_the_pth_looks_for_the_run_directory_before_all_else(wheel):
    line = wheel.read("ppdiag.pth").decode()
    assert line.startswith('import os; os.environ.get("PPDIAG_RUN_DIR") and ')
    assert line.count("\n") == 1


@pytest.mark.parametrize(("variables", "armed"), [({}, False), ({"PPDIAG_RUN_DIR": "/run"}, True)])
def test_the_pth_arms_inside_a_job_only(wheel, variables, armed, tmp_path):
    package = tmp_path / "ppdiag" / "hooks"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "install.py").write_text("def arm(): print('armed')")
    (tmp_path / "ppdiag.pth").write_bytes(wheel.read("ppdiag.pth"))
    snippet = "import site, sys; site.addsitedir(sys.argv[1])"
    command = [sys.executable, "-I", "-S", "-c", snippet, str(tmp_path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == ("armed\n" if armed else "")


def test_a_pth_whose_package_is_broken_costs_one_line(wheel, tmp_path):
    (tmp_path / "ppdiag").mkdir()
    (tmp_path / "ppdiag" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "ppdiag.pth").write_bytes(wheel.read("ppdiag.pth"))
    # What site does with a line of a .pth that begins with import.
    snippet = (
        "import sys; sys.path.insert(0, sys.argv[1]); exec(open(sys.argv[1] + '/ppdiag.pth').read()); print('ran')"
    )
    command = [sys.executable, "-I", "-S", "-c", snippet, str(tmp_path)]
    done = subprocess.run(command, env={"PPDIAG_RUN_DIR": "/run"}, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("ran\n", "ppdiag: not recording: RuntimeError()\n")


@pytest.mark.parametrize("part", PARTS)
def test_a_link_makes_the_checkout_look_installed(part):
    assert (REPOSITORY / "ppdiag" / part).readlink() == Path("..", part)


def test_every_folder_with_code_is_a_package_that_is_listed():
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    folders = {init.parent for part in PARTS for init in (REPOSITORY / part).rglob("__init__.py")}
    assert listed == {"ppdiag", "ppdiag.commands"} | {
        ".".join(("ppdiag", *folder.relative_to(REPOSITORY).parts)) for folder in folders
    }


def _imports(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports, those inside functions too; not those for type checkers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in _without_type_checking(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= _imported_from(node)
    return names


def _imported_from(node: ast.ImportFrom) -> set[str]:
    module = node.module or ""
    if module in {"ppdiag", "ppdiag.hooks"}:
        return {f"{module}.{alias.name}" for alias in node.names}
    return {module}


def _without_type_checking(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return []
    return [node, *(inner for child in ast.iter_child_nodes(node) for inner in _without_type_checking(child))]


@pytest.mark.parametrize("path", TRAINING_SIDE, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_the_training_side_imports_the_standard_library_and_three_files_of_words(path):
    foreign = {name for name in _imports(path) if name.split(".")[0] not in sys.stdlib_module_names}
    ours = {name for name in foreign if name == "ppdiag" or name.startswith("ppdiag.")}
    # torch is looked up by hooks that run after the job itself has imported it; sitecustomize is the user's own; nvtx
    # and pynvml are imported once the job uses CUDA, and may be missing.
    assert {name.split(".")[0] for name in foreign - ours} <= {"torch", "sitecustomize", "nvtx", "pynvml"}
    assert {name for name in ours if not name.startswith("ppdiag.hooks")} <= WORDS_OF_THE_HOOKS


def test_no_hook_imports_torch_when_it_is_itself_imported(checkout_environment):
    names = [
        ".".join(("ppdiag", *path.relative_to(REPOSITORY).with_suffix("").parts))
        for path in TRAINING_SIDE
        if path.is_relative_to(REPOSITORY / "hooks") and "bootstrap" not in path.parts and path.stem != "__init__"
    ]
    snippet = (
        f"import importlib, sys; [importlib.import_module(name) for name in {names}]; print('torch' in sys.modules)"
    )
    command = [sys.executable, "-S", "-c", snippet]  # -S: nothing but the standard library and this checkout
    done = subprocess.run(command, env=checkout_environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_the_contracts_of_who_imports_whom_hold(checkout_environment):
    if importlib.util.find_spec("importlinter") is None:
        pytest.skip("import-linter is not installed")
    snippet = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"
    command = [sys.executable, "-c", snippet]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=checkout_environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_no_command_needs_the_analysis_to_show_its_help(checkout_environment):
    snippet = (
        "import sys; from ppdiag.cli import main\n"
        "from ppdiag.commands import COMMANDS\n"
        "for name in COMMANDS.names(): main([name, '--help'], standalone_mode=False)\n"
        "print({'numpy', 'pandas', 'torch', 'matplotlib', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", snippet], env=checkout_environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"
