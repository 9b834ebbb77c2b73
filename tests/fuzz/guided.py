"""The same, led by coverage: ``python -m tests.fuzz.guided --source flight_recorder --seconds 600`` (needs atheris).

Atheris changes one file of a good recording, and keeps what reaches new code of the reader. It finds what blind changes
do not reach in readers that are written in Python (pickles, Perfetto's messages, spans); what msgspec, sqlite and
pyarrow decode it cannot see into. The first recording on which something goes wrong ends it: that file is kept.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = ("-timeout=10", "-rss_limit_mb=2048", "-max_len=1000000")


def reader_of(source: str, name: str, folder: Path) -> Callable[[bytes], None]:
    """What reads a recording of the source in which the file of this name has other bytes.

    All of ppdiag is imported here, so that it is instrumented.
    """
    from ppdiag.analyzers.sources import SOURCES
    from ppdiag.errors import PpdiagError
    from tests.fuzz.check import Watch, write
    from tests.fuzz.seeds import sealed, seeds_of

    reader, watch = SOURCES.load(source), Watch()
    recordings = seeds_of(source)
    name = name or min(recordings[0])
    write(folder / "recording", next(files for files in recordings if name in files))
    write(folder / "begin", {str(n): files[name] for n, files in enumerate(recordings) if name in files})
    place = folder / "recording"
    paths = [place] if source == "run_directory" else sorted(place.iterdir())

    def one(data: bytes) -> None:
        (place / name).write_bytes(sealed(name, data))
        watch.seen.clear()
        watch.folder = str(place)
        said = ""
        try:
            if all(reader().recognises(path) for path in paths):
                reader().read(paths, None)
        except PpdiagError as error:
            said = str(error)
        finally:
            watch.folder = None
        if "\n" in said or watch.seen:
            raise AssertionError(said, watch.seen)

    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", required=True)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--file", default="", help="name of the file that is changed; the first if not given")
    args = parser.parse_args()
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris")
    with TemporaryDirectory(prefix="ppdiag-guided-") as place:
        with atheris.instrument_imports(include=["ppdiag"]):
            one = reader_of(args.source, args.file, Path(place))
        atheris.Setup([sys.argv[0], f"-max_total_time={args.seconds}", *LIMITS, f"{place}/begin"], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
