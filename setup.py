"""Adds to the wheel what setup.cfg cannot: a .pth file at the root of site-packages that arms the recorder.

PYTHONPATH, the first way in, does not reach ``python -E``, ``python -I`` and jobs that overwrite it; a .pth does. It
costs every start of that Python one look-up in os.environ, and does nothing outside a job of ``ppdiag run``.
"""

import base64
import hashlib
import zipfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

PTH_NAME = "ppdiag.pth"
PTH = (
    'import os; os.environ.get("PPDIAG_RUN_DIR") and exec("'
    r"try:\n from ppdiag.hooks.install import arm\n arm()\n"
    r"except Exception as error:\n import sys\n sys.stderr.write('ppdiag: not recording: %r\\n' % error)"
    '")\n'
)


class BuildWithPth(build_py):
    """Puts the .pth beside the packages, that is, at the root of site-packages."""

    def run(self) -> None:
        """Build, then write the .pth."""
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, PTH_NAME).write_text(PTH)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:  # noqa: FBT001, FBT002  (setuptools' signature)
        """All that is built, the .pth with it."""
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, PTH_NAME))]


class EditableWithPth(editable_wheel):
    """Editable wheels hold no built files, so that the .pth is added to the finished wheel, as coverage.py does."""

    def run(self) -> None:
        """Build, then add the .pth and its line in RECORD."""
        super().run()
        wheel = max(Path(self.dist_dir).glob("*.whl"), key=lambda path: path.stat().st_mtime)
        _add_to_wheel(wheel, PTH_NAME, PTH.encode())


def _add_to_wheel(wheel: Path, name: str, content: bytes) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    record = next(member for member in members if member.endswith(".dist-info/RECORD"))
    members[record] += f"{name},sha256={digest},{len(content)}\n".encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in {name: content, **members}.items():
            archive.writestr(member, data)


setup(cmdclass={"build_py": BuildWithPth, "editable_wheel": EditableWithPth})
