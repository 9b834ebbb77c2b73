"""Small good recordings of every source, from which bad ones are made.

A source without a row of its own is fed with the smallest files of ``tests/data`` that it recognises.
"""

from __future__ import annotations

import functools
import gzip
import json
import shutil
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ppdiag.analyzers import schedules
from ppdiag.analyzers.sources import SOURCES
from ppdiag.rundir import BLOCK_HEADER, BLOCK_MAGIC
from tests.analyzers.factory import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppdiag.trace import Trace

DATA = Path(__file__).parents[1] / "data"
MOST_BYTES = 60_000
"""Of a file that is found and not made."""

Files = dict[str, bytes]
"""A recording: its files by name."""


def small_pipeline(ranks: int = 2) -> Trace:
    orders = schedules.order("1F1B", ranks=ranks, chunks=1, microbatches=2)
    return Pipeline(orders, list(range(ranks)), steps=3, rendezvous=True).trace()


def run_directory(folder: Path) -> None:
    from tests.analyzers.runs import write_run

    write_run(folder, small_pipeline())


def exported_chrome(folder: Path) -> None:
    from ppdiag.reports import chrome
    from tests.reports.exports import make_export

    with (folder / "trace.json").open("w") as stream:
        chrome.write(make_export(), stream)


def exported_perfetto(folder: Path) -> None:
    from ppdiag.reports import perfetto
    from tests.reports.exports import make_export

    with (folder / "trace.perfetto").open("wb") as stream:
        perfetto.write(make_export(), stream)


def megascan(folder: Path) -> None:
    from tests.analyzers.sources.test_megascan import pipeline_of

    (folder / "trace.json").write_text(json.dumps(pipeline_of(iterations=3)))


def straggler_analysis(folder: Path) -> None:
    import pandas as pd

    table = pd.read_parquet(DATA / "straggler_analysis" / "trace-ST.parquet")
    table[table["step"] == table["step"].min()].to_parquet(folder / "trace-ST.parquet")
    shutil.copy(DATA / "straggler_analysis" / "meta-ST.yaml", folder)


def ndtimeline(folder: Path) -> None:
    from tests.analyzers.sources.test_ndtimeline import write

    write(folder, small_pipeline(), hosts=((0,), (1,)))


def kineto_device(folder: Path) -> None:
    from tests.analyzers.sources.kineto_factory import write_job

    write_job(folder, steps=2, labels="none")


def kineto_merged(folder: Path) -> None:
    """Both ranks in one file, told apart by what was added to the ids of their processes."""
    from tests.analyzers.sources.kineto_factory import write_job

    events = []
    for rank, path in enumerate(write_job(folder, steps=2, labels="none")):
        found = json.loads(path.read_text())["traceEvents"]
        events += [{**event, "pid": event["pid"] + 1000 * rank} for event in found]
        path.unlink()
    (folder / "merged.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))


def kineto_host(folder: Path) -> None:
    """A step of a real trace of gloo, in Kineto's own layout."""
    for rank in (0, 1):
        text = gzip.decompress((DATA / "kineto" / "gloo" / f"1F1B-rank{rank}.json.gz").read_bytes())
        end = text.index(b"\n  }", 40_000)
        (folder / f"rank{rank}.json").write_bytes(text[:end] + b"\n  }\n  ]}")


def kineto_packed(folder: Path) -> None:
    shutil.copy(DATA / "kineto" / "hta_amd_trace_mi250_minitoy_train_ROCm6_2_kineto.json.gz", folder / "rank0.json.gz")
    shutil.copy(DATA / "kineto" / "hta_critical_path_cuda_event_sync_event_sync_trace.json.gz", folder)


def nsight_systems(folder: Path) -> None:
    from tests.analyzers.sources.nsight_exports import write

    trace = small_pipeline()
    write(folder / "job.sqlite", trace, sorted(trace.ranks))


def nccl_inspector(folder: Path) -> None:
    from tests.analyzers.sources.test_nccl_inspector import write

    write(folder, (10.0, 20.0), calls=3)


def flight_recorder(folder: Path) -> None:
    for name in ("_dump_0", "_dump_4"):
        shutil.copy(DATA / "flight_recorder" / "gpu_error_1st" / name, folder)


SEEDS: dict[str, tuple[Callable[[Path], None], ...]] = {
    "run_directory": (run_directory,),
    "exported": (exported_chrome, exported_perfetto),
    "megascan": (megascan,),
    "straggler_analysis": (straggler_analysis,),
    "ndtimeline": (ndtimeline,),
    "kineto": (kineto_device, kineto_merged, kineto_host, kineto_packed),
    "nsight_systems": (nsight_systems,),
    "nccl_inspector": (nccl_inspector,),
    "flight_recorder": (flight_recorder,),
}


@functools.cache
def seeds_of(source: str) -> tuple[Files, ...]:
    """The good recordings of a source."""
    found = []
    for make in SEEDS.get(source, ()):
        with TemporaryDirectory() as name:
            make(Path(name))
            found.append({path.name: path.read_bytes() for path in sorted(Path(name).iterdir())})
    return tuple(found) or tuple({path.name: path.read_bytes()} for path in _found(source))


def _found(source: str) -> list[Path]:
    reader = SOURCES.load(source)()
    small = sorted((path.stat().st_size, path) for path in DATA.rglob("*") if path.is_file())
    return [path for size, path in small if size < MOST_BYTES and reader.recognises(path)][:3]


def sealed(name: str, data: bytes) -> bytes:
    """A file of spans with checksums that fit what is in it, so that what is behind the checksum is tried too."""
    if not name.endswith(".spans"):
        return data
    found, at = bytearray(data), data.find(BLOCK_MAGIC)
    while at >= 0 and at + BLOCK_HEADER.size <= len(found):
        end = found.find(BLOCK_MAGIC, at + 1)
        payload = bytes(found[at + BLOCK_HEADER.size : end if end >= 0 else len(found)])
        magic, count, _ = BLOCK_HEADER.unpack_from(found, at)
        BLOCK_HEADER.pack_into(found, at, magic, count, zlib.crc32(payload))
        at = end
    return bytes(found)
